"""Runs the loops of `python -m benchmarks overhead` under callgrind: `counted_steps.py LIBRARY FROM TO`.

LIBRARY is `callgrind_marks.c`, compiled: it tells valgrind from which step to which it should count.
"""

import ctypes
import math
import sys
import tempfile
from pathlib import Path

import torch

from tests.helpers.counting import tiny_steps, tiny_steps_by_hand
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

    tiny_steps_by_hand(steps, at)


if __name__ == "__main__":
    main()
