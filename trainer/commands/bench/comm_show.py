"""What `trainer bench comm` says: a table, JSON, or the lines of a preflight."""

import argparse
import json
import platform
from collections.abc import Mapping
from typing import Any

from trainer.commands.bench.comm_fit import CommResult, Timed, bus_factor, fitted
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_NOT_MEASURED
from trainer.observe.text import duration, number, size

ALONE = {
    "nccl": "one GPU has nobody to talk to; --backend gloo --nproc-per-node 2 measures this host's loopback",
    "gloo": "one rank has nobody to talk to: give --nproc-per-node 2",
}


def show(told: Mapping[str, Any], options: argparse.Namespace, backend: str, shown: bool) -> int:
    """Prints what the ranks found, and judges.

    Args:
        told: Of `trainer.commands.bench.comm_rank.of_rank`.
        options: Of the command.
        backend: That was used.
        shown: Whether this process is the one that prints.
    """
    if options.preflight:
        return _show_preflight(told, options, shown)
    if told["ranks"] == 1:
        if shown:
            print(f"nothing measured: {ALONE[backend]}")
        return EXIT_NOT_MEASURED
    if not shown:
        return EXIT_DONE
    timed = {name: [Timed(*one) for one in series] for name, series in told["timed"].items()}
    limit: tuple[float | None, str] = (told["limit"][0], told["limit"][1])
    if options.limit is not None:
        limit = options.limit * 1e9 / 8, f"--limit, {options.limit:g} Gbit/s"
    fit = fitted(next(iter(timed.values())))
    found = CommResult(told["ranks"], told["hosts"], backend, told["conditions"], timed, fit, limit)
    print(json.dumps(as_json(found), indent=2) if options.json else as_text(found, options.rounds))
    return EXIT_DONE


def as_json(found: CommResult) -> dict[str, Any]:
    """alpha_s and bytes_per_s are of the message: t = alpha_s + bytes / bytes_per_s for these ranks."""
    fit, factor = found.fit, bus_factor(found.ranks)
    return {
        "alpha_s": fit.alpha_s if fit else None,
        "bytes_per_s": fit.bytes_per_s if fit else None,
        "ranks": found.ranks,
        "hosts": found.hosts,
        "backend": found.backend,
        "median_error": fit.median_error if fit else None,
        "worst_error": fit.worst_error if fit else None,
        "latency_s": found.latency.seconds,
        "limit_bytes_per_s": found.limit[0],
        "limit": found.limit[1],
        "share_of_limit": found.best / found.limit[0] if found.limit[0] else None,
        "conditions": found.conditions,
        "sizes": [
            {
                "dtype": name,
                **one._asdict(),
                "algorithm_bytes_per_s": one.algorithm,
                "bus_bytes_per_s": factor * one.algorithm,
            }
            for name, series in found.timed.items()
            for one in series
        ],
    }


def as_text(found: CommResult, rounds: int) -> str:
    """The table, and what it says."""
    factor, fit, limit = bus_factor(found.ranks), found.fit, found.limit
    hosts = f"{found.hosts} host{'s' * (found.hosts > 1)}"
    lines = [
        found.conditions,
        f"all-reduce (sum) over {found.ranks} ranks on {hosts}, {found.backend}: the slowest rank's time, "
        f"median of {rounds} interleaved rounds",
        "| message | dtype | time | 95 % interval | algorithm GB/s | bus GB/s |",
        "|---|---|---|---|---|---|",
    ]
    for name, series in found.timed.items():
        lines += [
            f"| {size(one.bytes)} | {name} | {_time(one.seconds)} | {_time(one.low)} to {_time(one.high)} | "
            f"{one.algorithm / 1e9:.3g} | {factor * one.algorithm / 1e9:.3g} |"
            for one in series
        ]
    lines.append(f"latency ({size(found.latency.bytes)}): {_time(found.latency.seconds)}")
    if fit is None:
        lines.append("no line fits these sizes: give more of them")
    else:
        speed = f"{fit.bytes_per_s / 1e9:.3g}"
        lines.append(
            f"fit: time = {_time(fit.alpha_s)} + bytes / {speed} GB/s; it is off by {fit.median_error:.0%} "
            f"(median of the sizes), at most by {fit.worst_error:.0%} ({size(fit.worst_bytes)})"
        )
    lines.append(f"limit: {limit[1]}")
    if limit[0]:
        lines[-1] = (
            f"limit: {limit[0] / 1e9:.3g} GB/s ({limit[1]}); the best bus bandwidth is "
            f"{found.best / limit[0]:.0%} of it"
        )
    return "\n".join(lines).replace("\u00a0", " ")


def _time(seconds: float) -> str:
    return f"{number(seconds * 1e6, 3)} us" if seconds < 1e-3 else duration(seconds)


def _show_preflight(told: Mapping[str, Any], options: argparse.Namespace, shown: bool) -> int:
    from trainer.commands.bench.preflight_verdict import Host, Pair, usual, verdict

    if "alone" in told:  # of a rank that nobody else can speak for
        print(
            f"trainer: {told['alone']}: check whether the master is up, its name, its port, and the network"
        )
        return EXIT_FAILED
    hosts, pairs = [Host(*host) for host in told["hosts"]], [Pair(*pair) for pair in told["pairs"]]
    lines = verdict(told, options.seconds)
    if shown and options.json:
        found = {"hosts": [host._asdict() for host in hosts], "links": [pair._asdict() for pair in pairs]}
        print(json.dumps({**found, "missing": told["missing"], "verdict": lines}, indent=2))
    elif shown:
        rate, trip = usual(pairs)
        several = len({(host.name, host.address) for host in hosts}) > 1
        usually = f"{rate * 8 / 1e9:.3g} Gbit/s, a round trip {trip * 1e3:.3g} ms"
        ends = f"{len(hosts)} hosts" if several else f"{len(hosts)} ranks of {platform.node()}"
        measured = f"; usual is {usually}" * bool(rate)
        judged = "" if lines or not pairs else ": none is slow or dead"
        print(
            "\n".join(
                [*lines, f"{len(pairs)} link{'s' * (len(pairs) != 1)} between {ends} tried{judged}{measured}"]
            )
        )
    if lines:
        return EXIT_FAILED
    return EXIT_DONE if pairs else EXIT_NOT_MEASURED
