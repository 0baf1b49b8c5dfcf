"""Launchers on several nodes meet, end with one code, and say who is missing or gone.

The rendezvous alone, in threads; with real launchers and ranks: tests/launch/test_node_launchers.py.
"""

import json
import select
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ports import free_port
from tests.helpers.waiting import SECONDS, until
from trainer.errors import BadInputError
from trainer.launch.exit_record import ExitRecord
from trainer.launch.nodes import client, server, wire
from trainer.launch.nodes.client import RendezvousClient, sees
from trainer.launch.nodes.discover import Nodes
from trainer.launch.nodes.rendezvous import Outcome, Rendezvous, Round
from trainer.launch.nodes.server import RendezvousServer

SAME = {"trainer": "1", "configuration": "abc"}


class Cluster:
    """The sides of some nodes, each played by a thread."""

    def __init__(self, nodes: str = "2", ranks: int = 2, seconds: float = SECONDS) -> None:
        least, _, most = nodes.rpartition(":")
        self.least, self.most = int(least or most), int(most)
        self.port, self.ranks, self.seconds = free_port(), ranks, seconds
        self.asked: dict[int, bool] = {}
        self.said: dict[int, list[str]] = {}
        self.sides: list[Rendezvous] = []
        self.pool = ThreadPoolExecutor(8)

    def rendezvous(self, number: int, same: dict[str, str] = SAME, name: str = "127.0.0.1") -> Rendezvous:
        self.asked[number], self.said[number] = False, []
        nodes = Nodes(self.least, self.most, number, name, self.port, ("a", "b", "c")[: self.most])
        asked, say = (lambda: self.asked[number]), self.said[number].append
        rendezvous: Rendezvous
        if number:
            rendezvous = RendezvousClient(nodes, self.ranks, same, self.seconds, asked, say)
        else:
            rendezvous = RendezvousServer(nodes, self.ranks, same, "/run", self.seconds, asked, say)
        self.sides.append(rendezvous)
        return rendezvous

    def gather(self, rendezvous: Rendezvous) -> "Future[Round | Outcome]":
        return self.pool.submit(rendezvous.gather)

    def conclude(self, rendezvous: Rendezvous, code: int, leaving: bool = False) -> "Future[Outcome]":
        return self.pool.submit(rendezvous.conclude, [ExitRecord(0, code, time=time.monotonic())], leaving)

    def close(self) -> None:
        for rendezvous in self.sides:
            with suppress(OSError):
                rendezvous.close()
        self.pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    # Who is to be in a round has knocked before node 0 begins to count: see `_met`.
    monkeypatch.setattr(server, "_SETTLE_SECONDS", 0.02)
    monkeypatch.setattr(server, "_FIRST_SETTLE_SECONDS", 0.02)
    monkeypatch.setattr(client, "_AGAIN_SECONDS", 0.05)
    for side in (server, client):
        monkeypatch.setattr(side, "_POLL_SECONDS", 0.005)
    one = Cluster()
    request.addfinalizer(one.close)
    return one


def _turn_until(condition: Callable[[], bool], *sides: Rendezvous) -> None:
    def turned() -> bool:
        for rendezvous in () if condition() else sides:
            rendezvous.turn()
        return condition()

    until(turned)


def _until_knocked(rendezvous: Rendezvous) -> None:
    """Waits until a client's hello lies in node 0's socket."""

    def knocked() -> bool:
        line = rendezvous._wire if isinstance(rendezvous, RendezvousClient) else None
        return line is not None and not line.gone and line._spoke != line._heard and not line._out

    until(knocked)


def _met(cluster: Cluster, *sides: Rendezvous) -> list[Round]:
    """A round of all of them: node 0, which listens from its start, counts when the others are there."""
    waiting: list[Future[Round | Outcome]] = []
    for rendezvous in reversed(sides):
        waiting.insert(0, cluster.gather(rendezvous))
        if isinstance(rendezvous, RendezvousClient):
            _until_knocked(rendezvous)
    rounds = [one.result(SECONDS) for one in waiting]
    assert all(isinstance(one, Round) for one in rounds)
    return [one for one in rounds if isinstance(one, Round)]


def test_nodes_meet_whoever_comes_first(cluster: Cluster) -> None:
    cluster.most = cluster.least = 3
    last, middle = cluster.rendezvous(2), cluster.rendezvous(1)
    waiting = [cluster.gather(last), cluster.gather(middle)]
    time.sleep(0.2)  # they knock at a door that isn't there yet
    first = cluster.gather(cluster.rendezvous(0)).result(SECONDS)
    rounds = [first, *(one.result(SECONDS) for one in reversed(waiting))]
    assert [list(one.ranks) for one in rounds if isinstance(one, Round)] == [[0, 1], [2, 3], [4, 5]]
    assert {(one.world, one.number, one.folder) for one in rounds if isinstance(one, Round)} == {
        (6, 1, "/run")
    }
    assert len({one.token for one in rounds if isinstance(one, Round)}) == 1


@pytest.mark.parametrize(
    ("codes", "wanted"), [((0, 0), 0), ((75, 75), 75), ((0, 2), 2), ((1, 0), 1), ((0, 76), 76)]
)
def test_all_end_with_one_code(cluster: Cluster, codes: tuple[int, int], wanted: int) -> None:
    sides = [cluster.rendezvous(0), cluster.rendezvous(1)]
    _met(cluster, *sides)
    waiting = [cluster.conclude(rendezvous, code) for rendezvous, code in zip(sides, codes, strict=True)]
    assert [one.result(SECONDS).code for one in waiting] == [wanted, wanted]


def test_a_failure_ends_the_others_wait(cluster: Cluster) -> None:
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    _met(cluster, mine, other)
    ended = cluster.conclude(other, 1)
    _turn_until(lambda: mine.over, mine)
    cluster.conclude(mine, 1)
    assert ended.result(SECONDS).code == 1


def test_a_node_that_is_gone_is_named(cluster: Cluster) -> None:
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    _met(cluster, mine, other)
    other.close()
    _turn_until(lambda: mine.over, mine)
    outcome = cluster.conclude(mine, 1).result(SECONDS)
    assert outcome[:2] == (False, 75)
    assert outcome.text.startswith("trainer: node 1 (")
    assert "is gone: its launcher ended\n" in outcome.text
    assert "the same command resumes from the newest checkpoint" in outcome.text


def test_a_cut_cable_is_noticed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    _met(cluster, mine, other)
    monkeypatch.setattr(wire, "SILENT_SECONDS", 0.1)
    outcome = cluster.conclude(mine, 1).result(SECONDS)  # the other is not heard of: nobody turns it
    assert "nothing was heard of it for 0.1 s: is its network up?" in outcome.text


def test_without_node_0_nothing_goes_on(cluster: Cluster) -> None:
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    _met(cluster, mine, other)
    mine.close()
    _turn_until(lambda: other.over, other)
    outcome = cluster.conclude(other, 1).result(SECONDS)
    assert outcome == Outcome(False, 75, "trainer: node 0 (a) is gone: its launcher ended\n")


def test_who_doesnt_come_is_named_with_what_to_check(cluster: Cluster) -> None:
    cluster.most, cluster.least, cluster.seconds = 3, 3, 0.1
    mine, other = cluster.rendezvous(0), cluster.rendezvous(2)
    there = cluster.gather(other)
    _until_knocked(other)
    outcome = cluster.gather(mine).result(SECONDS)
    assert isinstance(outcome, Outcome)
    assert outcome[:2] == (False, 1)
    assert outcome.text.startswith("trainer: node 1 (b) didn't come within 0.1 s, of 3 nodes (3 are needed)")
    for word in (
        "DNS",
        "NetworkPolicy",
        f"127.0.0.1:{cluster.port}",
        f"ports {cluster.port} and {cluster.port + 1}",
    ):
        assert word in outcome.text
    assert there.result(SECONDS) == outcome  # the node that is there ends, too


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("127.0.0.1", "nothing listens there: is node 0 started"),
        ("no-such-node.invalid", "the name isn't known here"),
    ],
)
def test_what_is_in_the_way_to_node_0_is_said(cluster: Cluster, name: str, words: str) -> None:
    cluster.seconds = 0.1
    outcome = cluster.gather(cluster.rendezvous(1, name=name)).result(SECONDS)
    assert isinstance(outcome, Outcome)
    assert outcome.code == 1
    assert f"trainer: node 0 (a) can't be reached at {name}:{cluster.port}: {words}" in outcome.text


@pytest.mark.parametrize(
    ("same", "words"),
    [
        ({**SAME, "trainer": "2"}, "node 1 ({host}) has another trainer than node 0: 2, not 1"),
        ({"trainer": "1"}, "has another configuration than node 0: None, not abc"),
    ],
)
def test_a_node_with_something_else_is_refused(cluster: Cluster, same: dict[str, str], words: str) -> None:
    mine = cluster.gather(cluster.rendezvous(0))
    with pytest.raises(BadInputError) as raised:
        cluster.gather(cluster.rendezvous(1, same)).result(SECONDS)
    assert words.format(host=socket.gethostname()) in str(raised.value)
    outcome = mine.result(SECONDS)
    assert isinstance(outcome, Outcome)
    assert outcome.code == 2  # it would wait in vain
    assert any("was refused" in line for line in cluster.said[0])


def test_noise_at_the_port_disturbs_nobody(cluster: Cluster) -> None:
    mine = cluster.gather(cluster.rendezvous(0))
    for noise in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\n",
        b'{"node": 1}\n',
        b"[" * 100_000 + b"\n",
        b'{"node": 1, "name": "x", "ranks": Infinity, "same": {}}\n',
        b'{"node": true, "name": "x", "ranks": 1, "same": {}}\n',
        b'{"node": 9, "name": "x", "ranks": 1, "same": {}}\n',
    ):
        with socket.create_connection(("127.0.0.1", cluster.port)) as caller:
            caller.sendall(noise)
            caller.settimeout(SECONDS)
            with suppress(ConnectionResetError):
                while caller.recv(4096):  # until it is sent away
                    pass
    silent, alive = (socket.create_connection(("127.0.0.1", cluster.port)) for _ in range(2))
    alive.sendall(b"{}\n")  # which says nothing but that it lives
    assert isinstance(cluster.gather(cluster.rendezvous(1)).result(SECONDS), Round)
    assert isinstance(mine.result(SECONDS), Round)
    silent.close()
    alive.close()


def test_many_who_say_nothing_leave_room_for_a_node(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MOST_STRANGERS", 8)
    mine = cluster.gather(cluster.rendezvous(0))
    silent = [socket.create_connection(("127.0.0.1", cluster.port)) for _ in range(40)]
    for caller in silent[:32]:  # who came first is sent away first
        caller.settimeout(SECONDS)
        with suppress(ConnectionResetError):
            while caller.recv(4096):
                pass
    assert isinstance(cluster.gather(cluster.rendezvous(1)).result(SECONDS), Round)
    assert isinstance(mine.result(SECONDS), Round)
    for caller in silent:
        caller.close()


def test_names_of_strangers_are_printed_without_what_they_do_to_a_terminal(cluster: Cluster) -> None:
    mine = cluster.gather(cluster.rendezvous(0))
    hello: dict[str, Any] = {"node": 9, "name": "\x1b]0;mine\x07\nx", "ranks": 1, "same": {}}
    with socket.create_connection(("127.0.0.1", cluster.port)) as caller:
        caller.sendall(json.dumps(hello).encode() + b"\n")
        said = caller.recv(4096).decode()
    assert "calls itself node 9" in said and not {"\x1b", "\x07"} & {*json.loads(said)["refused"]}
    assert "\n" not in json.loads(said)["refused"]
    cluster.asked[0] = True
    assert isinstance(mine.result(SECONDS), Outcome)


def test_a_port_in_use_is_one_line(cluster: Cluster) -> None:
    with socket.create_server(("", cluster.port)), pytest.raises(BadInputError, match="can't listen at port"):
        cluster.rendezvous(0)


def test_a_stop_while_nodes_are_awaited(cluster: Cluster) -> None:
    waiting = cluster.gather(cluster.rendezvous(0))
    cluster.asked[0] = True
    outcome = waiting.result(SECONDS)
    assert isinstance(outcome, Outcome)
    assert outcome[:2] == (False, 75)


# --- elastic ---


def test_an_elastic_job_goes_on_without_a_node_and_with_it_again(cluster: Cluster) -> None:
    cluster.least = 1
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    _met(cluster, mine, other)
    other.close()
    outcome = cluster.conclude(mine, 1).result(SECONDS)
    assert outcome[:2] == (True, 75)
    (alone,) = _met(cluster, mine)
    assert (alone.number, alone.world) == (2, 2)
    assert not mine.over
    back = cluster.rendezvous(1)
    waiting = cluster.gather(back)
    _turn_until(lambda: mine.stop, mine)  # its ranks are to write a checkpoint
    outcome = cluster.conclude(mine, 75).result(SECONDS)
    assert outcome.again
    assert "node 1 (b) has come" in outcome.text
    rounds = [cluster.gather(mine).result(SECONDS), waiting.result(SECONDS)]
    assert [one.world for one in rounds if isinstance(one, Round)] == [4, 4]


def test_a_node_that_is_asked_to_leave_leaves_the_others(cluster: Cluster) -> None:
    cluster.least = 1
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    _met(cluster, mine, other)
    leaves, stays = cluster.conclude(other, 75, leaving=True), cluster.conclude(mine, 75)
    assert leaves.result(SECONDS)[:2] == (False, 75)
    assert stays.result(SECONDS)[:2] == (True, 75)
    (alone,) = _met(cluster, mine)
    assert alone.world == 2


def test_an_elastic_job_waits_for_node_0(cluster: Cluster) -> None:
    cluster.least = 1
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    _met(cluster, mine, other)
    mine.close()
    assert cluster.conclude(other, 1).result(SECONDS)[:2] == (True, 75)
    waiting, anew = cluster.gather(other), cluster.rendezvous(0)
    _until_knocked(other)
    rounds = [cluster.gather(anew).result(SECONDS), waiting.result(SECONDS)]
    assert [one.world for one in rounds if isinstance(one, Round)] == [4, 4]


def test_with_fewer_than_the_least_it_doesnt_go_on(cluster: Cluster) -> None:
    cluster.least, cluster.most = 2, 3
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    _met(cluster, mine, other)
    assert isinstance(mine, RendezvousServer)
    mine.seconds = 0.2
    other.close()
    assert cluster.conclude(mine, 1).result(SECONDS).again
    outcome = cluster.gather(mine).result(SECONDS)
    assert isinstance(outcome, Outcome)
    assert (outcome.code, outcome.again) == (1, False)


def test_what_follows_a_outcome_in_the_same_breath_is_the_next_round(cluster: Cluster) -> None:
    """The server may begin at once; a client that is slow reads both lines together."""
    cluster.least, cluster.most = 1, 3
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    _met(cluster, mine, other)
    last = cluster.rendezvous(2)
    coming = cluster.gather(last)
    _turn_until(lambda: mine.stop and other.stop, mine, other)
    assert isinstance(other, RendezvousClient) and other._wire is not None
    other._wire.say(ended=[], leaving=False)
    assert cluster.conclude(mine, 75).result(SECONDS).again
    begun = cluster.gather(mine).result(SECONDS)
    assert cluster.conclude(other, 75).result(SECONDS).again
    rounds = [begun, cluster.gather(other).result(SECONDS), coming.result(SECONDS)]
    assert not other.stop and not other.over
    assert [one.world for one in rounds if isinstance(one, Round)] == [6, 6, 6]


def test_a_round_takes_as_many_nodes_as_can_share_the_batch(cluster: Cluster) -> None:
    cluster.least, cluster.most = 1, 3
    mine, other, last = (cluster.rendezvous(number) for number in range(3))
    assert isinstance(mine, RendezvousServer)
    mine.suits = lambda world: world != 6
    waits = cluster.gather(last)
    _until_knocked(last)
    assert [one.world for one in _met(cluster, mine, other)] == [4, 4]
    assert not waits.done()
    other.close()
    assert cluster.conclude(mine, 1).result(SECONDS).again
    assert [one.world for one in _met(cluster, mine)] == [4]
    assert isinstance(waits.result(SECONDS), Round)


def test_two_nodes_with_one_number_are_told(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_ALIVE_SECONDS", SECONDS)
    cluster.least = cluster.most = 3
    rendezvous = cluster.rendezvous(0)
    mine, first = cluster.gather(rendezvous), cluster.gather(cluster.rendezvous(1))
    assert isinstance(rendezvous, RendezvousServer)
    until(lambda: rendezvous._clients)
    with pytest.raises(BadInputError, match=r"is node 1 already, and .* says it is"):
        cluster.gather(cluster.rendezvous(1)).result(SECONDS)
    assert not first.done()
    assert not mine.done()
    for number in (0, 1):
        cluster.asked[number] = True


def test_a_node_that_starts_anew_takes_its_place(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its old connection may still look alive: the host died without a word."""
    monkeypatch.setattr(server, "_ALIVE_SECONDS", 0.0)
    cluster.least = 1
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    _met(cluster, mine, other)
    waiting = cluster.gather(cluster.rendezvous(1))
    _turn_until(lambda: mine.over, mine)
    assert cluster.conclude(mine, 1).result(SECONDS).again
    rounds = [cluster.gather(mine).result(SECONDS), waiting.result(SECONDS)]
    assert [one.world for one in rounds if isinstance(one, Round)] == [4, 4]


def test_the_run_folder_is_known_by_what_lies_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_FOLDER_SECONDS", 0.0)
    assert not sees(tmp_path, ".meeting", "abc")
    (tmp_path / ".meeting").write_text("other")
    assert not sees(tmp_path, ".meeting", "abc")
    (tmp_path / ".meeting").write_text("abc")
    assert sees(tmp_path, ".meeting", "abc")
    assert not sees(tmp_path / "none", ".meeting", "abc")


# --- a launcher that is killed, in every order of events ---


def _kill(other: Rendezvous, mine: Rendezvous, unread: bool) -> None:
    """As SIGKILL ends a launcher; where it had something unread, its system answers with a reset."""
    assert isinstance(other, RendezvousClient) and other._wire is not None
    if unread:
        assert isinstance(mine, RendezvousServer)
        mine._tell()
        select.select([other._wire._socket], [], [], SECONDS)
    other._wire._socket.close()


def _in_the_round(
    _cluster: Cluster, mine: RendezvousServer, other: Rendezvous, unread: bool
) -> list[Outcome | Round]:
    _kill(other, mine, unread)
    _turn_until(lambda: mine.over, mine)
    return [mine.conclude([ExitRecord(0, 1)], False)]


def _when_node_0_speaks_first(
    _cluster: Cluster, mine: RendezvousServer, other: Rendezvous, unread: bool
) -> list[Outcome | Round]:
    """What it says finds nobody, and what it says next can't be sent any more."""
    _kill(other, mine, unread)
    for _ in range(3):
        mine._tell()
        time.sleep(0.05)
    return [mine.conclude([ExitRecord(0, 1)], False)]


def _after_node_0s_ranks(
    cluster: Cluster, mine: RendezvousServer, other: Rendezvous, unread: bool
) -> list[Outcome | Round]:
    waiting = cluster.conclude(mine, 1)
    _turn_until(lambda: other.over, other)
    _kill(other, mine, unread)
    return [waiting.result(SECONDS)]


def _after_its_own_ranks(
    cluster: Cluster, mine: RendezvousServer, other: Rendezvous, unread: bool
) -> list[Outcome | Round]:
    """Both stopped because a third node came."""
    third = cluster.gather(cluster.rendezvous(2))
    _turn_until(lambda: mine.stop and other.stop, mine, other)
    assert isinstance(other, RendezvousClient) and other._wire is not None
    other._wire.say(ended=[], leaving=False)
    _kill(other, mine, unread)
    outcome = mine.conclude([ExitRecord(0, 75)], False)
    return [outcome, mine.gather(), third.result(SECONDS)]


def _between_rounds(
    cluster: Cluster, mine: RendezvousServer, other: Rendezvous, unread: bool
) -> list[Outcome | Round]:
    third = cluster.gather(cluster.rendezvous(2))
    _turn_until(lambda: mine.stop and other.stop, mine, other)
    assert isinstance(other, RendezvousClient) and other._wire is not None
    other._wire.say(ended=[], leaving=False)
    outcome = mine.conclude([ExitRecord(0, 75)], False)
    _kill(other, mine, unread)
    return [outcome, mine.gather(), third.result(SECONDS)]


def _back_before_it_is_noticed(
    cluster: Cluster, mine: RendezvousServer, other: Rendezvous, unread: bool
) -> list[Outcome | Round]:
    _kill(other, mine, unread)
    back = cluster.rendezvous(1)
    waiting = cluster.gather(back)
    _until_knocked(back)  # end and hello lie in the sockets
    _turn_until(lambda: mine.over, mine)
    outcome = mine.conclude([ExitRecord(0, 1)], False)
    return [outcome, mine.gather(), waiting.result(SECONDS)]


def _back_after_its_host_went_down(
    cluster: Cluster, mine: RendezvousServer, _other: Rendezvous, _unread: bool
) -> list[Outcome | Round]:
    server._ALIVE_SECONDS = 0.0
    waiting = cluster.gather(cluster.rendezvous(1))  # its old connection looks alive
    _turn_until(lambda: mine.over, mine)
    outcome = mine.conclude([ExitRecord(0, 1)], False)
    return [outcome, mine.gather(), waiting.result(SECONDS)]


@pytest.mark.parametrize("unread", [False, True], ids=["end", "reset"])
@pytest.mark.parametrize(
    "order",
    [
        _in_the_round,
        _when_node_0_speaks_first,
        _after_node_0s_ranks,
        _after_its_own_ranks,
        _between_rounds,
        _back_before_it_is_noticed,
        _back_after_its_host_went_down,
    ],
)
def test_a_killed_launcher_is_told_once_in_every_order(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    order: Callable[[Cluster, RendezvousServer, Rendezvous, bool], list[Outcome | Round]],
    unread: bool,
) -> None:
    monkeypatch.setattr(server, "_ALIVE_SECONDS", server._ALIVE_SECONDS)
    cluster.least, cluster.most = 1, 3
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    assert isinstance(mine, RendezvousServer)
    _met(cluster, mine, other)
    results = order(cluster, mine, other, unread)
    outcomes = [one for one in results if isinstance(one, Outcome)]
    assert [one[:2] for one in outcomes] == [(True, 75)]  # the job goes on
    told = "".join(one.text for one in outcomes) + "".join(cluster.said[0])
    assert told.count(f"node 1 ({socket.gethostname()}) is gone: its launcher ended") == 1, told
    assert told.count("is gone") == 1, told
