"""The benches of the scoreboard, each measured in a process of its own."""

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks import loader, resume
from benchmarks.against import LibraryFailed
from benchmarks.options import picked
from benchmarks.scoreboard.common import Extent
from benchmarks.scoreboard.counted import by_accumulation, by_resume
from benchmarks.scoreboard.figures import Part
from benchmarks.scoreboard.timed import by_loader, by_overhead, by_tokens
from trainer.errors import BadInputError

FULL = Extent(60, 500, 11, loader.IMAGES, resume.CUTS, 40, 1000, 100)
QUICK = Extent(6, 60, 6, 128, (33,), 6, 100, 10)


class Bench(NamedTuple):
    """A bench of the scoreboard.

    Attributes:
        title: A heading.
        unit: Of what is compared.
        note: What one should know who reads the figures.
        function: What a library's module is asked for; empty: there are none.
        seconds: What it takes, about; for people who wait.
        timed: Whether other work would spoil it.
        measure: Rows, conditions and all figures.
    """

    title: str
    unit: str
    note: str
    function: str
    seconds: float
    timed: bool
    measure: Callable[[Extent, Path | None], Part]


BENCHES = {
    "overhead": Bench(
        "Host time per step",
        "us per step",
        "The model is one matrix of 8 x 4, so that nothing but the loop is timed: where a step takes "
        "milliseconds, these differences vanish. By hand means written for this model and nothing else.",
        "train_tiny",
        130,
        True,
        lambda extent, _: by_overhead(extent),
    ),
    "loader": Bench(
        "Loading images",
        "us of CPU time per image",
        "Like with like, and so compared, is the row that only says trainer: it reads the files, as the "
        "libraries do (webdataset from tar shards). A pack holds them made smaller beforehand, which could "
        "be done for a library too.",
        "load",
        190,
        True,
        lambda extent, _: by_loader(extent),
    ),
    "tokens": Bench(
        "Loading tokens",
        "us of CPU time per batch",
        "The other side goes through a tensor of offsets, as nanoGPT does; over a list it costs less.",
        "",
        30,
        True,
        lambda extent, _: by_tokens(extent),
    ),
    "accumulation": Bench(
        "Accumulated gradients",
        "steps whose gradient is that of their samples concatenated, to 1e-12",
        "A step that is cut otherwise than due isn't right.",
        "accumulate",
        15,
        False,
        lambda _, timm_train: by_accumulation(timm_train),
    ),
    "resume": Bench(
        "Cut and gone on with",
        "cuts after which the run that goes on ends with the bits of the one that wasn't cut",
        "With shuffling, dropout and random augmentation; each library by its own checkpoints.",
        "resume",
        25,
        False,
        lambda extent, _: by_resume(extent),
    ),
}


def select(only: str) -> list[str]:
    """The benches that a comma-separated list names; all if it is empty.

    Raises:
        BadInputError: For a name that is none.
    """
    wanted = picked(only, BENCHES, "--only", "bench of the scoreboard")
    return [name for name in BENCHES if not wanted or name in wanted]


def measured_apart(name: str, extent: Extent, timm_train: Path | None) -> Part:
    """A bench in a process of its own: what it leaves behind is none of the next one's business."""
    began = time.monotonic()
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            part: Part = alone.submit(_measure, name, extent, timm_train).result()
    except BrokenExecutor:
        part = Part(name, failed="its process ended before it answered (killed, or out of memory?)")
    return replace(part, seconds=time.monotonic() - began)


def _measure(name: str, extent: Extent, timm_train: Path | None) -> Part:
    try:
        return BENCHES[name].measure(extent, timm_train)
    except BadInputError as error:  # about this machine: what was asked for has been looked at
        return Part(name, lacking=" ".join(str(error).split()))
    except Exception as error:
        kind = "" if isinstance(error, LibraryFailed) else type(error).__name__
        words = str(error).strip().partition("\n")[0]
        return Part(name, failed=": ".join(filter(None, (kind, words))))
