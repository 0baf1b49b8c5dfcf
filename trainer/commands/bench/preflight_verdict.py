"""What the links of a preflight say: which of them is slow or dead, or which host."""

import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trainer.commands.bench.links import Link
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_NOT_MEASURED

_SLOW = 0.5  # of what links usually carry here
_LATE = 3.0  # times their usual round trip
_LATE_SECONDS = 3e-4  # and by so much: below, it may be a host's scheduler and not the link
_SLOW_OF_INTERFACE = 0.5  # with a single link, of what its interface says
_JUDGED_BITS = 10e9  # up to this an interface's speed can be reached by a TCP stream of Python


class Host(NamedTuple):
    """An end of links: a host, or on one host alone a rank.

    Attributes:
        rank: The rank that stands for it.
        name: Of the host.
        address: At which it is reached.
        port: Where it listens.
        interface: That has the address; may be empty.
        speed: What the interface says, in bytes per second; None if it doesn't.
    """

    rank: int
    name: str
    address: str
    port: int = 0
    interface: str = ""
    speed: float | None = None


class Pair(NamedTuple):
    """A link.

    Attributes:
        one: Rank of one end.
        other: Rank of the other.
        seconds: Median round trip; None if the link is dead.
        forth: Bytes per second from one to the other; None if unknown.
        back: The same from the other to one.
        why: Of a dead link, what happened.
    """

    one: int
    other: int
    seconds: float | None
    forth: float | None
    back: float | None
    why: str = ""

    @property
    def bytes_per_s(self) -> float:
        """Of the slower direction; 0 for a dead link."""
        known = [rate for rate in (self.forth, self.back) if rate is not None]
        return min(known) if known and self.seconds is not None else 0.0


def pair_of_ends(one: Host, other: Host, at_one: Link, at_other: Link) -> Pair:
    """A link by what both ends say of it; it is dead if either got no round trip."""
    if at_one.seconds is None or at_other.seconds is None:
        reasons = [link.why for link in (at_other, at_one) if link.seconds is None and link.why]
        # An error says more than that nothing came.
        why = next((reason for reason in reasons if reason != "no answer"), "no answer")
        return Pair(one.rank, other.rank, None, None, None, why)
    return Pair(one.rank, other.rank, at_other.seconds, at_other.received, at_one.received)


def rounds_of(hosts: Sequence[Host]) -> list[list[tuple[Host, Host]]]:
    """Every pair once, in rounds.

    Several hosts: the circle method, in which each host has at most one partner in a round. Ranks of one
    host share its CPUs: one pair in a round.
    """
    if len({(host.name, host.address) for host in hosts}) == 1:
        return [[(a, b)] for number, a in enumerate(hosts) for b in hosts[number + 1 :]]
    circle: list[Host | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[: len(circle) // 2], reversed(circle), strict=False)
        rounds.append([(a, b) if a.rank < b.rank else (b, a) for a, b in pairs if a and b])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def usual(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Bytes per second and round trip of a usual link: of each host its best, and of these the median.

    The median of all links would be that of a slow host's where there are few: of three hosts' three links
    two are its own.
    """
    best: dict[int, tuple[float, float]] = {}
    for pair in pairs:
        if pair.seconds is None:
            continue
        for rank in (pair.one, pair.other):
            rate, trip = best.get(rank, (0.0, float("inf")))
            best[rank] = max(rate, pair.bytes_per_s), min(trip, pair.seconds)
    if not best:
        return 0.0, 0.0
    rates, trips = zip(*best.values(), strict=True)
    return statistics.median(rates), statistics.median(trips)


def better(first: Pair, again: Pair) -> Pair:
    """A link that was tried twice: what it can do is the better of both."""
    if first.seconds is None or again.seconds is None:
        return first if again.seconds is None else again
    return first._replace(
        seconds=min(first.seconds, again.seconds),
        forth=max(first.forth or 0.0, again.forth or 0.0) or None,
        back=max(first.back or 0.0, again.back or 0.0) or None,
    )


def faults(hosts: Mapping[int, Host], pairs: Sequence[Pair], seconds: float) -> dict[Pair, str]:
    """The links that aren't as the others are, and what is wrong with each.

    Args:
        hosts: By their ranks.
        pairs: All links.
        seconds: That a dead link was waited for.
    """
    rate, trip = usual(pairs)
    found = {pair: _fault(pair, hosts, rate, trip, len(pairs), seconds) for pair in pairs}
    return {pair: fault for pair, fault in found.items() if fault}


def verdict_lines(told: Mapping[str, Any], seconds: float) -> list[str]:
    """One line for each link, or host, that isn't as the others are; empty if all is well.

    Args:
        told: What `trainer.commands.bench.preflight.preflight` returned: `hosts`, `pairs`, `missing`, `come`.
        seconds: That a dead link was waited for.
    """
    hosts = {host.rank: host for host in (Host(*card) for card in told["hosts"])}
    pairs = [Pair(*pair) for pair in told["pairs"]]
    lines = [_absent(told["missing"], told["come"])] if told["missing"] else []
    bad = faults(hosts, pairs, seconds)
    ends = [rank for rank in hosts if len(hosts) > 2 and _all_bad(rank, pairs, bad)]
    # If no link is good, no host can be singled out.
    ends = ends if len(bad) < len(pairs) else []
    for rank in ends:
        own = [fault for pair, fault in bad.items() if rank in (pair.one, pair.other)]
        lines.append(
            f"trainer: {_name(hosts[rank], hosts)}: all its {len(own)} links, such as {own[0]}"
            f"{_check(hosts[rank])}"
        )
    lines += [
        f"trainer: link {_name(hosts[pair.one], hosts)} - {_name(hosts[pair.other], hosts)}: {fault}"
        f"{_check(hosts[pair.one], hosts[pair.other])}"
        for pair, fault in bad.items()
        if pair.one not in ends and pair.other not in ends
    ]
    return lines


def show_links(told: Mapping[str, Any], seconds: float, as_json: bool, shown: bool) -> int:
    """Prints what was found, and judges.

    Args:
        told: As of `verdict_lines`.
        seconds: That a dead link was waited for.
        as_json: Whether JSON is printed.
        shown: Whether this process is the one that prints.
    """
    if "alone" in told:  # of a rank that nobody else can speak for
        print(
            f"trainer: {told['alone']}: check whether the master is up, its name, its port, and the network"
        )
        return EXIT_FAILED
    hosts, pairs = [Host(*host) for host in told["hosts"]], [Pair(*pair) for pair in told["pairs"]]
    lines = verdict_lines(told, seconds)
    if shown and as_json:
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


def _all_bad(rank: int, pairs: Sequence[Pair], bad: Mapping[Pair, str]) -> bool:
    own = [pair for pair in pairs if rank in (pair.one, pair.other)]
    return all(pair in bad for pair in own)


def _fault(
    pair: Pair, hosts: Mapping[int, Host], rate: float, trip: float, links: int, seconds: float
) -> str:
    """What is wrong with a link; empty if nothing is."""
    if pair.seconds is None:
        return f"{pair.why} within {seconds:g} s" if pair.why == "no answer" else f"dead: {pair.why}"
    if not pair.bytes_per_s:
        return f"no stream came through within {seconds:g} s, though single messages did"
    if links == 1:
        return _below_interface(pair, [hosts[pair.one], hosts[pair.other]])
    if pair.bytes_per_s < _SLOW * rate:
        return f"{_gigabits(pair.bytes_per_s)} Gbit/s{_direction(pair)}, usual here is {_gigabits(rate)}"
    if pair.seconds > _LATE * trip and pair.seconds > trip + _LATE_SECONDS:
        return f"a round trip takes {_milli(pair.seconds)} ms, usual here is {_milli(trip)}"
    return ""


def _below_interface(pair: Pair, ends: Sequence[Host]) -> str:
    """The only link, against what its interfaces say of themselves."""
    known = [host for host in ends if host.speed is not None and host.speed * 8 <= _JUDGED_BITS]
    slowest = min(known, key=lambda host: host.speed or 0.0, default=None)
    if slowest and slowest.speed and pair.bytes_per_s < _SLOW_OF_INTERFACE * slowest.speed:
        said = f"{slowest.interface} of {slowest.name} says {_gigabits(slowest.speed)}"
        return f"{_gigabits(pair.bytes_per_s)} Gbit/s{_direction(pair)}, {said}"
    return ""


def _direction(pair: Pair) -> str:
    """Which way, where the other one is much faster."""
    if not pair.forth or not pair.back or max(pair.forth, pair.back) * _SLOW < pair.bytes_per_s:
        return ""
    ends = (pair.one, pair.other) if pair.forth < pair.back else (pair.other, pair.one)
    return f" from rank {ends[0]} to rank {ends[1]}"


def _absent(missing: Sequence[int], seconds: float) -> str:
    ranks = ", ".join(map(str, missing))
    return (
        f"trainer: rank{'s' * (len(missing) > 1)} {ranks} did not come within {seconds:g} s: check "
        "whether its host is up, its command was started, and it can reach the master's port"
    )


def _name(host: Host, hosts: Mapping[int, Host]) -> str:
    """A host's name, or its address where several have the same name."""
    names = [other.name for other in hosts.values()]
    alone = len({(other.name, other.address) for other in hosts.values()}) == 1
    shown = host.name if names.count(host.name) == 1 or alone else host.address
    return f"{shown} (rank {host.rank})"


def _check(*ends: Host) -> str:
    interfaces = dict.fromkeys(host.interface for host in ends if host.interface not in ("", "lo"))
    if not interfaces:
        return ""
    asked = ", ".join(f"ethtool {interface}" for interface in interfaces)
    return f": check cable, switch port, firewall, NIC speed ({asked})"


def _gigabits(rate: float) -> str:
    return f"{rate * 8 / 1e9:.3g}"


def _milli(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"
