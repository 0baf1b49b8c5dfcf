"""A run of the command line that stands still after some step, so that a signal surely finds it there."""

import os
import time
from pathlib import Path

from tests.helpers.toys import before_each_step_ends
from trainer.distributed import consensus
from trainer.launch.worker import requested

_SITE = "from tests.helpers.held import hold\nhold({folder!r}, {step}, {rank!r})\n"


def held(folder: Path, step: int, rank: str = "0") -> dict[str, str]:
    """Variables for `tests.helpers.preloaded`: the rank waits once, until it has a signal that asks to stop.

    `folder/held` is there from then on, and `folder/tmp` holds what the launcher writes: rank-0.pid.
    """
    site = folder / "site"
    (folder / "tmp").mkdir(parents=True)
    site.mkdir()
    (site / "sitecustomize.py").write_text(_SITE.format(folder=str(folder), step=step, rank=rank))
    return {**os.environ, "PYTHONPATH": str(site), "TMPDIR": str(folder / "tmp")}


def pid_of_rank(folder: Path, rank: str) -> int:
    """Returns the pid of a rank that `held` variables started."""
    (file,) = (folder / "tmp").glob(f"trainer-launch-*/rank-{rank}.pid")
    return int(file.read_text())


def hold(folder: str, step: int, rank: str) -> None:
    """Makes this process wait, if it is that rank; called while it starts."""
    consensus.SECONDS_BETWEEN = 0.0  # ranks ask each other after every step, however quick they are
    if os.environ.get("RANK") != rank:
        return
    mark = Path(folder, "held")

    def wait(done: int) -> None:
        if done == step and not mark.exists():
            mark.touch()
            while requested() is None:
                time.sleep(0.01)

    before_each_step_ends(wait)
