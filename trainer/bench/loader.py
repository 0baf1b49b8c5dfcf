"""What an image costs on its way to the device: CPU time, speed and memory of the whole process tree.

Every pipeline lives in a process of its own, its workers idle, and they take turns: what slows the machine
for a while slows all of them, and none sees another's memory.
"""

import multiprocessing
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trainer.bench import pipelines
from trainer.bench.against import chosen, version
from trainer.bench.conditions import conditions
from trainer.bench.photographs import write_photographs
from trainer.bench.pipelines import BATCH, SIDE, Epoch
from trainer.data.files import Files, in_folder
from trainer.data.pack import PackSettings, pack
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError

SHORT_SIDE = 256
IMAGES = 1024
_STOCK = "torchvision"
# Our pipelines, with the most CPU time per image that they may take of the stock one's.
_ORIGINALS, _PACK, _RAW = "trainer", f"trainer, pack {SHORT_SIDE}", f"trainer, raw pack {SHORT_SIDE}"
_TARGETS = {_ORIGINALS: 0.50, _PACK: 0.25, _RAW: 0.10}

Check = tuple[str, float, float, str]


@dataclass
class _Pipeline:
    """One way to load, in its own process."""

    process: ProcessPoolExecutor
    epochs: list[Epoch] = field(default_factory=list)
    pss: float = 0.0

    @property
    def cpu_us(self) -> float:
        """Median over the rounds."""
        return statistics.median(epoch.cpu_us for epoch in self.epochs)


def bench_loader(folder: Path | None, against: str, rounds: int, workers: int) -> int:
    """Measures, prints tables and judges.

    Args:
        folder: Images by class, or None for photographs that are made here.
        against: Libraries to measure too, separated by commas.
        rounds: Interleaved rounds of at most 1024 images.
        workers: Loader processes of each pipeline.

    Returns:
        0 if every target that could be measured is met, else 1.

    Raises:
        BadInputError: If there are too few images, or a library isn't there.
    """
    libraries = list(chosen(against, "load"))
    if rounds < 1 or workers < 1:
        raise BadInputError("--rounds and --workers: give numbers from 1 on")
    if not Path("/proc/self/schedstat").exists():
        raise BadInputError("the CPU time of a process tree is read from /proc, which this machine lacks")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        images = _images(folder, work / "images")
        records = in_folder(images)
        _say_conditions(folder, records, rounds, workers)
        pack(records, work / "pack", PackSettings(SHORT_SIDE))
        pack(records, work / "raw", PackSettings(SHORT_SIDE, raw=True))
        ways = {_ORIGINALS: ("", images), _PACK: ("", work / "pack"), _RAW: ("", work / "raw")}
        ways |= {f"{library} {version(library)}": (library, images) for library in libraries}
        there = {}
        try:
            for label, (library, source) in ways.items():
                there[label] = _Pipeline(ProcessPoolExecutor(1, multiprocessing.get_context("spawn")))
                there[label].process.submit(pipelines.start, library, source, work, workers).result()
            for _ in range(rounds):
                for pipeline in there.values():
                    pipeline.epochs.append(pipeline.process.submit(pipelines.run).result())
            for pipeline in there.values():
                pipeline.pss = pipeline.process.submit(pipelines.pss).result()
        finally:
            for pipeline in there.values():
                pipeline.process.submit(pipelines.stop)
                pipeline.process.shutdown()
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            device_us = alone.submit(pipelines.device_side_us).result()
            print(_table(there, device_us), flush=True)
            checks = _ratios(there) + [
                (what, alone.submit(measure, images).result(), target, unit)
                for what, measure, target, unit in _CHECKS
            ]
    print(f"\n{_HEAD_CHECKS}")
    for what, figure, target, unit in checks:
        verdict = "met" if figure <= target else "MISSED"
        print(f"| {what} | {figure:.3g} {unit} | {target:g} {unit} | {verdict} |")
    return EXIT_DONE if all(figure <= target for _, figure, target, _ in checks) else EXIT_FAILED


_CHECKS = (
    ("pixels against PIL on the same cuts, mean difference", pipelines.difference, 0.05, "levels"),
    ("first batch of a later epoch, slowest of 3", pipelines.first_batch_s, 0.1, "s"),
    ("the two marks around each step's wait for data", pipelines.meter_us, 1.0, "us"),
    ("PSS with 4 workers, 1.3 million items over 1024", pipelines.growth_mib, 120, "MiB"),
)


def _images(folder: Path | None, here: Path) -> Path:
    """A folder of 1024 images: made, or links to some of the user's."""
    if folder is None:
        write_photographs(here, IMAGES)
        return here
    records = in_folder(folder)
    if len(records) < BATCH * 2:
        raise BadInputError(f"{folder}: {len(records)} images are too few to measure; give {BATCH * 2}")
    for sample in np.linspace(0, len(records) - 1, min(IMAGES, len(records))).astype(int).tolist():
        target = here / os.fsdecode(records.file_name(sample))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to((folder / os.fsdecode(records.file_name(sample))).absolute())
    return here


def _ratios(there: dict[str, _Pipeline]) -> list[Check]:
    stock = next((p for label, p in there.items() if label.startswith(_STOCK)), None)
    if stock is None:
        return []
    return [
        (f"CPU per image, {label}, of {_STOCK}'s", there[label].cpu_us / stock.cpu_us, target, "x")
        for label, target in _TARGETS.items()
    ]


def _say_conditions(folder: Path | None, records: Files, rounds: int, workers: int) -> None:
    source = "photographs of scikit-image and scikit-learn" if folder is None else str(folder)
    size = statistics.mean(len(records.read(sample)) for sample in range(len(records))) / 1e3
    print(
        f"{conditions()}\n{len(records)} images of {source}, {size:.1f} kB on average; batch {BATCH}, "
        f"{SIDE} x {SIDE}, {workers} workers, {rounds} interleaved rounds\n",
        flush=True,
    )


_HEAD = (
    "| pipeline | CPU us per image (median) | spread | with normalise and flip on the CPU | images/s "
    "| PSS MiB |\n|---|---|---|---|---|---|"
)
_HEAD_CHECKS = "| what | measured | target | |\n|---|---|---|---|"


def _table(there: dict[str, _Pipeline], device_us: float) -> str:
    rows = [_HEAD]
    for label, pipeline in there.items():
        costs = [epoch.cpu_us for epoch in pipeline.epochs]
        whole = pipeline.cpu_us + (device_us if label in _TARGETS else 0)
        speed = statistics.median(epoch.images_per_s for epoch in pipeline.epochs)
        rows.append(
            f"| {label} | {pipeline.cpu_us:,.0f} | {min(costs):,.0f} to {max(costs):,.0f} | {whole:,.0f} "
            f"| {speed:,.0f} | {pipeline.pss:,.0f} |"
        )
    return "\n".join(rows)
