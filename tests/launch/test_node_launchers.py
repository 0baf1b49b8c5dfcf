"""Launchers on several nodes are one job: real ones, with real ranks, on this host."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import preloaded
from tests.helpers.ports import free_port
from tests.helpers.refusals import named
from tests.helpers.waiting import SECONDS, until

ROOT = Path(__file__).parents[2]

START = """
import json, sys
from pathlib import Path
from trainer.launch.nodes import Nodes
from trainer.launch import launcher
from trainer.launch.meeting import Meeting
nodes, folder, *what = sys.argv[1:]
meeting = Meeting(Nodes(*json.loads(nodes)), 1, {}, 300.0)
launcher._AFTER_FAILURE_SECONDS = 0.5
request, local = {"words": [folder, *what]}, launcher.LocalRanks(1, 1)
worker = "tests.helpers.launch_worker"
sys.exit(launcher.launch(worker, request, local, grace_seconds=120.0, meeting=meeting).code)
"""


class Launchers:
    """Two launchers on this host, as if on two nodes, with a rank each."""

    def __init__(self, folder: Path) -> None:
        self.port, self.folder = free_port(), folder / "ranks"
        self.folder.mkdir()
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, number: int, *what: str) -> "subprocess.Popen[str]":
        nodes = json.dumps([2, number, "127.0.0.1", self.port, ["a", "b"]])
        none, pipe = subprocess.DEVNULL, subprocess.PIPE
        words = [sys.executable, "-c", START, nodes, str(self.folder), *what]
        process = preloaded.Popen(words, cwd=ROOT, stdin=none, stdout=pipe, stderr=pipe, text=True)
        self.processes.append(process)
        return process

    def both(self, what: str, number: signal.Signals | None = None) -> tuple[list[int], list[str]]:
        """Starts both, and sends the second a signal once ranks have met; their codes and what they said."""
        two = [self.start(0, what), self.start(1, what)]
        if number is not None:
            until((self.folder / "worlds").exists)
            two[1].send_signal(number)
        texts = [process.communicate(timeout=SECONDS)[1] for process in two]
        return [process.returncode for process in two], texts


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[Launchers]:
    yield (two := Launchers(tmp_path))
    for process in two.processes:
        process.kill()
        process.communicate()


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def test_two_launchers_are_one_job(launchers: Launchers) -> None:
    codes, texts = launchers.both("agree", signal.SIGTERM)  # the ranks agree on a stop
    assert codes == [75, 75], texts
    assert set((launchers.folder / "worlds").read_text().split()) == {"2"}


def test_a_failure_of_its_own_is_said_where_it_was(launchers: Launchers) -> None:
    codes, texts = launchers.both("fail-1")
    assert codes == [1, 1], texts
    assert named(texts[1], "rank 1 of 2 ValueError")


def test_a_stop_while_nodes_are_awaited(launchers: Launchers) -> None:
    first = launchers.start(0, "agree")
    until(lambda: _listens(launchers.port))
    first.send_signal(signal.SIGTERM)
    assert first.wait(SECONDS) == 75
