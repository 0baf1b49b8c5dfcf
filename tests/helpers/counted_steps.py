"""Runs the loops of `python -m benchmarks overhead` under callgrind: `counted_steps.py LIBRARY FROM TO`.

LIBRARY is `callgrind_marks.c`, compiled: it tells valgrind from which step to which it should count.
"""

import ctypes
import math
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from benchmarks import overhead
from tests.helpers.counting import tiny_steps
from trainer.train import outputs


def main() -> None:
    library, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    marks, steps = ctypes.CDLL(library), last + 50

    def at(step: int) -> None:  # begins to count at the first, and writes the count down at the last
        if step == first:
            marks.begin()
        elif step == last:
            marks.end()

    # What goes by the clock, and so comes more or less often on another machine, is left out.
    setattr(outputs, "_PAUSE_S", math.inf)  # noqa: B010
    with tempfile.TemporaryDirectory() as folder:
        tiny_steps(Path(folder), steps, at)

    def cos(angle: float) -> float:  # of the learning rate, once a step
        at(round(angle * steps / math.pi))
        return math.cos(angle)

    ours = SimpleNamespace(cos=cos, pi=math.pi)
    with mock.patch.dict(overhead.by_hand.__globals__, math=ours):
        overhead.by_hand(overhead.TinyTask(), overhead.tiny_recipe(steps).optim, steps)


if __name__ == "__main__":
    main()
