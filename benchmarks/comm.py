"""Time of an all-reduce over the ranks of this host, or of a job: `torchrun … -m benchmarks comm`.

Each size is a turn, and rounds take the turns in a rotating order, so that whatever else the hosts do falls
on all sizes. A turn is as many all-reduces as fill a twentieth of a second; they are waited for together on a
GPU, so that small ones are timed as a training has them: one behind the other. Time is the slowest rank's.
Bus bandwidth is algorithm bandwidth (bytes of the message per second) times 2 (n - 1) / n, as nccl-tests
defines it (doc/PERFORMANCE.md there; see `comm_fit.bus_factor`).
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.comm_fit import CommResult, Timed, bus_factor, fitted, parsed_sizes
from benchmarks.conditions import conditions
from benchmarks.options import add_rounds, at_least_one
from benchmarks.paired import interleaved, median_interval
from trainer.distributed.parallel import World, gather_rows, joined_world
from trainer.errors import EXIT_DONE, EXIT_NOT_MEASURED, BadInputError
from trainer.observe.text import duration, number, size

_TURN_SECONDS = 0.05
_MOST_REPEATS = 2000
_TIMEOUT_SECONDS = 120.0
_ALONE = "nothing measured: one rank has nobody to talk to"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    bench.add_argument(
        "--nproc-per-node",
        type=at_least_one,
        metavar="N",
        help="ranks of this host (default: its GPUs, or 2)",
    )
    bench.add_argument("--sizes", default="", metavar="LIST", help="such as 4K,1M (default: 4K to 256M)")
    bench.add_argument("--dtypes", default="fp32", metavar="LIST", help="fp32,bf16 (default: fp32)")
    bench.add_argument("--backend", choices=("gloo", "nccl", "auto"), default="auto", help="(default: auto)")
    add_rounds(bench, 11)
    bench.add_argument("--limit", type=float, metavar="GBPS", help="the link's limit in Gbit/s, to compare")
    bench.add_argument("--json", action="store_true", help="print JSON")
    bench.set_defaults(run=bench_comm)


def bench_comm(options: argparse.Namespace) -> int:
    """Measures, as a rank of torchrun or by starting one with the ranks of this host; rank 0 prints.

    Returns:
        0, or 3 if one rank has nobody to talk to; torchrun's code if it fails.

    Raises:
        BadInputError: If an option can't be.
    """
    kind = _kind(options)
    dtypes, sizes = _checked(options, kind)
    if "RANK" not in os.environ:
        ranks = options.nproc_per_node or (torch.cuda.device_count() if kind == "cuda" else 2)
        if ranks == 1:
            print(_ALONE)
            return EXIT_NOT_MEASURED
        return _started(ranks)
    with joined_world(kind, _TIMEOUT_SECONDS) as world:
        if world.group is None:
            print(_ALONE)
            return EXIT_NOT_MEASURED
        timed = all_reduces(world, sizes, dtypes, options.rounds)
        hosts = -(-world.size // int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))
        backend = "nccl" if kind == "cuda" else "gloo"
        fit = fitted(next(iter(timed.values())))
        limit = None if options.limit is None else options.limit * 1e9 / 8
        found = CommResult(world.size, hosts, backend, conditions(), timed, fit, limit)
        if world.rank == 0:
            print(json.dumps(as_json(found), indent=2) if options.json else as_text(found, options.rounds))
    return EXIT_DONE


def _started(ranks: int) -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1"]
    words = [*start, "--master-port", str(port), "-m", "benchmarks", *sys.argv[1:]]
    return subprocess.run([sys.executable, *words], check=False).returncode


def _kind(options: argparse.Namespace) -> Any:
    if options.backend == "nccl" and not torch.cuda.is_available():
        raise BadInputError("--backend nccl: no usable GPU was found; gloo needs none")
    return "cpu" if options.backend == "gloo" or not torch.cuda.is_available() else "cuda"


def _checked(options: argparse.Namespace, kind: str) -> tuple[list[str], list[int]]:
    if options.limit is not None and not 0 < options.limit < 1e6:
        raise BadInputError(f"--limit {options.limit:g}: give Gbit/s, above 0")
    dtypes = [word.strip() for word in options.dtypes.split(",")]
    if unknown := [word for word in dtypes if word not in _DTYPES]:
        raise BadInputError(f"--dtypes {unknown[0]}: give fp32, bf16 or both: fp32,bf16")
    return dtypes, parsed_sizes(options.sizes, cpu=kind == "cpu")


def all_reduces(
    world: World, sizes: Sequence[int], dtypes: Sequence[str], rounds: int
) -> dict[str, list[Timed]]:
    """Times each size of each dtype; the same figures on every rank.

    Raises:
        SystemExit: With a line for people, if a sum is wrong.
    """
    found = {}
    for name in dtypes:
        dtype = _DTYPES[name]
        buffer = torch.empty(sizes[-1] // dtype.itemsize, dtype=dtype, device=world.device)
        turns = [_turn(buffer[: size // dtype.itemsize], world) for size in sizes]
        seconds = interleaved(turns, rounds, shown=False)
        # The slowest rank's time is the all-reduce's: a step goes on when all have the sum.
        row = torch.tensor([value for series in seconds for value in series], dtype=torch.float64)
        slowest = gather_rows(world, row).cpu().amax(0).view(len(sizes), -1).tolist()
        found[name] = [
            Timed(size, *median_interval(series)) for size, series in zip(sizes, slowest, strict=True)
        ]
        del buffer, turns
    return found


def _turn(part: torch.Tensor, world: World) -> Callable[[], float]:
    """Returns a function that runs some all-reduces of a tensor and returns the seconds per all-reduce."""

    def wait() -> None:
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)

    def turn(repeats: int) -> float:
        dist.barrier(world.control)
        began = time.perf_counter()
        for _ in range(repeats):
            dist.all_reduce(part, group=world.group)
        wait()
        return (time.perf_counter() - began) / repeats

    part.fill_(world.rank + 1)
    dist.all_reduce(part, group=world.group)
    wait()
    right = world.size * (world.size + 1) / 2
    if not bool((part == right).all()):
        raise SystemExit(f"wrong: an all-reduce of {part.nbytes} bytes isn't the sum of the ranks' values")
    part.zero_()  # sums of it stay what they are, whatever the number of all-reduces
    first = torch.tensor([statistics.median(turn(1) for _ in range(3))], dtype=torch.float64)
    dist.all_reduce(first, op=dist.ReduceOp.MAX, group=world.control)
    return partial(turn, max(1, min(_MOST_REPEATS, round(_TURN_SECONDS / max(float(first), 1e-9)))))


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
        "limit_bytes_per_s": found.limit,
        "share_of_limit": found.best / found.limit if found.limit else None,
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
    factor, fit = bus_factor(found.ranks), found.fit
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
    if found.limit:
        share = found.best / found.limit
        lines.append(f"limit: {found.limit / 1e9:.3g} GB/s; the best bus bandwidth is {share:.0%} of it")
    return "\n".join(lines).replace("\u00a0", " ")


def _time(seconds: float) -> str:
    return f"{number(seconds * 1e6, 3)} us" if seconds < 1e-3 else duration(seconds)
