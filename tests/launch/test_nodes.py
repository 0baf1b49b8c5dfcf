"""Launchers on several nodes meet in the run folder, end with one code, and say who is missing or gone.

The rendezvous alone, in threads; with real launchers and ranks: tests/launch/test_node_launchers.py.
"""

import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.clock import Clock
from tests.helpers.waiting import SECONDS, until
from trainer.errors import BadInputError
from trainer.launch.exit_record import ExitRecord
from trainer.launch.nodes import follower, leader, presence
from trainer.launch.nodes.discover import Nodes
from trainer.launch.nodes.follower import Follower
from trainer.launch.nodes.leader import Leader
from trainer.launch.nodes.presence import Presence, Said
from trainer.launch.nodes.rendezvous import Outcome, Rendezvous, Round

SAME = {"trainer": "1", "configuration": "abc"}


class Cluster:
    """The sides of some nodes, each played by a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.least, self.most, self.seconds = folder, 2, 2, SECONDS
        self.asked: dict[int, bool] = {}
        self.said: dict[int, list[str]] = {}
        self.sides: list[Rendezvous] = []
        self.waiting = list[Future[Round | Outcome]]()
        self.pool = ThreadPoolExecutor(8)

    def rendezvous(self, number: int, same: dict[str, str] = SAME, name: str = "127.0.0.1") -> Rendezvous:
        self.asked[number], self.said[number] = False, []
        nodes = Nodes(self.least, self.most, number, name, 29500, ("a", "b", "c")[: self.most])
        asked, say = (lambda: self.asked[number]), self.said[number].append
        kind = Follower if number else Leader
        self.sides.append(kind(nodes, 2, same, self.folder, self.seconds, asked, say))
        return self.sides[-1]

    def gather(self, rendezvous: Rendezvous) -> "Future[Round | Outcome]":
        return self.pool.submit(rendezvous.gather)

    def conclude(self, rendezvous: Rendezvous, code: int, leaving: bool = False) -> "Future[Outcome]":
        return self.pool.submit(rendezvous.conclude, [ExitRecord(0, code, time=time.monotonic())], leaving)

    def close(self) -> None:
        self.asked = dict.fromkeys(self.asked, True)
        for rendezvous in self.sides:
            rendezvous.close()
        self.pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cluster:
    # Who is to be in a round is there before node 0 begins to count: see `_met`.
    monkeypatch.setattr(leader, "_SETTLE_SECONDS", 0.02)
    monkeypatch.setattr(leader, "_FIRST_SETTLE_SECONDS", 0.02)
    monkeypatch.setattr(presence, "PRESENCE_POLL_SECONDS", 0.005)
    monkeypatch.setattr(presence, "BEAT_SECONDS", 0.01)
    one = Cluster(tmp_path)
    request.addfinalizer(one.close)
    return one


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed: after a hundred looks, however long those take."""
    monkeypatch.setattr(presence, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(presence, "ALIVE_SECONDS", 0.5)


def _turn_until(condition: Callable[[], bool], *sides: Rendezvous) -> None:
    def turned() -> bool:
        for rendezvous in () if condition() else sides:
            rendezvous.turn()
        return condition()

    until(turned)


def _met(cluster: Cluster, *sides: Rendezvous, waits: Rendezvous | None = None) -> list[Round]:
    """A round of sides that are all seen before it can begin, with one that is there and waits."""
    mine = sides[0]
    assert isinstance(mine, Leader)
    wanted, least = {side.nodes.number for side in (*sides, *([waits] if waits else []))}, mine.nodes.least
    mine.nodes = mine.nodes._replace(least=mine.nodes.most + 1)  # it can't begin yet
    waiting = [cluster.gather(side) for side in sides]
    if waits and not cluster.waiting:
        cluster.waiting.append(cluster.gather(waits))
    until(lambda: {0, *mine._there} == wanted)
    mine.nodes = mine.nodes._replace(least=least)
    rounds = [one.result(SECONDS) for one in waiting]
    assert all(isinstance(one, Round) for one in rounds)
    return [one for one in rounds if isinstance(one, Round)]


def _kill(side: Rendezvous) -> None:
    """As SIGKILL ends a launcher: its file stays, and changes no more."""
    side.presence._said = None
    side.presence.close(keep=True)


def test_nodes_meet_whoever_comes_first(cluster: Cluster) -> None:
    cluster.most = cluster.least = 3
    last, middle = cluster.rendezvous(2), cluster.rendezvous(1)
    waiting = [cluster.gather(last), cluster.gather(middle)]
    until(lambda: last.presence.looks > 3)  # in a folder where nobody is yet
    first = cluster.gather(cluster.rendezvous(0)).result(SECONDS)
    rounds = [first, *(one.result(SECONDS) for one in reversed(waiting))]
    assert [list(one.ranks) for one in rounds if isinstance(one, Round)] == [[0, 1], [2, 3], [4, 5]]
    assert {(one.world, one.number, one.address) for one in rounds if isinstance(one, Round)} == {
        (6, 1, "127.0.0.1")
    }


@pytest.mark.parametrize(
    ("codes", "wanted"), [((0, 0), 0), ((75, 75), 75), ((0, 2), 2), ((1, 0), 1), ((0, 76), 76)]
)
def test_all_end_with_one_code(cluster: Cluster, codes: tuple[int, int], wanted: int) -> None:
    sides = [cluster.rendezvous(0), cluster.rendezvous(1)]
    _met(cluster, *sides)
    waiting = [cluster.conclude(rendezvous, code) for rendezvous, code in zip(sides, codes, strict=True)]
    assert [one.result(SECONDS).code for one in waiting] == [wanted, wanted]
    cluster.close()
    (left,) = (cluster.folder / "nodes").iterdir()
    assert left.name == f"0-{sides[0].presence.id}"


def test_a_failure_ends_the_others_wait(cluster: Cluster) -> None:
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    _met(cluster, mine, other)
    ended = cluster.conclude(other, 1)
    _turn_until(lambda: mine.over, mine)
    cluster.conclude(mine, 1)
    assert ended.result(SECONDS).code == 1


@pytest.mark.usefixtures("impatient")
def test_a_node_that_is_gone_is_named(cluster: Cluster) -> None:
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    _met(cluster, mine, other)
    _kill(other)
    _turn_until(lambda: mine.over, mine)
    outcome = cluster.conclude(mine, 1).result(SECONDS)
    assert outcome[:2] == (False, 75)
    assert outcome.text.startswith(
        f"trainer: node 1 ({socket.gethostname()}) is gone: nothing was heard of it "
    )
    assert "for 1 s: was its launcher or host killed?\n" in outcome.text
    assert "the same command resumes from the newest checkpoint" in outcome.text
    assert not any("is gone" in line for line in cluster.said[0])  # told once


def test_a_launcher_that_ends_is_noticed_at_once(cluster: Cluster) -> None:
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    _met(cluster, mine, other)
    other.close()
    outcome = cluster.conclude(mine, 1).result(SECONDS)
    assert "is gone: its launcher ended\n" in outcome.text


@pytest.mark.usefixtures("impatient")
def test_without_node_0_nothing_goes_on(cluster: Cluster) -> None:
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    _met(cluster, mine, other)
    _kill(mine)
    _turn_until(lambda: other.over, other)
    outcome = cluster.conclude(other, 1).result(SECONDS)
    assert outcome[:2] == (False, 75)
    assert outcome.text.startswith("trainer: node 0 (a) is gone: nothing was heard of it for 1 s")


def test_who_doesnt_come_is_named_with_what_to_check(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for side in (leader, follower):
        monkeypatch.setattr(side, "FIRST_NOTICE_SECONDS", 0.0)
    cluster.most, cluster.least, cluster.seconds = 3, 3, 1.0
    mine, other = cluster.rendezvous(0), cluster.rendezvous(2)
    there = cluster.gather(other)
    outcome = cluster.gather(mine).result(SECONDS)
    assert isinstance(outcome, Outcome)
    assert outcome[:2] == (False, 1)
    assert outcome.text.startswith("trainer: node 1 (b) didn't come within 1 s, of 3 nodes (3 are needed)")
    for word in ("DNS", str(cluster.folder), "a file system that all nodes have", "127.0.0.1"):
        assert word in outcome.text
    assert there.result(SECONDS) == outcome  # the node that is there ends, too
    (mine_said,), (other_said,) = cluster.said[0], cluster.said[2]  # at first, and not again before 30 s
    assert mine_said.startswith("waits for node 1 (b)")
    assert other_said.startswith("waits: node 0 (a) ")


def test_what_is_in_the_way_to_node_0_is_said(cluster: Cluster) -> None:
    """Another folder, and a node 0 that hasn't begun, look alike."""
    cluster.seconds = 0.5
    outcome = cluster.gather(cluster.rendezvous(1)).result(SECONDS)
    assert isinstance(outcome, Outcome)
    assert outcome.code == 1
    assert (
        f"trainer: node 0 (a) hasn't begun in {cluster.folder}, as {socket.gethostname()} sees it"
        in outcome.text
    )
    waiting = cluster.gather(cluster.rendezvous(1, name="no-such-node.invalid"))
    cluster.seconds = SECONDS
    cluster.gather(cluster.rendezvous(0))
    outcome = waiting.result(SECONDS)
    assert isinstance(outcome, Outcome)
    assert "node 0 (a) can't be reached at no-such-node.invalid: the name isn't known here" in outcome.text


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


def test_a_stop_while_nodes_are_awaited(cluster: Cluster) -> None:
    waiting = cluster.gather(cluster.rendezvous(0))
    cluster.asked[0] = True
    outcome = waiting.result(SECONDS)
    assert isinstance(outcome, Outcome)
    assert outcome[:2] == (False, 75)


# --- elastic ---


@pytest.mark.usefixtures("impatient")
def test_an_elastic_job_goes_on_without_a_node_and_with_it_again(cluster: Cluster) -> None:
    cluster.least = 1
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    _met(cluster, mine, other)
    _kill(other)
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


@pytest.mark.usefixtures("impatient")
def test_an_elastic_job_waits_for_node_0_which_may_start_at_once(cluster: Cluster) -> None:
    cluster.least = 1
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    _met(cluster, mine, other)
    _kill(mine)
    anew = cluster.rendezvous(0)  # what the killed one left doesn't yet look so
    assert cluster.conclude(other, 1).result(SECONDS)[:2] == (True, 75)
    assert [one.world for one in _met(cluster, anew, other)] == [4, 4]


def test_with_fewer_than_the_least_it_doesnt_go_on(cluster: Cluster) -> None:
    cluster.least, cluster.most = 2, 3
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    _met(cluster, mine, other)
    mine.seconds = 0.2
    other.close()
    assert cluster.conclude(mine, 1).result(SECONDS).again
    outcome = cluster.gather(mine).result(SECONDS)
    assert isinstance(outcome, Outcome)
    assert (outcome.code, outcome.again) == (1, False)


def test_a_node_that_reads_late_finds_the_next_round(cluster: Cluster) -> None:
    """Node 0 may begin at once; a slow node reads the end of a round together with the next one's begin."""
    cluster.least, cluster.most = 1, 3
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    _met(cluster, mine, other)
    last = cluster.rendezvous(2)
    coming = cluster.gather(last)
    _turn_until(lambda: mine.stop and other.stop, mine, other)
    other._tell(ended=1)
    assert cluster.conclude(mine, 75).result(SECONDS).again
    begun = cluster.gather(mine).result(SECONDS)
    assert cluster.conclude(other, 75).result(SECONDS).again
    rounds = [begun, cluster.gather(other).result(SECONDS), coming.result(SECONDS)]
    assert not other.stop and not other.over
    assert [one.world for one in rounds if isinstance(one, Round)] == [6, 6, 6]


def test_a_round_takes_as_many_nodes_as_can_share_the_batch(cluster: Cluster) -> None:
    cluster.least, cluster.most = 1, 3
    mine, other, last = (cluster.rendezvous(number) for number in range(3))
    assert isinstance(mine, Leader)
    mine.suits = lambda world: world != 6
    assert [one.world for one in _met(cluster, mine, other, waits=last)] == [4, 4]
    assert not cluster.waiting[-1].done()
    other.close()
    assert cluster.conclude(mine, 1).result(SECONDS).again
    assert [one.world for one in _met(cluster, mine, waits=last)] == [4]
    assert isinstance(cluster.waiting[0].result(SECONDS), Round)


def test_two_nodes_with_one_number_are_told(cluster: Cluster) -> None:
    cluster.least = cluster.most = 3
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    waiting = [cluster.gather(mine), cluster.gather(other)]
    assert isinstance(mine, Leader)
    until(lambda: mine._there)
    with pytest.raises(BadInputError, match=r"is node 1 already, and .* says it is"):
        cluster.gather(cluster.rendezvous(1)).result(SECONDS)
    files = {f"{one.nodes.number}-{one.presence.id}" for one in (mine, other)}
    with pytest.raises(BadInputError, match=r"is node 0 of .* already"):
        cluster.gather(late := cluster.rendezvous(0)).result(SECONDS)
    late.close()
    left = {file.name for file in (cluster.folder / "nodes").iterdir()}
    assert files <= left and f"0-{late.presence.id}" not in left
    assert not any(one.done() for one in waiting)


@pytest.mark.usefixtures("impatient")
def test_a_node_that_starts_anew_takes_its_place(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "SILENT_SECONDS", SECONDS)  # it needn't be silent for so long then
    cluster.least = 1
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    _met(cluster, mine, other)
    _kill(other)
    waiting = cluster.gather(cluster.rendezvous(1))
    _turn_until(lambda: mine.over, mine)
    outcome = cluster.conclude(mine, 1).result(SECONDS)
    assert outcome.again and outcome.text.count("is gone: its launcher was restarted") == 1
    rounds = [cluster.gather(mine).result(SECONDS), waiting.result(SECONDS)]
    assert [one.world for one in rounds if isinstance(one, Round)] == [4, 4]


@pytest.mark.usefixtures("impatient")
def test_a_node_that_is_killed_between_rounds_is_told_once(cluster: Cluster) -> None:
    cluster.least, cluster.most = 1, 3
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    _met(cluster, mine, other)
    third = cluster.gather(cluster.rendezvous(2))
    _turn_until(lambda: mine.stop and other.stop, mine, other)
    other._tell(ended=1)
    outcome = cluster.conclude(mine, 75).result(SECONDS)
    _kill(other)
    assert isinstance(mine, Leader)
    _turn_until(lambda: 1 not in mine._there, mine)
    rounds = [cluster.gather(mine).result(SECONDS), third.result(SECONDS)]
    assert [one.world for one in rounds if isinstance(one, Round)] == [4, 4]
    assert (outcome.text + "".join(cluster.said[0])).count("is gone") == 1


@pytest.mark.usefixtures("impatient")
def test_a_launcher_that_was_paused_is_told_and_comes_back(cluster: Cluster) -> None:
    cluster.least = 1
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    _met(cluster, mine, other)
    turn, other.presence.turn = other.presence.turn, lambda: None  # type: ignore[method-assign]
    assert cluster.conclude(mine, 1).result(SECONDS).again
    assert isinstance(cluster.gather(mine).result(SECONDS), Round)
    other.presence.turn = turn  # type: ignore[method-assign]
    _turn_until(lambda: other.over, other)
    assert cluster.conclude(other, 1).result(SECONDS).again
    waiting = cluster.gather(other)
    _turn_until(lambda: mine.stop, mine)
    assert cluster.conclude(mine, 75).result(SECONDS).again
    rounds = [cluster.gather(mine).result(SECONDS), waiting.result(SECONDS)]
    assert [one.world for one in rounds if isinstance(one, Round)] == [4, 4]


@pytest.mark.usefixtures("impatient")
def test_a_node_0_that_was_paused_goes_on_with_those_who_gave_it_up(cluster: Cluster) -> None:
    cluster.least = 1
    mine, other = cluster.rendezvous(0), cluster.rendezvous(1)
    _met(cluster, mine, other)
    turn, mine.presence.turn = mine.presence.turn, lambda: None  # type: ignore[method-assign]
    assert cluster.conclude(other, 1).result(SECONDS).again
    mine.presence.turn = turn  # type: ignore[method-assign]
    assert cluster.conclude(mine, 1).result(SECONDS).again
    assert [one.world for one in _met(cluster, mine, other)] == [4, 4]


# --- the files ---


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Presence, Clock]:
    """Node 0's, which looks when it is told to, by a clock of its own."""
    clock = Clock()
    monkeypatch.setattr(presence, "time", clock.time)
    monkeypatch.setattr(Presence, "_run", lambda _: None)
    return Presence(tmp_path / "nodes", 0), clock


def _written(folder: Path, name: str, said: Said | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(presence._SAID.dump_json(said or Said("x", 1, {})))
    return folder / name


def test_silence_is_counted_in_looks_and_not_by_clocks(alone: tuple[Presence, Clock]) -> None:
    here, clock = alone
    file = _written(here.folder, "1-0123456789abcdef")
    here.turn()
    assert not here.seen[file.name].beats  # it may be what a killed launcher left
    for beat in range(1, 40):
        clock.move(0.5)
        os.utime(file, (beat * 1e6 % 7, beat * 1e6 % 7))  # a clock of its own, that jumps
        here.turn()
        (one,) = here.seen.values()
        assert one.beats and one.silent == 0
    clock.move(3600)  # a file server hung, and everybody with it
    here.turn()
    assert 0 < here.seen[file.name].silent <= 1
    for _ in range(100):
        clock.move(0.5)
        here.turn()
    assert here.seen[file.name].silent > 30 and not here.seen[file.name].beats


def test_a_folder_that_cant_be_read_makes_nobody_look_gone(
    alone: tuple[Presence, Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, clock = alone
    file = _written(here.folder, "1-0123456789abcdef")
    here.turn()

    def stale(_: Path) -> list[str]:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(presence, "names", stale)
    for _ in range(100):
        clock.move(0.5)
        here.turn()
    assert here.seen[file.name].silent == 0 and "can't be read since 50 s" in here.blind


def test_what_a_stranger_leaves_is_passed_over(alone: tuple[Presence, Clock]) -> None:
    here, clock = alone
    folder, id_ = here.folder, partial(secrets.token_hex, 8)
    real = _written(folder, f"1-{id_()}")
    for said in (
        b"", b"[" * 100_000, b"\xff", b"{}", b"x" * (5 << 20), b'{"name": "x", "ranks": 1e999, "same": {}}',
        b'{"name": "x", "ranks": true, "same": {}}', b'{"name": "x", "ranks": 1, "same": {}, "more": 1}',
        b'{"name": "x", "ranks": 1, "same": {"a": {}}, "records": [{}]}',
    ):  # fmt: skip
        (folder / f"1-{id_()}").write_bytes(said)
    os.mkfifo(folder / f"1-{id_()}")
    (folder / f"1-{id_()}").symlink_to("/dev/zero")
    (folder / f"1-{id_()}").symlink_to(real)
    (folder / f"1-{id_()}").mkdir()
    for name in (
        f"01-{id_()}",
        f"-1-{id_()}",
        f"1-{id_()}.json",
        f"9999999-{id_()}",
        "1-ABCDEF",
        "\x1b]0;x\x07",
    ):
        shutil.copy(real, folder / name)
    here.turn()
    assert list(here.seen) == [real.name]
    odd = _written(folder, f"2-{id_()}")
    odd.write_text('{"name": "\\u001b]0;mine\\u0007\\nx", "ranks": 1, "same": {}}')
    here.turn()
    assert here.seen[odd.name].said.name == "x"
    odd.unlink()
    odd.symlink_to(real)  # what was a launcher's isn't any more: it is silent
    clock.move(0.5)
    here.turn()
    assert here.seen[odd.name].silent == 0.5


def test_node_0_removes_what_earlier_starts_left(alone: tuple[Presence, Clock], tmp_path: Path) -> None:
    here, _ = alone
    old, kept = _written(here.folder, "0-0123456789abcdef"), _written(here.folder, "somebody's")
    (here.folder / "1-0123456789abcdef").mkdir()
    (tmp_path / "victim").touch()
    (here.folder / "2-0123456789abcdef").symlink_to(tmp_path / "victim")
    here.say(Said("x", 1, {}))
    here.turn()
    assert here.stands and not old.exists() and kept.exists() and (tmp_path / "victim").exists()


def test_who_cant_write_is_silent_and_says_so(alone: tuple[Presence, Clock], tmp_path: Path) -> None:
    here, _ = alone
    (tmp_path / "nodes").symlink_to(tmp_path)
    here.say(Said("x", 1, {}))
    here.turn()
    assert not here.stands and "is a symbolic link" in here.unwritten


def test_what_is_said_survives_the_file(alone: tuple[Presence, Clock]) -> None:
    here, _ = alone
    said = Said("x", 2, SAME, "l", "::1", 3, (ExitRecord(1, 1, "line", "trace", 2.5),), True, 4, (("i", 2),))
    there = _written(here.folder, "1-0123456789abcdef", said)
    here.turn()
    assert asdict(here.seen[there.name].said) == asdict(said)
