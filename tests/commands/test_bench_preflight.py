"""Promise: a preflight tries each link between hosts; a slow or dead one is named, not waited for."""

import argparse
import contextlib
import io
import itertools
import json
import platform
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.helpers.netns import hosts, in_host, on_each
from tests.helpers.waiting import SECONDS
from trainer.cli import main
from trainer.commands.bench import links, preflight as preflight_module
from trainer.commands.bench.links import Link, answer_peer, call_peer, listening, rate
from trainer.commands.bench.preflight import (
    Host,
    Pair,
    RankPlace,
    _told,
    _tried,
    bench_links,
    better,
    pair_of_ends,
    preflight,
    rounds_of,
    verdict_lines,
)

GIGABIT = 1e9 / 8


# --- one link ---


def both_ends(calls: Callable[[tuple[str, int]], Link], seconds: float = 60.0) -> tuple[Link, Link]:
    """What the end that is called finds, and the one that calls."""
    with listening("127.0.0.1") as server, ThreadPoolExecutor() as pool:
        end = pool.submit(answer_peer, server, 3, 1, seconds)
        other = calls(("127.0.0.1", server.getsockname()[1]))
        return end.result(), other


@pytest.fixture
def short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "STREAM_SECONDS", 0.2)
    monkeypatch.setattr(links, "_HELLO_SECONDS", SECONDS)


@pytest.mark.usefixtures("short_streams")
def test_a_link_that_works() -> None:
    end, other = both_ends(lambda where: call_peer(where, 3, 1, 60.0))
    for link in (end, other):
        assert link.seconds is not None and link.seconds > 0 and link.why == ""
        assert link.received is not None and link.received > 0


def test_nobody_there_takes_no_longer_than_it_may() -> None:
    with listening("127.0.0.1") as server:
        assert answer_peer(server, 0, 1, 0.1) == Link(why="no answer")
        assert 0 < (server.gettimeout() or 0) <= 0.1
        where = ("127.0.0.1", server.getsockname()[1])
        assert call_peer(where, 0, 1, 0.1) == Link(why="no answer")  # connected, but nobody answers
    assert call_peer(where, 0, 1, 0.1) == Link(why="connection refused")


def test_strangers_do_not_keep_the_line_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_HELLO_SECONDS", 0.3)
    with listening("127.0.0.1") as server, socket.socket() as one, socket.socket() as other:
        for silent in (one, other):
            silent.connect(("127.0.0.1", server.getsockname()[1]))
        assert answer_peer(server, 0, 1, 0.1) == Link(why="no answer")


@pytest.mark.usefixtures("short_streams")
def test_strangers_and_those_who_are_late_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds, is_caller = iter([0.3]), links._is_caller  # only the first says nothing

    def asked(connection: socket.socket, number: int, caller: int) -> bool:
        monkeypatch.setattr(links, "_HELLO_SECONDS", next(bounds, SECONDS))
        return is_caller(connection, number, caller)

    monkeypatch.setattr(links, "_is_caller", asked)

    def calls(where: tuple[str, int]) -> Link:
        silent.connect(where)
        for words in (b"GET / HTTP/1.1\r\n\r\n", links._HELLO.pack(b"trainer1", 2, 1)):
            with socket.create_connection(where) as stranger:
                stranger.sendall(words)
        return call_peer(where, 3, 1, 60.0)

    with socket.socket() as silent:
        end, other = both_ends(calls)
    assert end.seconds is not None and other.seconds is not None


def test_the_first_quarter_does_not_count() -> None:
    assert rate([]) is None and rate([(0.0, 5)]) is None
    marks = [(0.0, 1000), (1.0, 1100), (2.0, 1200), (3.0, 1300), (4.0, 1400)]
    assert rate(marks) == 100
    assert rate([(0.0, 0), (0.5, 10_000_000), *[(t, 10_000_000 + int(100 * t)) for t in (1, 2, 3, 4)]]) == 100


# --- what links say ---


def host(rank: int) -> Host:
    return Host(rank, f"n{rank + 1}", f"10.0.0.{rank + 1}", 1, "eth0")


@given(st.integers(1, 9))
def test_each_pair_has_its_turn_once(count: int) -> None:
    rounds = rounds_of([host(rank) for rank in range(count)])
    pairs = [(a.rank, b.rank) for pairs in rounds for a, b in pairs]
    assert sorted(pairs) == list(itertools.combinations(range(count), 2))
    assert len(rounds) == (count - 1 + count % 2 if count > 1 else 1)
    for number in rounds:
        busy = [end.rank for pair in number for end in pair]
        assert len(busy) == len(set(busy))


def mesh(count: int, **odd: Any) -> dict[str, Any]:
    """All links the same, but those of `odd`: "02" is the one between rank 0 and rank 2."""
    pairs = []
    for a, b in itertools.combinations(range(count), 2):
        usual = {"seconds": 1e-4, "forth": 9.4 * GIGABIT, "back": 9.4 * GIGABIT, "why": ""}
        pairs.append(Pair(a, b, **{**usual, **odd.get(f"r{a}{b}", {})}))
    return {"hosts": [host(rank) for rank in range(count)], "pairs": pairs, "missing": [], "come": 30.0}


DEAD = {"seconds": None, "forth": None, "back": None, "why": "no answer"}


def test_links_that_are_alike_are_fine() -> None:
    assert verdict_lines(mesh(4), 5.0) == []
    assert verdict_lines(mesh(4, r01={"forth": 6 * GIGABIT}, r12={"seconds": 2.5e-4}), 5.0) == []
    assert verdict_lines(json.loads(json.dumps(mesh(2))), 5.0) == []


def test_a_slow_link_is_named() -> None:
    (line,) = verdict_lines(mesh(3, r02={"forth": 0.9 * GIGABIT, "back": 0.95 * GIGABIT}), 5.0)
    assert line == (
        "trainer: link n1 (rank 0) - n3 (rank 2): 0.9 Gbit/s, usual here is 9.4: check cable, switch port, "
        "firewall, NIC speed (ethtool eth0)"
    )
    (line,) = verdict_lines(mesh(3, r02={"back": 0.9 * GIGABIT}), 5.0)
    assert "0.9 Gbit/s from rank 2 to rank 0, usual here is 9.4" in line


def test_a_late_link_is_named() -> None:
    (line,) = verdict_lines(mesh(4, r13={"seconds": 2e-3}), 5.0)
    assert line.startswith(
        "trainer: link n2 (rank 1) - n4 (rank 3): a round trip takes 2 ms, usual here is 0.1"
    )


def test_a_dead_link_is_named() -> None:
    (line,) = verdict_lines(mesh(4, r13=DEAD), 5.0)
    assert line.startswith("trainer: link n2 (rank 1) - n4 (rank 3): no answer within 5 s: check cable")
    (line,) = verdict_lines(mesh(4, r13={**DEAD, "why": "no route to host"}), 5.0)
    assert "dead: no route to host" in line
    (line,) = verdict_lines(mesh(4, r13={"forth": None, "back": None}), 5.0)
    assert "no stream came through" in line


@pytest.mark.parametrize("count", [3, 4, 6])
def test_a_host_whose_links_are_all_slow_is_named_itself(count: int) -> None:
    slow = {f"r{rank}{count - 1}": {"forth": 0.9 * GIGABIT} for rank in range(count - 1)}
    (line,) = verdict_lines(mesh(count, **slow), 5.0)
    who = f"trainer: n{count} (rank {count - 1}): all its {count - 1} links, such as"
    assert line.startswith(f"{who} 0.9 Gbit/s")
    (line,) = verdict_lines(mesh(count, **dict.fromkeys(slow, DEAD)), 5.0)
    assert line.startswith(f"{who} no answer within 5 s")


def test_a_link_that_was_tried_again_is_as_good_as_its_best() -> None:
    first, again = Pair(0, 1, 2e-4, 5.0, None), Pair(0, 1, 1e-4, 4.0, 6.0)
    assert better(first, again) == Pair(0, 1, 1e-4, 5.0, 6.0)
    dead = Pair(0, 1, None, None, None, "no answer")
    assert better(dead, again) == again and better(first, dead) == first


def test_a_host_that_is_busy_for_a_moment_is_no_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_module, "_POLL_SECONDS", 0.001)
    store, places = HashStore(), [RankPlace(rank, 3, "127.0.0.1", 1, rank == 0) for rank in range(3)]
    tried: Counter[int] = Counter()

    def link(_: Any, own: Host, __: Host, other: Host, *___: Any) -> Link:
        tried[own.rank] += 1
        # Those of rank 2 are slow; the first time the only good one is slower still.
        if other.rank == 2:
            return Link(1e-4, 0.1 * GIGABIT)
        return Link(1e-4, (0.02 if tried[own.rank] == 1 else 1.0) * GIGABIT)

    monkeypatch.setattr(preflight_module, "_try", link)
    with ThreadPoolExecutor() as pool:
        told = list(pool.map(lambda place: _tried(store, place, 60.0, 60.0), places))
    assert told[0] == told[1] == told[2]
    lines = verdict_lines({**told[0], "come": 60.0}, 60.0)
    assert len(lines) == 1 and "(rank 2): all its 2 links, such as 0.1 Gbit/s" in lines[0]
    assert max(tried.values()) <= 2 * 3


def test_a_rank_that_vanishes_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []

    def told_in_time(store: Any, key: str, until: float) -> Any:
        if key == "host-3" or not key.endswith("-3"):
            return _told(store, key, until + 60)
        waited.extend([key] * (key.startswith("link-") and until > 0))
        return None

    monkeypatch.setattr(preflight_module, "_told", told_in_time)
    monkeypatch.setattr(preflight_module, "_try", lambda *_: Link(1e-4, GIGABIT))
    store, places = HashStore(), [RankPlace(rank, 4, "127.0.0.1", 1, rank == 0) for rank in range(3)]
    store.set("host-3", json.dumps(Host(3, platform.node(), "127.0.0.1", 1)))
    with ThreadPoolExecutor() as pool:
        told = list(pool.map(lambda place: _tried(store, place, 0.1, 5.0), places))
    assert len(waited) == 3 == len(told)  # each rank once, though it has three rounds
    assert [pair.why for pair in told[0]["pairs"] if pair.other == 3] == ["it said nothing any more"] * 3
    assert (
        "(rank 3): all its 3 links, such as dead: it said nothing"
        in verdict_lines({**told[0], "come": 5.0}, 0.1)[0]
    )


@pytest.mark.parametrize("address", ["127.0.1.1", "::1"])
def test_a_host_whose_name_is_a_loopback_address_is_reached_where_its_store_was(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MASTER_ADDR may be another job's; the place has the master that this rank found."""
    monkeypatch.setenv("MASTER_ADDR", "another-job")
    peer = mock.Mock(return_value=Link(1e-4, GIGABIT))
    monkeypatch.setattr(preflight_module, "call_peer", peer)
    store = HashStore()
    here = Host(1, platform.node(), "127.0.0.1", 8)
    store.set("present", json.dumps([Host(0, "elsewhere", address, 7), here]))
    store.set("link-0-0", json.dumps(Link(1e-4, GIGABIT)))
    told = _tried(store, RankPlace(1, 2, "10.79.0.1", 1, False), 5.0, 5.0)
    assert [call.args[0] for call in peer.call_args_list] == [("10.79.0.1", 7)]
    assert told["hosts"][0].address == address


def test_if_all_links_are_dead_all_are_named() -> None:
    lines = verdict_lines(mesh(3, r01=DEAD, r02=DEAD, r12=DEAD), 5.0)
    assert len(lines) == 3 and all(line.startswith("trainer: link ") for line in lines)


def test_who_did_not_come_is_named() -> None:
    (line,) = verdict_lines({**mesh(2), "missing": [2, 5]}, 5.0)
    assert line.startswith("trainer: ranks 2, 5 did not come within 30 s: check")


def test_hosts_of_one_name_are_told_by_their_address() -> None:
    told = mesh(3, r01=DEAD)
    told["hosts"] = [one._replace(name="node") for one in told["hosts"]]
    assert "link 10.0.0.1 (rank 0) - 10.0.0.2 (rank 1)" in verdict_lines(told, 5.0)[0]


def test_one_end_without_an_answer_is_a_dead_link() -> None:
    good = Link(1e-4, 5.0)
    assert pair_of_ends(host(0), host(1), good, Link(2e-4, 6.0)) == Pair(0, 1, 2e-4, 6.0, 5.0)
    for dead in ((good, Link(why="no answer")), (Link(why="no answer"), good)):
        assert pair_of_ends(host(0), host(1), *dead) == Pair(0, 1, None, None, None, "no answer")
    both = pair_of_ends(host(0), host(1), Link(why="no answer"), Link(why="connection refused"))
    assert both.why == "connection refused"


# --- all of it ---


@pytest.mark.compat
@pytest.mark.usefixtures("short_streams")
def test_three_ranks_of_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def told_in_time(store: Any, key: str, until: float) -> Any:
        return None if key == "host-3" else _told(store, key, until + 60)

    monkeypatch.setattr(preflight_module, "_told", told_in_time)
    store = HashStore()
    places = [RankPlace(rank, 4, "127.0.0.1", 1, rank == 0) for rank in range(3)]  # and rank 3 never comes
    with ThreadPoolExecutor() as pool:
        told = list(pool.map(lambda place: _tried(store, place, 60.0, 60.0), places))
    assert told[0] == told[1] == told[2]
    assert told[0]["missing"] == [3]
    assert sorted((pair.one, pair.other) for pair in told[0]["pairs"]) == [(0, 1), (0, 2), (1, 2)]
    assert all(pair.seconds and pair.bytes_per_s for pair in told[0]["pairs"])


def test_a_rank_without_a_store_says_so() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and nobody listens there
        port = nobody.getsockname()[1]
        told = preflight(RankPlace(1, 2, "127.0.0.1", port, False), 1.0, come_seconds=0.2)
    assert "got no answer from the store at 127.0.0.1:" in told["alone"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 3, "nothing measured: one host has no links"),
        (["--seconds", "0"], 2, "--seconds 0: give a number"),
    ],
)
def test_what_is_no_check(words: list[str], code: int, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "links", *words]) == code
    assert said in "".join(capfd.readouterr())


@pytest.mark.parametrize("words", [[], ["--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1"]])
def test_json_is_json_where_nothing_was_measured_too(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight_module, "preflight", lambda *_: {"alone": "rank 1 on b got no answer"})
    code = main(["bench", "links", "--json", *words])
    told = json.loads(capfd.readouterr().out)
    assert told["hosts"] == told["links"] == told["missing"] == []
    assert (code, len(told["verdict"])) == ((1, 1) if words else (3, 0))


def test_a_rank_that_torchrun_started_finds_its_place() -> None:
    """Rank 0 holds the store, unless torchrun's agent does."""
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
    place = preflight_module._place_of_rank
    assert place(environ) == RankPlace(0, 2, "a", 7, True)
    assert not place({**environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}).holds_store
    assert not place({**environ, "RANK": "1"}).holds_store


def between_hosts(names: list[str], seconds: float, come: Sequence[float] = ()) -> list[dict[str, Any]]:
    def one(number: int) -> dict[str, Any]:
        place = RankPlace(number, len(names), "10.79.0.1", 29512, number == 0)
        return preflight(place, seconds, come_seconds=come[number] if come else 60.0)

    told: list[dict[str, Any]] = on_each(names, one)
    return told


@pytest.mark.usefixtures("short_streams")
def test_hosts_that_are_alike() -> None:
    with hosts(3) as names:
        told = between_hosts(names, 60.0)
    assert told[0] == told[1] == told[2]
    assert len(told[0]["hosts"]) == 3 and len(told[0]["pairs"]) == 3
    assert [one.address for one in told[0]["hosts"]] == ["10.79.0.1", "10.79.0.2", "10.79.0.3"]
    assert all(pair.seconds is not None and pair.bytes_per_s for pair in told[0]["pairs"])


@pytest.mark.usefixtures("short_streams")
def test_two_hosts_that_start_it_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(number: int, seconds: float = 30.0) -> tuple[int, str]:
        several = {"nnodes": "2", "node_rank": number, "master_addr": "10.79.0.1", "master_port": 29513}
        options = argparse.Namespace(**several, json=False, seconds=seconds)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = bench_links(options)
        return code, out.getvalue()

    with hosts(2) as names:
        told = on_each(names, one)
        in_host(names[1], "ip", "route", "add", "blackhole", "10.79.0.1/32")
        monkeypatch.setattr(preflight_module, "_JOIN_SECONDS", 2.0)
        (code, said), _ = on_each(names, lambda number: one(number, 0.5) if number == 0 else None)
    assert told[0][0] == told[1][0] == 0
    assert told[0][1].startswith("1 link between 2 hosts tried: none is slow or dead") and told[1][1] == ""
    assert code == 1 and said.startswith("trainer: rank 1 did not come within ")


@pytest.mark.slow  # what is slow is measured; the tests of `verdict` above have the figures given
def test_a_slow_host_in_a_real_network() -> None:
    with hosts(3) as names:
        rule = ("tbf", "rate", "100mbit", "burst", "128kb", "latency", "100ms")
        in_host(names[2], "tc", "qdisc", "add", "dev", "eth0", "root", *rule)
        told = between_hosts(names, 3.0)
    (line,) = verdict_lines(told[0], 3.0)
    assert "10.79.0.3 (rank 2): all its 2 links, such as 0.0" in line and "from rank 2" in line


@pytest.mark.usefixtures("short_streams")
@pytest.mark.parametrize("how", ["iptables", pytest.param("blackhole", marks=pytest.mark.slow)])
def test_a_dead_link_in_a_real_network(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(server: Any, own: Host, one: Host, other: Host, number: int, seconds: float) -> Link:
        dead = (one.rank, other.rank) == (1, 2)  # the others may be slow: so may this machine
        return _try(server, own, one, other, number, 2.0 if dead else seconds)

    _try = preflight_module._try
    monkeypatch.setattr(preflight_module, "_try", tried)
    with hosts(3) as names:
        if how == "iptables":
            in_host(names[1], "iptables", "-A", "OUTPUT", "-d", "10.79.0.3", "-j", "DROP")
        else:
            in_host(names[1], "ip", "route", "add", "blackhole", "10.79.0.3/32")
        told = between_hosts(names, 60.0)
    assert [(pair.one, pair.other, pair.why) for pair in told[0]["pairs"] if pair.why] == [
        (1, 2, "no answer")
    ]
    # How fast the others are is this machine's matter.
    alike = {"seconds": 1e-4, "forth": GIGABIT, "back": GIGABIT}
    told[0]["pairs"] = [pair if pair.why else pair._replace(**alike) for pair in told[0]["pairs"]]
    (line,) = [line for line in verdict_lines(told[0], 4.0) if "no answer" in line]
    assert line.startswith("trainer: link 10.79.0.2 (rank 1) - 10.79.0.3 (rank 2): no answer within 4 s")


@pytest.mark.usefixtures("short_streams")
def test_a_host_that_is_down_in_a_real_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def told_in_time(store: Any, key: str, until: float) -> Any:
        return None if key == "host-2" else _told(store, key, until + 60)

    monkeypatch.setattr(preflight_module, "_told", told_in_time)
    with hosts(3) as names:
        in_host(names[2], "ip", "link", "set", "eth0", "down")
        told = between_hosts(names, 60.0, come=[60.0, 60.0, 0.2])
    assert told[0]["missing"] == [2] and told[1] == told[0]
    assert "rank 2 on " in told[2]["alone"] and "10.79.0.1:29512" in told[2]["alone"]
