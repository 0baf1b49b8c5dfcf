"""A run of the command line that stands still after some step, so that a signal surely finds it there."""

import os
import time
from pathlib import Path
from typing import Any

from trainer.distributed import consensus
from trainer.launch import signals as preempt
from trainer.train import between_steps

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
    """Of a run that `held` variables started."""
    (file,) = (folder / "tmp").glob(f"trainer-launch-*/rank-{rank}.pid")
    return int(file.read_text())


def hold(folder: str, step: int, rank: str) -> None:
    """Makes this process wait, if it is that rank; called while it starts."""
    consensus._SECONDS_BETWEEN = 0.0  # ranks ask each other after every step, however quick they are
    if os.environ.get("RANK") != rank:
        return
    original = between_steps.BetweenSteps.step_done
    mark = Path(folder, "held")

    def step_done(self: Any, done: int) -> None:
        if done == step and not mark.exists():
            mark.touch()
            while preempt.requested() is None:
                time.sleep(0.01)
        original(self, done)

    between_steps.BetweenSteps.step_done = step_done  # type: ignore[method-assign]
