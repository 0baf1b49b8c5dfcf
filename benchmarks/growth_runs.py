"""Growth of what a whole run costs outside of its steps: with steps, layers, classes and files.

Each point is a `trainer train` on a CPU with one thread, from the command to the end of its process: CPU
seconds of all its processes, and the largest sum of their proportional set sizes.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from benchmarks.growth import Growth, Point
from benchmarks.peers import measured
from benchmarks.start import marking, read_marks

_LINKS = 50_000  # to one file: ext4 allows 65,000
_TINY = ("data.global_batch_size=8", "data.micro_batch_size=8")


class Kind(NamedTuple):
    """A number that grows.

    Attributes:
        unit: What is counted.
        amounts: From few to many.
        words: Of `trainer train`, given a folder and the amount.
        prepare: Writes the data into the folder.
    """

    unit: str
    amounts: Sequence[int]
    words: Callable[[Path, int], Sequence[str]]
    prepare: Callable[[Path, int], None] = lambda *_: None


def _photographs(folder: Path, train: int, val: int, classes: int) -> None:
    """Writes train/CLASS/N.png and val/CLASS/N.png: hard links to a few files."""
    rng = np.random.default_rng(0)
    source = folder / "source.png"
    for split, count in (("train", train), ("val", val)):
        for number in range(count):
            if number % _LINKS == 0:
                source.unlink(missing_ok=True)
                Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(source)
            place = folder / split / f"class-{number % classes:04d}"
            if number < classes:
                place.mkdir(parents=True)
            os.link(source, place / f"{number}.png")
    source.unlink(missing_ok=True)


def _on_folder(folder: Path, _: int) -> list[str]:
    return ["digits", "data.name=folder", f"data.path={folder}", "data.image_size=16", "max_steps=1", *_TINY]


def _text(folder: Path, _: int) -> None:
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 100)


def _layers(folder: Path, layers: int) -> list[str]:
    size = (
        f"language.layers={layers}",
        "language.heads=2",
        "language.width=32",
        "language.sequence_length=16",
    )
    return ["gpt-char", f"data.path={folder}/text.txt", "max_steps=1", "data.eval_batch_size=64", *size]


KINDS = {
    "steps": Kind(
        "steps",
        (10, 100, 1_000, 10_000),
        lambda _, count: ["digits", f"max_steps={count}", "epochs=100000", *_TINY],
    ),
    "layers": Kind("layers", (1, 10, 50, 200), _layers, _text),
    "classes": Kind(
        "classes",
        (1, 10, 100, 1_000),
        _on_folder,
        lambda folder, count: _photographs(folder, count, count, count),
    ),
    "files": Kind(
        "files",
        (100, 10_000, 100_000, 1_000_000),
        _on_folder,
        lambda folder, count: _photographs(folder, count, 100, 2),
    ),
}


def measure_runs(rounds: int, most: int, kinds: Sequence[str] = tuple(KINDS)) -> list[Growth]:
    """Runs each kind at each of its amounts that isn't above `most`.

    Returns:
        For each kind the CPU seconds up to the first step's end, and from there to the end of the run.
    """
    grown = []
    for name in kinds:
        kind = KINDS[name]
        found: dict[str, list[Point]] = {"to the first step": [], "after it": []}
        for amount in (amount for amount in kind.amounts if amount <= most):
            with tempfile.TemporaryDirectory() as folder:
                kind.prepare(Path(folder), amount)
                runs = [_run(kind.words(Path(folder), amount)) for _ in range(rounds)]
            mib = max(mib for _, _, mib in runs)
            for part, points in enumerate(found.values()):
                points.append(Point(amount, min(run[part] for run in runs), mib))
        grown += [Growth(f"{name}, {part}", kind.unit, points) for part, points in found.items()]
    return grown


def _run(words: Sequence[str]) -> tuple[float, float, float]:
    """CPU seconds to the end of the first step and after it, and MiB at most."""
    with tempfile.TemporaryDirectory() as place:
        run, _ = measured(
            [
                "-m",
                "trainer",
                "train",
                *words,
                "--quiet",
                "--out",
                f"{place}/run",
                "parallel.threads=1",
                "data.workers=0",
            ],
            Path.cwd(),
            marking(place),
        )
        start = read_marks(Path(place, "marks").read_text().splitlines(), 0.0)
    first = sum(start.phases.values())
    return first, run.cpu_seconds - first, run.gib * 1024
