"""Which link between the hosts is slow or dead, before a job hangs in it: `trainer bench links`.

Every pair of hosts is tried over a TCP connection of its own. Not with an
all-reduce, and not with gloo or NCCL: both connect every rank with every other while they start, so that one
dead link makes all of them wait and none of them knows for whom. Addresses are exchanged at the store where
ranks meet (MASTER_ADDR, MASTER_PORT), and only that has to be reached. What is measured is what one TCP
stream of Python carries, at most some tens of Gbit/s: it tells links apart, and not what the fastest of
them could do.

Pairs are taken in the rounds of a tournament, in which each host has one partner: 8 hosts need 7 rounds of
about a second. A round ends when all its pairs have, or their time is over. Links that seem slow are tried
twice more, and their best counts.
"""

import argparse
import json
import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from trainer.commands.bench.links import STREAM_SECONDS, Link, answer_peer, call_peer, listening
from trainer.commands.bench.preflight_verdict import (
    Host,
    Pair,
    better,
    faults,
    pair_of_ends,
    rounds_of,
    show_links,
)
from trainer.errors import EXIT_NOT_MEASURED, BadInputError
from trainer.host.interfaces import addresses, interface_of
from trainer.host.names import from_files_alone
from trainer.launch.nodes.discover import find_nodes, is_rank, rank_variables

_SPARE_SECONDS = 2.0  # for what is neither a message nor waiting for one
_LOOK_SECONDS = 0.02
_MOST_TRIES = 3
_COME_SECONDS = 30.0  # that hosts need to start the command and import torch
Limit = tuple[float | None, str]  # bytes per second, or None; and what it is of, or why it isn't known


class RankPlace(NamedTuple):
    """This rank among the others, and where they meet."""

    rank: int
    size: int
    master: str
    port: int
    holds_store: bool


def bench_links(options: argparse.Namespace) -> int:
    """Tries the links with the other hosts; node 0 prints.

    Returns:
        0, 1 if a link is slow or dead, or a host missing; 3 if there is no other host.

    Raises:
        BadInputError: If the options can't be.
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
    return show_links(preflight(place, options.seconds), options.seconds, options.json, place.rank == 0)


def _place_of_rank(environ: Mapping[str, str]) -> RankPlace:
    """That of a rank that torchrun or a Slurm hook started."""
    rank = int(environ["RANK"])
    return RankPlace(
        rank,
        int(environ["WORLD_SIZE"]),
        environ.get("MASTER_ADDR", "127.0.0.1"),
        int(environ.get("MASTER_PORT", "29500")),
        rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
    )


def preflight(place: RankPlace, seconds: float, come_seconds: float = 0.0) -> dict[str, Any]:
    """Tries all links together with the other ranks.

    Args:
        place: This rank.
        seconds: After which no answer means that a link is dead.
        come_seconds: How long ranks wait for each other at the start; 0: half a minute, or four times that.

    Returns:
        `hosts` and `pairs` for `preflight_verdict.verdict_lines`, the same on every rank; on a rank
        that could not meet the others `alone`, which says so.
    """
    if place.size == 1:
        return {"hosts": [], "pairs": [], "missing": []}
    come = come_seconds or max(_COME_SECONDS, 4 * seconds)
    who, where = f"rank {place.rank} on {platform.node()}", f"{place.master}:{place.port}"
    try:
        store = _store(place, come)
    except RuntimeError as error:
        if place.holds_store:
            return {"alone": f"{who} can't listen at {where}: {str(error).splitlines()[0][:200]}"}
        return {"alone": f"{who} got no answer from the store at {where} within {come:g} s"}
    try:
        return {**_tried(store, place, seconds, come), "come": come}
    except RuntimeError:
        return {"alone": f"{who} lost the store at {where}"}


def _store(place: RankPlace, seconds: float) -> Any:
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    wait = timedelta(seconds=seconds)
    with from_files_alone(place.master):
        store = TCPStore(place.master, place.port, None, place.holds_store, wait, wait_for_workers=False)
    return PrefixStore("preflight", store)


def _tried(store: Any, place: RankPlace, seconds: float, come: float) -> dict[str, Any]:
    interface, _ = interface_to(place.master, os.environ)
    address = next(iter(addresses().get(interface, [])), "") or address_towards(place.master) or "127.0.0.1"
    several = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < place.size
    # A host's own name often means 127.0.0.1 to it; others reach it where the store is.
    with listening("" if several and address.startswith("127.") else address) as server:
        speed = interface_speed(interface)[0] if interface else None
        own = Host(place.rank, platform.node(), address, server.getsockname()[1], interface, speed)
        _tell(store, f"host-{place.rank}", own)
        present = _present(store, place, come)
        hosts = _one_of_each(present)
        found = _all_links(store, server, own, hosts, seconds)
        _leave(store, place, present, seconds)
    missing = sorted(set(range(place.size)) - {host.rank for host in present})
    return {"hosts": hosts, "pairs": found, "missing": missing}


def _all_links(
    store: Any, server: socket.socket, own: Host, hosts: Sequence[Host], seconds: float
) -> list[Pair]:
    """Every link once, and those that seem slow again, until it is known that they are.

    A host that has other work for a moment is no slow link, and what is usual depends on all of them.
    """
    found, gone, number = dict[tuple[int, int], Pair](), set[int](), 0
    tries: Counter[tuple[int, int]] = Counter()
    wanted = [(one.rank, other.rank) for pairs in rounds_of(hosts) for one, other in pairs]
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
        odd = faults({host.rank: host for host in hosts}, list(found.values()), seconds)
        suspects = [(pair.one, pair.other) for pair in odd if pair.seconds is not None]
        wanted = [ends for ends in suspects if tries[ends] < _MOST_TRIES]
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
    """What both ends of each pair say; nobody waits again for `gone`, ranks that once said nothing."""
    until = time.monotonic() + 5 * seconds + 2 * STREAM_SECONDS + _SPARE_SECONDS
    found = []
    for one, other in pairs:
        links = []
        for host in (one, other):
            told = _told(store, f"link-{number}-{host.rank}", 0.0 if host.rank in gone else until)
            if told is None:
                gone.add(host.rank)
            links.append(Link(*told) if told else Link(why="it said nothing any more"))
        found.append(pair_of_ends(one, other, links[0], links[1]))
    return found


def _present(store: Any, place: RankPlace, come: float) -> list[Host]:
    """The ranks that came in time: what rank 0 says, so that all ranks try the same links."""
    if place.rank == 0:
        until = time.monotonic() + come
        cards = [_told(store, f"host-{rank}", until) for rank in range(place.size)]
        _tell(store, "present", [card for card in cards if card])
    told = _told(store, "present", time.monotonic() + 2 * come + _SPARE_SECONDS)
    if told is None:
        raise RuntimeError("rank 0 said nothing")
    return [Host(*card) for card in told]


def _one_of_each(present: Sequence[Host]) -> list[Host]:
    """The first rank of each host; all ranks where there is one host alone."""
    first: dict[tuple[str, str], Host] = {}
    for host in present:
        first.setdefault((host.name, host.address), host)
    return list(first.values()) if len(first) > 1 else list(present)


def _leave(store: Any, place: RankPlace, present: Sequence[Host], seconds: float) -> None:
    """Rank 0 may hold the store: it goes last."""
    _tell(store, f"done-{place.rank}", True)
    if place.holds_store:
        until = time.monotonic() + seconds
        for host in present:
            _told(store, f"done-{host.rank}", until)
        time.sleep(0.2)  # for the answers that are on their way


def _tell(store: Any, key: str, value: Any) -> None:
    store.set(key, json.dumps(value))


def _told(store: Any, key: str, until: float) -> Any:
    """What was told under a key; None if nothing is by then."""
    while not store.check([key]):
        if time.monotonic() > until:
            return None
        time.sleep(_LOOK_SECONDS)
    return json.loads(store.get(key))


def interface_speed(name: str, root: Path = Path("/")) -> Limit:
    """What the kernel says of an interface; see /sys/class/net/<iface>/speed in its ABI documentation."""
    if name == "lo":
        return None, "loopback: no link, memory is the limit"
    try:
        megabits = int((root / "sys/class/net" / name / "speed").read_text())
    except (OSError, ValueError):
        return None, f"unknown, because {name} doesn't tell its speed (/sys/class/net/{name}/speed)"
    if megabits <= 0:
        return None, f"unknown, because {name} says {megabits} of its speed, as virtual ones do"
    return megabits * 1e6 / 8, f"{name} {megabits / 1e3:g} Gbit/s"


def interface_to(master: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """The interface that carries traffic to a host, and if none is found, why."""
    wanted = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if wanted:
        return wanted, ""
    address = address_towards(master)
    if not address:
        return "", f"there is no route to {master}"
    if name := interface_of(address):
        return name, ""
    if address.startswith("127.") or address == "::1":
        return "lo", ""
    return "", f"no interface has the address {address}"


def address_towards(host: str) -> str:
    """This host's address on the route to another; empty if there is none. Nothing is sent."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""
