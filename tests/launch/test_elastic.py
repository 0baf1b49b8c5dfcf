"""Between hosts (network namespaces) a job loses a node and ends; on the others it has the same bits."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import preloaded
from tests.helpers.listeners import listeners
from tests.helpers.netns import hosts
from tests.helpers.refusals import named
from tests.helpers.waiting import SECONDS, until
from trainer.host.processes import tree

pytestmark = pytest.mark.slow  # on one host, without a training: tests/launch/test_node_launchers.py
ROOT = Path(__file__).parents[2]
SETTINGS = "data.global_batch_size=64 data.micro_batch_size=32 epochs=6 model.width=8 parallel.threads=1"
SETTINGS += " parallel.reduction=tree checkpoint.every=10 log.every=5"
WORDS = ["train", "digits", *SETTINGS.split()]
# A launcher on another host. Its ranks stand still after a step while FOLDER/hold is there, so that the job
# isn't over before the other node has died or come back.
ON_HOST = """
import ctypes, sys
from trainer.cli import main
with open("/var/run/netns/" + sys.argv[1]) as file:
    assert not ctypes.CDLL(None).setns(file.fileno(), 0x40000000)
sys.exit(main(sys.argv[2:]))
"""
HOLD = """
import time
from pathlib import Path
from trainer.launch.worker import requested
from trainer.train import loop
original = loop.train_step
def held(run, batches, step):
    original(run, batches, step)
    done = step + 1
    while Path({folder!r}, f"hold-{{done}}").exists() and requested() is None:
        Path({folder!r}, f"at-{{done}}").touch()
        time.sleep(0.01)
loop.train_step = held
"""


class Nodes:
    """Launchers, one on each host."""

    def __init__(self, names: list[str], folder: Path) -> None:
        self.names, self.folder, self.run = names, folder, folder / "run"
        self.logs = [folder / f"node-{number}" for number in range(len(names))]
        self.started: list[subprocess.Popen[str]] = []
        (folder / "sitecustomize.py").write_text(HOLD.format(folder=str(folder)))

    def start(self, number: int, total: int = 2) -> "subprocess.Popen[str]":
        words = [sys.executable, "-c", ON_HOST, self.names[number], *WORDS, "--out", str(self.run)]
        words += ["--nproc-per-node", "1", "--nnodes", str(total)]
        words += ["--node-rank", str(number), "--master-addr", "10.79.0.1"] if total > 1 else []
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        with self.logs[number].open("ab") as log:
            process = preloaded.Popen(words, cwd=ROOT, stdout=log, stderr=log, env=environment)
        self.started.append(process)
        return process

    def log(self, number: int = 0) -> str:
        return self.logs[number].read_text()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with hosts(2) as names:
        both = Nodes(names, tmp_path)
        yield both
        for process in both.started:
            process.kill()


def test_a_job_that_loses_a_node_goes_on_with_the_others(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "hold-25").touch()
    first, second = nodes.start(0), nodes.start(1)
    until((tmp_path / "at-25").exists, nodes.log)
    # What faces the network: torch's store at one address and port, and gloo on the way to the other host.
    for process, address, stores in ((first, "10.79.0.1", {29500}), (second, "10.79.0.2", set[int]())):
        found = listeners(tree(process.pid))
        assert process.pid not in {one.pid for one in found}
        assert {one.address for one in found} == {address}, found
        assert stores <= {one.port for one in found}, found
    until(lambda: any((nodes.run / "checkpoints").glob("step-00000020")), nodes.log)
    second.send_signal(signal.SIGKILL)  # the kernel ends its rank with it
    (tmp_path / "hold-25").unlink()
    assert first.wait(SECONDS) == 75, nodes.log()  # as this attempt has written a checkpoint
    assert named(nodes.log(), "rank 0 of 2")
    assert nodes.start(0, total=1).wait(SECONDS) == 0, nodes.log()
    assert "on 1 rank instead of 2" in nodes.log()
    trained = [sys.executable, "-m", "trainer", *WORDS, "--nproc-per-node", "2", "--out"]
    whole = preloaded.run([*trained, tmp_path / "whole"], cwd=ROOT)
    assert whole.returncode == 0, whole.stderr
    weights = [folder / "model.safetensors" for folder in (nodes.run, tmp_path / "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
