"""Who reaches a port of a run: what listens, on which addresses, and that nobody's pickles are loaded."""

import base64
import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed as dist

from tests.helpers import preloaded
from tests.helpers.listeners import Listener, listeners
from tests.helpers.waiting import until
from tests.helpers.ways import OWN
from trainer.host.processes import tree
from trainer.launch.launcher import STATIC, _alone
from trainer.launch.meeting import Meeting, options_of_torchrun
from trainer.launch.nodes import Nodes

# Each rank says that it is there, and waits in its first loss.
TASK = OWN.replace("def loss(self, model, batch):", "def loss(self, model, batch):\n        stand()")
TASK += """
import os, time
from pathlib import Path
from torch import distributed as dist

HERE = Path(__file__).parent

def stand():
    if dist.is_initialized():
        (HERE / f"there-{os.environ['RANK']}").write_text(str(os.getpid()))
        while not (HERE / "go").exists():
            time.sleep(0.01)
"""


class _Evil:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def _ranks(folder: Path) -> set[str]:
    """The ids of the ranks that have written them, to the end."""
    return {file.read_text() for file in folder.glob("there-?")} - {""}


def _leave(stores: list[Listener], ids: list[str], payload: bytes) -> None:
    """Leaves pickles in stores wherever torch's dynamic rendezvous looks for its state."""
    for there in stores:
        host = {"::": "127.0.0.1", "0.0.0.0": "127.0.0.1"}.get(there.address, there.address)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, there.port, None, False, timedelta(seconds=60), wait_for_workers=False
        )
        for id_ in ids:
            store.set(f"torch.rendezvous.{id_}", base64.b64encode(payload).decode())


def test_what_strangers_write_to_the_ports_of_a_run_is_never_unpickled(tmp_path: Path) -> None:
    """Two ranks with a task of the user's own. All that listens does so on loopback."""
    (tmp_path / "task.py").write_text(TASK)
    done, environment = tmp_path / "executed", {**os.environ, "TMPDIR": str(tmp_path)}
    asked = "-m trainer train task.py --nproc-per-node 2 --out run max_steps=2"
    words = [sys.executable, *asked.split()]
    with (
        (tmp_path / "said").open("w") as said,
        preloaded.Popen(words, cwd=tmp_path, env=environment, stdout=said, stderr=said) as process,
    ):
        try:
            until(lambda: process.poll() is not None or len(_ranks(tmp_path)) == 2)
            ranks = set(map(int, _ranks(tmp_path)))
            pids = tree(process.pid)
            found = listeners(pids)
            stores = [one for one in found if one.pid not in ranks]  # ranks have gloo's, which are no stores
            _leave(stores, ["none", *(f"trainer-{pid}" for pid in pids)], pickle.dumps(_Evil(done)))
        finally:
            (tmp_path / "go").touch()
        assert process.wait(300) == 0, (tmp_path / "said").read_text()
    assert not done.exists()
    assert len(stores) == 1
    assert {there.address for there in found} <= {"127.0.0.1", "::1"}, found


def test_torchrun_is_told_the_static_rendezvous_on_one_host_and_on_several() -> None:
    meeting = Meeting(Nodes(2, 0, "203.0.113.1", 29500), 2, {}, 600.0)
    assert STATIC == "--rdzv-backend=static"
    assert {"--master-addr=127.0.0.1", "--local-addr=127.0.0.1"} <= {*_alone()}, "no name: tests/container"
    assert not any("c10d" in option for option in (*_alone(), *options_of_torchrun(meeting)))
