"""`trainer bench links`: finds slow or dead links between hosts before a job hangs on one.

Every pair of hosts is tried over a TCP connection of its own, as gloo and NCCL connect every rank with every
other while they start: one dead link makes all of them wait, without an error that names it. Only the store
of the rendezvous (MASTER_ADDR, MASTER_PORT) has to be reachable. One TCP stream from Python carries at most
some tens of Gbit/s: enough to compare links, not to measure the fastest.

Pairs are taken in the rounds of a tournament, in which each host has one partner: 8 hosts need 7 rounds of
about a second. Links that seem slow are tried twice more, and their best counts.
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
from datetime import timedelta
from typing import Any, NamedTuple

from trainer.commands.bench.links import STREAM_SECONDS, Link, answer_peer, call_peer, listening
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_NOT_MEASURED, BadInputError
from trainer.host.interfaces import address_towards, addresses, interface_of
from trainer.host.names import from_files_alone
from trainer.launch.nodes.discover import find_nodes, is_rank, rank_variables

_SPARE_SECONDS = 2.0  # for what is neither a message nor waiting for one
_LOOK_SECONDS = 0.02
_MOST_TRIES = 3
_COME_SECONDS = 30.0  # that hosts need to start the command and import torch
_SLOW = 0.5  # of what links usually carry here
_LATE, _LATE_SECONDS = 3.0, 3e-4  # times the usual round trip, and by so much: less may be a host's scheduler


class RankPlace(NamedTuple):
    """This rank among the others, and the address of their rendezvous."""

    rank: int
    size: int
    master: str
    port: int
    holds_store: bool


class Host(NamedTuple):
    """A host: the rank that stands for it, and its address; the interface may be empty."""

    rank: int
    name: str
    address: str
    port: int = 0
    interface: str = ""


class Pair(NamedTuple):
    """A link of two ranks.

    Attributes:
        seconds: Median round trip; None if the link is dead.
        forth: Bytes per second from one to the other; None if unknown.
        back: Bytes per second from the other to one; None if unknown.
        why: The error of a dead link.
    """

    one: int
    other: int
    seconds: float | None
    forth: float | None
    back: float | None
    why: str = ""

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second of the slower direction; 0 for a dead link."""
        known = [rate for rate in (self.forth, self.back) if rate is not None]
        return min(known) if known and self.seconds is not None else 0.0


def bench_links(options: argparse.Namespace) -> int:
    """Measures the links to the other hosts; node 0 prints the result.

    Returns:
        0, 1 if a link is slow or dead, or a host missing; 3 if there is no other host.

    Raises:
        BadInputError: If the options contradict each other.
    """
    if not 0 < options.seconds <= 3600:
        raise BadInputError(f"--seconds {options.seconds:g}: give a number of seconds above 0")
    # What torch's store says of names that it can't look up helps nobody.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    os.environ.update(rank_variables(os.environ))
    if is_rank(os.environ):
        place = _place_of_rank(os.environ)
    else:
        nodes = find_nodes(
            os.environ, options.nnodes, options.node_rank, options.master_addr, options.master_port
        )
        if nodes is None:
            print("nothing measured: one host has no links; on each: --nnodes, --node-rank, --master-addr")
            return EXIT_NOT_MEASURED
        place = RankPlace(nodes.number, nodes.most, nodes.host, nodes.port, nodes.number == 0)
    return _show(preflight(place, options.seconds), options.seconds, options.json, place.rank == 0)


def _place_of_rank(environ: Mapping[str, str]) -> RankPlace:
    """Reads the place of a rank that torchrun or a Slurm hook started."""
    rank = int(environ["RANK"])
    master, port = environ.get("MASTER_ADDR", "127.0.0.1"), int(environ.get("MASTER_PORT", "29500"))
    holds_store = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return RankPlace(rank, int(environ["WORLD_SIZE"]), master, port, holds_store)


def preflight(place: RankPlace, seconds: float, come_seconds: float = 0.0) -> dict[str, Any]:
    """Tries all links together with the other ranks.

    Args:
        place: This rank.
        seconds: Timeout after which a link counts as dead.
        come_seconds: How long ranks wait for each other at the start; 0: half a minute, or four times that.

    Returns:
        What `verdict_lines` takes, the same on every rank; on a rank that could not meet the others `alone`,
        which says so.
    """
    if place.size == 1:
        return {"hosts": [], "pairs": [], "missing": []}
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    come = come_seconds or max(_COME_SECONDS, 4 * seconds)
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
    named = addresses().get(os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0], [])
    address = next(iter(named), "") or address_towards(place.master) or "127.0.0.1"
    several = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < place.size
    # A host's own name often means 127.0.0.1 to it; others reach it where the store is.
    with listening("" if several and address.startswith("127.") else address) as server:
        port = server.getsockname()[1]
        own = Host(place.rank, platform.node(), address, port, interface_of(address))
        _tell(store, f"host-{place.rank}", own)
        present = _present(store, place, come)
        hosts = _one_of_each(present)
        found = _all_links(store, server, own, hosts, seconds)
        _tell(store, f"done-{place.rank}", True)
        if place.holds_store:  # it goes last
            until = time.monotonic() + seconds
            for host in present:
                _told(store, f"done-{host.rank}", until)
            time.sleep(0.2)  # for the answers that are on their way
    missing = sorted(set(range(place.size)) - {host.rank for host in present})
    return {"hosts": hosts, "pairs": found, "missing": missing}


def _all_links(
    store: Any, server: socket.socket, own: Host, hosts: Sequence[Host], seconds: float
) -> list[Pair]:
    """Measures every link once, and those that seem slow again, up to three times.

    A host may be busy for a moment, and the usual rate is known only once all links were measured.
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
    if own.rank == one.rank:
        return answer_peer(server, number, other.rank, seconds)
    elsewhere = one.address.startswith("127.") and one.name != own.name
    where = os.environ.get("MASTER_ADDR", one.address) if elsewhere else one.address
    return call_peer((where, one.port), number, own.rank, seconds)


def _round(
    store: Any, number: int, pairs: Sequence[tuple[Host, Host]], seconds: float, gone: set[int]
) -> list[Pair]:
    """Measures the pairs of a round, and returns both ends' results; ranks that don't answer join `gone`."""
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
    """Merges the measurements of both ends; the link is dead if either got no round trip."""
    reasons = [link.why or "no answer" for link in (at_other, at_one) if link.seconds is None]
    if not reasons:
        return Pair(one.rank, other.rank, at_other.seconds, at_other.received, at_one.received)
    # An error says more than that nothing came.
    why = next((reason for reason in reasons if reason != "no answer"), "no answer")
    return Pair(one.rank, other.rank, None, None, None, why)


def better(first: Pair, again: Pair) -> Pair:
    """Merges two measurements of a link: the better value of each."""
    if first.seconds is None or again.seconds is None:
        return first if again.seconds is None else again
    forth, back = (max(a or 0.0, b or 0.0) or None for a, b in zip(first[3:5], again[3:5], strict=True))
    return first._replace(seconds=min(first.seconds, again.seconds), forth=forth, back=back)


def _present(store: Any, place: RankPlace, come: float) -> list[Host]:
    """Returns the ranks that came in time, as rank 0 lists them, so that all ranks try the same links."""
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
    store.set(key, json.dumps(value))


def _told(store: Any, key: str, until: float) -> Any:
    """Reads a key of the store; None if it isn't set in time."""
    while not store.check([key]):
        if time.monotonic() > until:
            return None
        time.sleep(_LOOK_SECONDS)
    return json.loads(store.get(key))


def usual(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Returns bytes per second and round trip of a usual link: the median over hosts of each host's best.

    With few hosts, the median over links would be a slow host's: of three hosts' three links it has two.
    """
    live = [pair for pair in pairs if pair.seconds is not None]
    ranks = {rank for pair in live for rank in pair[:2]}
    if not ranks:
        return 0.0, 0.0
    own = [[pair for pair in live if rank in pair[:2]] for rank in ranks]
    rate = statistics.median(max(pair.bytes_per_s for pair in each) for each in own)
    return rate, statistics.median(min(pair.seconds or 0.0 for pair in each) for each in own)


def faults(pairs: Sequence[Pair], seconds: float) -> dict[Pair, str]:
    """Returns the links that are dead, or much slower than the usual one, each with its fault."""
    rate, trip = usual(pairs)
    found = {pair: _fault(pair, rate, trip, seconds) for pair in pairs}
    return {pair: fault for pair, fault in found.items() if fault}


def _fault(pair: Pair, rate: float, trip: float, seconds: float) -> str:
    """Describes the fault of a link; empty if there is none."""
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
    """Names the slow direction, where the other one is much faster."""
    if not pair.forth or not pair.back or max(pair.forth, pair.back) * _SLOW < pair.bytes_per_s:
        return ""
    ends = (pair.one, pair.other) if pair.forth < pair.back else (pair.other, pair.one)
    return f" from rank {ends[0]} to rank {ends[1]}"


def _gigabits(rate: float) -> str:
    return f"{rate * 8 / 1e9:.3g}"


def verdict_lines(result: Mapping[str, Any], seconds: float) -> list[str]:
    """Returns one line for each slow or dead link and each missing host; empty if all is well.

    Args:
        result: What `preflight` returned: `hosts`, `pairs`, `missing`, `come`.
        seconds: That a dead link was waited for.
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
    # If no link is good, no host can be singled out.
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
    """Returns a host's name, or its address where several have the same name."""
    several = len({other.address for other in hosts.values() if other.name == host.name}) > 1
    return f"{host.address if several else host.name} (rank {host.rank})"


def _check(*ends: Host) -> str:
    interfaces = dict.fromkeys(host.interface for host in ends if host.interface not in ("", "lo"))
    asked = ", ".join(f"ethtool {interface}" for interface in interfaces)
    return f": check cable, switch port, firewall, NIC speed ({asked})" if asked else ""


def _show(result: Mapping[str, Any], seconds: float, as_json: bool, shown: bool) -> int:
    """Prints the result if this process is the one that does, and returns the exit code."""
    if "alone" in result:  # of a rank that nobody else can speak for
        print(
            f"trainer: {result['alone']}: check whether the master is up, its name, its port, and the network"
        )
        return EXIT_FAILED
    hosts, pairs = [Host(*host) for host in result["hosts"]], [Pair(*pair) for pair in result["pairs"]]
    lines = verdict_lines(result, seconds)
    if shown and as_json:
        found = {"hosts": [host._asdict() for host in hosts], "links": [pair._asdict() for pair in pairs]}
        print(json.dumps({**found, "missing": result["missing"], "verdict": lines}, indent=2))
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
