"""Runs the loops of `trainer bench overhead` under callgrind: `counted_steps.py LIBRARY FROM TO`.

LIBRARY is `callgrind_marks.c`, compiled: it tells valgrind from which step to which it should count.
"""

import ctypes
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from trainer import explain, loop
from trainer.bench import overhead
from trainer.observe.machine import Machine


def marking(library: str, first: int, last: int) -> Callable[[int], None]:
    """Called with each step's number, it begins to count at `first` and writes the count down at `last`."""
    marks = ctypes.CDLL(library)

    def at(step: int) -> None:
        if step == first:
            marks.begin()
        elif step == last:
            marks.end()

    return at


def main() -> None:
    library, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    at, steps = marking(library, first, last), last + 50
    task, recipe = overhead.TinyTask(), overhead.tiny_recipe(steps)
    # What goes by the clock, and so comes more or less often on another machine, is left out.
    setattr(Machine, "_watch", lambda self: None)  # noqa: ARG005, B010
    setattr(explain, "_PAUSE_S", math.inf)  # noqa: B010
    original: Any = loop.train

    def train(*arguments: Any, window_done: Callable[[int], None], **keywords: Any) -> None:
        def done(window: int) -> None:
            at(window)
            window_done(window)

        original(*arguments, window_done=done, **keywords)

    setattr(overhead, "train", train)  # noqa: B010
    with tempfile.TemporaryDirectory() as folder:
        overhead.by_trainer(task, recipe, Path(folder))

    def cos(angle: float) -> float:  # of the learning rate, once a step
        at(round(angle * steps / math.pi))
        return math.cos(angle)

    setattr(overhead, "math", SimpleNamespace(cos=cos, pi=math.pi))  # noqa: B010
    overhead.by_hand(task, recipe.optim, steps)


if __name__ == "__main__":
    main()
