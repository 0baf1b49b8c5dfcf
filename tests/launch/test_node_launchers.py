"""Launchers on several nodes are one job: real ones, with real ranks, on this host."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import preloaded
from tests.helpers.ports import free_port
from tests.helpers.waiting import SECONDS, until

ROOT = Path(__file__).parents[2]

START = """
import json, sys
from pathlib import Path
from trainer.launch.nodes import leader, presence
from trainer.launch.nodes.discover import Nodes
from trainer.launch.launcher import LocalRanks
from trainer.launch.rounds import launch_with_others
from trainer.cli import main
leader._FIRST_SETTLE_SECONDS, leader._SETTLE_SECONDS = 600.0, 0.1
presence.SILENT_SECONDS, presence.ALIVE_SECONDS, presence.PRESENCE_POLL_SECONDS = 6.0, 3.0, 0.1
nodes, folder, out, seconds, *what = sys.argv[1:]
from trainer.errors import BadInputError
try:
    code = launch_with_others(
        "tests.helpers.launch_worker", {"words": [folder, *what]}, LocalRanks(1, 1),
        nodes=Nodes(*json.loads(nodes)), folder=Path(out), same={}, grace_seconds=120.0,
        join_seconds=float(seconds))
except BadInputError as error:
    print(error, file=sys.stderr)
    code = 2
sys.exit(code)
"""


class Launchers:
    """Two launchers on this host, as if on two nodes, with a rank each."""

    def __init__(self, folder: Path, nodes: str = "2") -> None:
        least, _, most = nodes.rpartition(":")
        self.least, self.most, self.port = int(least or most), int(most), free_port()
        self.folder, self.out = folder / "ranks", folder / "run"
        self.folder.mkdir()
        self.out.mkdir()
        self.processes: list[subprocess.Popen[str]] = []

    def start(
        self, number: int, *what: str, out: Path | None = None, seconds: float = SECONDS
    ) -> "subprocess.Popen[str]":
        nodes = json.dumps([self.least, self.most, number, "127.0.0.1", self.port, ["a", "b"]])
        process = preloaded.Popen(
            [sys.executable, "-c", START, nodes, str(self.folder), str(out or self.out), str(seconds), *what],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def until_worlds(self, *sizes: str) -> None:
        until(lambda: self.worlds() == list(sizes), self.worlds)

    def worlds(self) -> list[str]:
        """The sizes of the worlds that trained, one after the other."""
        file = self.folder / "worlds"
        lines = file.read_text().split() if file.exists() else []
        return [line for place, line in enumerate(lines) if place == 0 or lines[place - 1] != line]


@pytest.fixture
def launchers(request: pytest.FixtureRequest, tmp_path: Path) -> Launchers:
    two = Launchers(tmp_path, getattr(request, "param", "2"))

    def end() -> None:
        for process in two.processes:
            process.kill()
            process.communicate()

    request.addfinalizer(end)
    return two


def test_two_launchers_are_one_job(launchers: Launchers) -> None:
    first, second = launchers.start(0, "0=done", "1=raise"), launchers.start(1, "0=done", "1=raise")
    texts = [process.communicate(timeout=SECONDS)[1] for process in (first, second)]
    assert (first.returncode, second.returncode) == (1, 1)
    assert "trainer: rank 1 of 2 failed:\nTraceback" in texts[0]
    assert "ValueError: rank 1 is broken" in texts[0]
    assert f"trainer: node 1 ({socket.gethostname()}) ends with code 1: rank 1 of 2 failed:" in texts[1]
    assert "Traceback" not in texts[1]
    assert (launchers.out / "logs/rank-1.log").exists()
    (left,) = (launchers.out / "nodes").iterdir()  # each removes its own; node 0's says how it ended
    assert left.name.startswith("0-")


def test_a_folder_that_the_nodes_dont_share_is_told_on_both(launchers: Launchers, tmp_path: Path) -> None:
    first, second = (
        launchers.start(0, "sleep", seconds=3),
        launchers.start(1, "sleep", out=tmp_path, seconds=3),
    )
    texts = [process.communicate(timeout=SECONDS)[1] for process in (first, second)]
    assert (first.returncode, second.returncode) == (1, 1)
    assert "node 1 (b) didn't come within 3 s" in texts[0]
    assert f"does it see this run folder, {launchers.out}, as the same one" in texts[0]
    assert (
        f"trainer: node 1 ({socket.gethostname()}) ends with code 1: node 0 (a) hasn't begun in {tmp_path}"
        in texts[1]
    )


@pytest.mark.parametrize("launchers", ["1:2"], indirect=True)
def test_ranks_go_on_while_a_node_is_killed_and_comes_back(launchers: Launchers) -> None:
    first, second = launchers.start(0, "agree"), launchers.start(1, "agree")
    launchers.until_worlds("2")
    os.kill(second.pid, signal.SIGKILL)
    launchers.until_worlds("2", "1")
    third = launchers.start(1, "agree")
    launchers.until_worlds("2", "1", "2")
    third.send_signal(signal.SIGTERM)  # this one says goodbye
    assert third.wait(SECONDS) == 75
    launchers.until_worlds("2", "1", "2", "1")
    first.send_signal(signal.SIGUSR1)
    text = first.communicate(timeout=SECONDS)[1]
    assert first.returncode == 75
    assert "is gone: " in text
    assert "node 1 (b) has come: the ranks stopped with a checkpoint" in text
    assert "node 1 (b) leaves: the ranks stopped with a checkpoint" in text
