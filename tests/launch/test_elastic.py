"""Between hosts (network namespaces) a node dies and comes back: the same global batch, the same bits."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainer
from tests.helpers.cluster_slurm import until
from tests.helpers.netns import hosts

pytestmark = pytest.mark.xdist_group("launch")
TRAINER = str(Path(sys.executable).parent / "trainer")
SETTINGS = (
    *("data.micro_batch=16", "epochs=16", "parallel.threads=1", "parallel.reduction=tree"),
    *("checkpoint.every=20", "log.every=5"),
)
WORDS = [word for setting in SETTINGS for word in ("--set", setting)]
# So that a fast machine hasn't ended before the node is back: 400 windows last 32 s on one rank.
PAUSE = """
        import os, time
        time.sleep(float(os.environ.get("PAUSE", "0")))
"""


def _task(folder: Path) -> str:
    """A task of one's own that can be slowed down."""
    text = (Path(trainer.__file__).parent / "tasks" / "example.py").read_text()
    at = text.index("        return F.cross_entropy(model(")
    file = folder / "spirals.py"
    file.write_text(text[:at] + PAUSE + text[at:])
    return str(file)


@pytest.fixture
def names() -> Iterator[list[str]]:
    with hosts(2) as there:
        yield there


class Nodes:
    """Launchers, one on each host."""

    def __init__(self, names: list[str], folder: Path) -> None:
        self.names, self.run, self.task = names, folder / "run", _task(folder)
        self.logs = [folder / f"node-{number}" for number in range(len(names))]
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, number: int) -> "subprocess.Popen[bytes]":
        command = [
            *("ip", "netns", "exec", self.names[number], TRAINER, "train", self.task, "--ranks", "1"),
            *("--nodes", "1:2", "--node-rank", str(number), "--master", "10.79.0.1:29500"),
            *("--out", str(self.run), *WORDS),
        ]
        with self.logs[number].open("ab") as log:
            slow = {**os.environ, "PAUSE": "0.02"}
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=slow)
        self.started.append(process)
        return process

    def windows(self) -> int:
        """Done so far, by the rows."""
        file = self.run / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return int(json.loads(lines[-1])["window"]) if lines else 0

    def log(self, number: int = 0) -> str:
        return self.logs[number].read_text()


@pytest.fixture
def nodes(names: list[str], tmp_path: Path) -> Iterator[Nodes]:
    both = Nodes(names, tmp_path)
    yield both
    for process in both.started:
        process.kill()
        process.wait()


def test_a_node_dies_and_comes_back(nodes: Nodes, tmp_path: Path) -> None:
    first, second = nodes.start(0), nodes.start(1)
    until(lambda: nodes.windows() > 20)
    second.send_signal(signal.SIGKILL)  # ip has become the launcher; the kernel ends its ranks with it
    until(lambda: "on 1 rank instead of 2" in nodes.log())
    again = nodes.start(1)
    until(lambda: "on 2 ranks instead of 1" in nodes.log())
    assert first.wait(300) == again.wait(300) == 0
    assert "is gone: its launcher ended" in nodes.log()
    assert "node 1 has come: the ranks stopped with a checkpoint" in nodes.log()
    whole = [TRAINER, "train", nodes.task, "--ranks", "2", "--out", str(tmp_path / "whole"), *WORDS]
    subprocess.run(whole, check=True, capture_output=True, timeout=300)
    weights = [folder / "model.safetensors" for folder in (nodes.run, tmp_path / "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
