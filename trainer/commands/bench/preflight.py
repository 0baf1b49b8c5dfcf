"""`trainer bench links`: finds slow or dead links between hosts before a job hangs on one.

Every pair of hosts is tried over a TCP connection of its own, as gloo and NCCL, too, connect ranks pairwise
while they start: one dead link makes all of them wait, without an error that names it. Only the store of the
rendezvous (a TCPStore at MASTER_ADDR, MASTER_PORT) has to be reachable. One TCP stream from Python carries at
most some tens of Gbit/s: enough to compare links, not to measure the fastest.

Pairs are taken in the rounds of a round-robin tournament, in each of which a host has one partner: 8 hosts
need 7 rounds of about a second. Links that seem slow are tried up to twice more, and their best values count.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from trainer.commands.bench.links import STREAM_SECONDS, Link, answer_peer, call_peer, listening
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_NOT_MEASURED, BadInputError
from trainer.host.interfaces import addresses, from_files_alone, interface_of, own_address
from trainer.launch.nodes import find_nodes, forget_step_of_shell, is_rank, rank_variables

_SPARE_SECONDS = 2.0  # added to timeouts, for the time that isn't spent on sends and receives
_POLL_SECONDS = 0.02  # between two looks at the store
_MOST_TRIES = 3
_JOIN_SECONDS = 30.0  # for hosts to start the command and import torch, at least
_SLOW = 0.5  # a link is slow below this fraction of the usual throughput
_LATE, _LATE_SECONDS = 3.0, 3e-4  # a link is slow above this multiple of the usual
# round trip, if it is longer by this much, too: less may come from a host's scheduler


class RankPlace(NamedTuple):
    """This rank among the others, and the address of their rendezvous.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        master: Name or address of the store's host.
        port: Port of the store.
        holds_store: True if this process is to start the store; False if it connects to one.
    """

    rank: int
    size: int
    master: str
    port: int
    holds_store: bool


class Host(NamedTuple):
    """A host, or a rank of the only host.

    Attributes:
        rank: The rank that measures for the host.
        name: Host name.
        address: Address at which other hosts reach it.
        port: Port at which the rank listens.
        interface: Network interface of the address; "" if unknown.
    """

    rank: int
    name: str
    address: str
    port: int = 0
    interface: str = ""


class Pair(NamedTuple):
    """Measurements of the link between two ranks.

    Attributes:
        one: The lower rank.
        other: The higher rank.
        seconds: Median round trip; None if the link is dead.
        forth: Bytes per second from `one` to `other`; None if unknown.
        back: Bytes per second from `other` to `one`; None if unknown.
        why: The error of a dead link; "" otherwise.
    """

    one: int
    other: int
    seconds: float | None
    forth: float | None
    back: float | None
    why: str = ""

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second of the slower direction; 0 for a dead link, or if neither is known."""
        known = [rate for rate in (self.forth, self.back) if rate is not None]
        return min(known) if known and self.seconds is not None else 0.0


def bench_links(options: argparse.Namespace) -> int:
    """Measures the links to the other hosts; node 0 prints the result.

    Returns:
        Exit code: 0; 1 if a link is slow or dead, a host is missing, or this one didn't reach the others;
        3 if nothing was measured.

    Raises:
        BadInputError: If --seconds is out of range, or the options contradict each other.
    """
    if not 0 < options.seconds <= 3600:
        raise BadInputError(f"--seconds {options.seconds:g}: give a number of seconds above 0")
    # Silences the C++ warnings of TCPStore about names that it can't look up.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    forget_step_of_shell(os.environ)
    os.environ.update(rank_variables(os.environ))
    if is_rank(os.environ):
        place = _place_of_rank(os.environ)
    else:
        nodes = find_nodes(
            os.environ, options.nnodes, options.node_rank, options.master_addr, options.master_port
        )
        if nodes is None:
            why = "nothing measured: one host has no links; on each: --nnodes, --node-rank, --master-addr"
            print(_as_json([], [], [], []) if options.json else why)
            return EXIT_NOT_MEASURED
        place = RankPlace(nodes.number, nodes.total, nodes.host, nodes.port, nodes.number == 0)
    return _show(preflight(place, options.seconds), options.seconds, options.json, place.rank == 0)


def _place_of_rank(environ: Mapping[str, str]) -> RankPlace:
    """Reads the place of a rank that torchrun or a Slurm hook started."""
    rank = int(environ["RANK"])
    master, port = environ.get("MASTER_ADDR", "127.0.0.1"), int(environ.get("MASTER_PORT", "29500"))
    holds_store = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return RankPlace(rank, int(environ["WORLD_SIZE"]), master, port, holds_store)


def preflight(place: RankPlace, seconds: float, come_seconds: float = 0.0) -> dict[str, Any]:
    """Measures the links between all hosts, together with the other ranks.

    Args:
        place: This rank.
        seconds: Timeout after which a link counts as dead.
        come_seconds: Timeout for all ranks to join; 0: 30 seconds, or 4 * `seconds` if that is more.

    Returns:
        The argument of `verdict_lines`: `hosts`, `pairs`, `missing`, and the timeout `come`; the same on all
        ranks. On a rank that couldn't reach the others, only `alone`: a line with the reason.
    """
    if place.size == 1:
        return {"hosts": [], "pairs": [], "missing": []}
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    come = come_seconds or max(_JOIN_SECONDS, 4 * seconds)
    who, where = f"rank {place.rank} on {platform.node()}", f"{place.master}:{place.port}"
    try:
        with from_files_alone(place.master):
            wait = timedelta(seconds=come)
            store = TCPStore(place.master, place.port, None, place.holds_store, wait, wait_for_workers=False)
    except RuntimeError as error:
        if place.holds_store:
            return {"alone": f"{who} can't listen at {where}: {str(error).splitlines()[0][:200]}"}
        return {"alone": f"{who} got no answer from the store at {where} within {come:g} s"}
    try:
        return {**_tried(PrefixStore("preflight", store), place, seconds, come), "come": come}
    except RuntimeError:
        return {"alone": f"{who} lost the store at {where}"}


def _tried(store: Any, place: RankPlace, seconds: float, come: float) -> dict[str, Any]:
    """Joins the other ranks through the store, measures, and returns `hosts`, `pairs` and `missing`."""
    named = addresses().get(os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0], [])
    address = next(iter(named), "")
    with suppress(OSError):  # a name that isn't known
        address = address or own_address(place.master)
    address = address or "127.0.0.1"
    several = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < place.size
    # A host's own name often resolves to a loopback address on it: then it listens everywhere.
    with listening("" if several and _is_loopback(address) else address) as server:
        port = server.getsockname()[1]
        own = Host(place.rank, platform.node(), address, port, interface_of(address))
        _tell(store, f"host-{place.rank}", own)
        present = _present(store, place, come)
        hosts = _one_of_each(present)
        found = _all_links(store, server, own, [_seen_from(own, host, place) for host in hosts], seconds)
        _tell(store, f"done-{place.rank}", True)
        if place.holds_store:  # the store ends with this process, so it waits for the others
            until = time.monotonic() + seconds
            for host in present:
                _told(store, f"done-{host.rank}", until)
            time.sleep(0.2)  # for replies of the store that are under way
    missing = sorted(set(range(place.size)) - {host.rank for host in present})
    return {"hosts": hosts, "pairs": found, "missing": missing}


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _seen_from(own: Host, host: Host, place: RankPlace) -> Host:
    """Returns a host with the address at which this one reaches it.

    Only the master's own name leads to a loopback address on the route to the master.
    """
    elsewhere = _is_loopback(host.address) and host.name != own.name
    return host._replace(address=place.master) if elsewhere else host


def _all_links(
    store: Any, server: socket.socket, own: Host, hosts: Sequence[Host], seconds: float
) -> list[Pair]:
    """Measures every link once, and those that seem slow up to `_MOST_TRIES` times.

    A host may be busy for a moment, and the usual throughput is known only once all links were measured.
    """
    found, gone, number = dict[tuple[int, int], Pair](), set[int](), 0
    tries: Counter[tuple[int, int]] = Counter()
    wanted = {(one.rank, other.rank) for pairs in rounds_of(hosts) for one, other in pairs}
    while wanted:
        for pairs in rounds_of(hosts):
            chosen = [(one, other) for one, other in pairs if (one.rank, other.rank) in wanted]
            for one, other in chosen:
                if own.rank in (one.rank, other.rank):
                    link = _try(server, own, one, other, number, seconds)
                    _tell(store, f"link-{number}-{own.rank}", link)
            for pair in _round(store, number, chosen, seconds, gone):
                ends = (pair.one, pair.other)
                found[ends] = better(found[ends], pair) if ends in found else pair
                tries[ends] += 1
            number += 1
        odd = faults(list(found.values()), seconds)
        suspects = {(pair.one, pair.other) for pair in odd if pair.seconds is not None}
        wanted = {ends for ends in suspects if tries[ends] < _MOST_TRIES}
    return list(found.values())


def _try(server: socket.socket, own: Host, one: Host, other: Host, number: int, seconds: float) -> Link:
    """Measures the link of this host to its partner: `other` connects to `one`."""
    if own.rank == one.rank:
        return answer_peer(server, number, other.rank, seconds)
    return call_peer((one.address, one.port), number, own.rank, seconds)


def _round(
    store: Any, number: int, pairs: Sequence[tuple[Host, Host]], seconds: float, gone: set[int]
) -> list[Pair]:
    """Reads from the store what both ends of each pair measured in a round.

    Ranks whose results don't come in time are added to `gone`, and aren't waited for in later rounds.
    """
    until = time.monotonic() + 5 * seconds + 2 * STREAM_SECONDS + _SPARE_SECONDS
    found = []
    for one, other in pairs:
        links = []
        for host in (one, other):
            stored = _told(store, f"link-{number}-{host.rank}", 0.0 if host.rank in gone else until)
            if stored is None:
                gone.add(host.rank)
            links.append(Link(*stored) if stored else Link(why="it said nothing any more"))
        found.append(pair_of_ends(one, other, links[0], links[1]))
    return found


def pair_of_ends(one: Host, other: Host, at_one: Link, at_other: Link) -> Pair:
    """Merges the measurements of both ends; the link is dead if either has no round trip.

    The round trip is that of `other`, which connected: at `one` it includes waiting for it.
    """
    reasons = [link.why or "no answer" for link in (at_other, at_one) if link.seconds is None]
    if not reasons:
        return Pair(one.rank, other.rank, at_other.seconds, at_other.received, at_one.received)
    # An error says more than a timeout.
    why = next((reason for reason in reasons if reason != "no answer"), "no answer")
    return Pair(one.rank, other.rank, None, None, None, why)


def better(first: Pair, again: Pair) -> Pair:
    """Merges two measurements of a link: the shorter round trip, each direction's higher throughput."""
    if first.seconds is None or again.seconds is None:
        return first if again.seconds is None else again
    forth, back = (max(a or 0.0, b or 0.0) or None for a, b in zip(first[3:5], again[3:5], strict=True))
    return first._replace(seconds=min(first.seconds, again.seconds), forth=forth, back=back)


def _present(store: Any, place: RankPlace, come: float) -> list[Host]:
    """Returns the ranks that joined in time, as rank 0 lists them, so that all ranks try the same links.

    Raises:
        RuntimeError: If rank 0 lists none in time.
    """
    if place.rank == 0:
        until = time.monotonic() + come
        cards = [_told(store, f"host-{rank}", until) for rank in range(place.size)]
        _tell(store, "present", [card for card in cards if card])
    listed = _told(store, "present", time.monotonic() + 2 * come + _SPARE_SECONDS)
    if listed is None:
        raise RuntimeError("rank 0 said nothing")
    return [Host(*card) for card in listed]


def _one_of_each(present: Sequence[Host]) -> list[Host]:
    """Returns the first rank of each host; all ranks if there is only one host."""
    first: dict[tuple[str, str], Host] = {}
    for host in present:
        first.setdefault((host.name, host.address), host)
    return list(first.values()) if len(first) > 1 else list(present)


def rounds_of(hosts: Sequence[Host]) -> list[list[tuple[Host, Host]]]:
    """Returns every pair once, in rounds in which each host has at most one partner (circle method)."""
    circle: list[Host | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[: len(circle) // 2], reversed(circle), strict=False)
        rounds.append([(a, b) if a.rank < b.rank else (b, a) for a, b in pairs if a and b])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def _tell(store: Any, key: str, value: Any) -> None:
    """Sets a key of the store to a value, as JSON."""
    store.set(key, json.dumps(value))


def _told(store: Any, key: str, until: float) -> Any:
    """Returns the value of a key of the store; None if it isn't set until `until`, by time.monotonic()."""
    while not store.check([key]):
        if time.monotonic() > until:
            return None
        time.sleep(_POLL_SECONDS)
    return json.loads(store.get(key))


def usual(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Returns bytes per second and seconds of a round trip of a usual link: medians of each host's best.

    A median over links could be that of a slow host: of the three links of three hosts, two are its own.
    """
    live = [pair for pair in pairs if pair.seconds is not None]
    ranks = {rank for pair in live for rank in pair[:2]}
    if not ranks:
        return 0.0, 0.0
    own = [[pair for pair in live if rank in pair[:2]] for rank in ranks]
    rate = statistics.median(max(pair.bytes_per_s for pair in each) for each in own)
    return rate, statistics.median(min(pair.seconds or 0.0 for pair in each) for each in own)


def faults(pairs: Sequence[Pair], seconds: float) -> dict[Pair, str]:
    """Returns the links that are dead or much slower than usual, each with its fault in words.

    Args:
        pairs: All links.
        seconds: Timeout with which they were measured.
    """
    rate, trip = usual(pairs)
    found = {pair: _fault(pair, rate, trip, seconds) for pair in pairs}
    return {pair: fault for pair, fault in found.items() if fault}


def _fault(pair: Pair, rate: float, trip: float, seconds: float) -> str:
    """Describes the fault of a link; "" if there is none. `rate` and `trip` are those of a usual link."""
    if pair.seconds is None:
        return f"{pair.why} within {seconds:g} s" if pair.why == "no answer" else f"dead: {pair.why}"
    if not pair.bytes_per_s:
        return f"no stream came through within {seconds:g} s, though single messages did"
    if pair.bytes_per_s < _SLOW * rate:
        return f"{_gigabits(pair.bytes_per_s)} Gbit/s{_direction(pair)}, usual here is {_gigabits(rate)}"
    if pair.seconds > _LATE * trip and pair.seconds > trip + _LATE_SECONDS:
        return f"a round trip takes {pair.seconds * 1e3:.3g} ms, usual here is {trip * 1e3:.3g}"
    return ""


def _direction(pair: Pair) -> str:
    """Names the slow direction if the other one is much faster; "" otherwise."""
    if not pair.forth or not pair.back or max(pair.forth, pair.back) * _SLOW < pair.bytes_per_s:
        return ""
    ends = (pair.one, pair.other) if pair.forth < pair.back else (pair.other, pair.one)
    return f" from rank {ends[0]} to rank {ends[1]}"


def _gigabits(rate: float) -> str:
    """Converts bytes per second to Gbit/s."""
    return f"{rate * 8 / 1e9:.3g}"


def verdict_lines(result: Mapping[str, Any], seconds: float) -> list[str]:
    """Returns one line for each slow or dead link and each missing host; empty if all is well.

    Args:
        result: Result of `preflight`: `hosts`, `pairs`, `missing`, `come`.
        seconds: Timeout after which a link counted as dead.
    """
    hosts = {host.rank: host for host in (Host(*card) for card in result["hosts"])}
    pairs, lines = [Pair(*pair) for pair in result["pairs"]], list[str]()
    if missing := result["missing"]:
        lines.append(
            f"trainer: rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} did not come within "
            f"{result['come']:g} s: check whether its host is up, its command was started, and it can reach "
            "the master's port"
        )
    bad = faults(pairs, seconds)
    # Hosts all of whose links are bad get one line. If no link is good, no host can be singled out.
    ends = [rank for rank in hosts if len(hosts) > 2 and len(bad) < len(pairs)]
    ends = [rank for rank in ends if all(pair in bad for pair in pairs if rank in pair[:2])]
    for rank in ends:
        own = [fault for pair, fault in bad.items() if rank in pair[:2]]
        who, hint = _name(hosts[rank], hosts), _check(hosts[rank])
        lines.append(f"trainer: {who}: all its {len(own)} links, such as {own[0]}{hint}")
    for pair, fault in bad.items():
        if pair.one not in ends and pair.other not in ends:
            one, other = hosts[pair.one], hosts[pair.other]
            between = f"{_name(one, hosts)} - {_name(other, hosts)}"
            lines.append(f"trainer: link {between}: {fault}{_check(one, other)}")
    return lines


def _name(host: Host, hosts: Mapping[int, Host]) -> str:
    """Returns a host's name and rank; its address instead of the name where several hosts have that name."""
    several = len({other.address for other in hosts.values() if other.name == host.name}) > 1
    return f"{host.address if several else host.name} (rank {host.rank})"


def _check(*ends: Host) -> str:
    """Returns a hint of what to check at the ends of a link; "" if no interface is known."""
    interfaces = dict.fromkeys(host.interface for host in ends if host.interface not in ("", "lo"))
    asked = ", ".join(f"ethtool {interface}" for interface in interfaces)
    return f": check cable, switch port, firewall, NIC speed ({asked})" if asked else ""


def _as_json(
    hosts: Sequence[Host], pairs: Sequence[Pair], missing: Sequence[int], lines: Sequence[str]
) -> str:
    """Formats the result as JSON."""
    found = {"hosts": [host._asdict() for host in hosts], "links": [pair._asdict() for pair in pairs]}
    return json.dumps({**found, "missing": missing, "verdict": lines}, indent=2)


def _show(result: Mapping[str, Any], seconds: float, as_json: bool, shown: bool) -> int:
    """Prints the result if `shown` (a rank that reached no other always does), and returns the exit code."""
    if "alone" in result:  # rank 0 doesn't have this rank's reason
        line = (
            f"trainer: {result['alone']}: check whether the master is up, its name, its port, and the network"
        )
        print(_as_json([], [], [], [line]) if as_json else line)
        return EXIT_FAILED
    hosts, pairs = [Host(*host) for host in result["hosts"]], [Pair(*pair) for pair in result["pairs"]]
    lines = verdict_lines(result, seconds)
    if shown and as_json:
        print(_as_json(hosts, pairs, result["missing"], lines))
    elif shown:
        rate, trip = usual(pairs)
        measured = f"; usual is {_gigabits(rate)} Gbit/s, a round trip {trip * 1e3:.3g} ms" * bool(rate)
        judged = "" if lines or not pairs else ": none is slow or dead"
        several = len({(host.name, host.address) for host in hosts}) > 1
        ends = f"{len(hosts)} hosts" if several else f"{len(hosts)} ranks of {platform.node()}"
        print(*lines, sep="\n", end="\n" * bool(lines))
        print(f"{len(pairs)} link{'s' * (len(pairs) != 1)} between {ends} tried{judged}{measured}")
    if lines:
        return EXIT_FAILED
    return EXIT_DONE if pairs else EXIT_NOT_MEASURED
