"""Cost of an image on its way to the device: CPU time, speed and memory of the whole process tree.

Every pipeline lives in a process of its own, its workers idle, and they take turns: what slows the machine
for a while slows all of them, and none sees another's memory.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import pipelines
from benchmarks.against import blamed, chosen, titled
from benchmarks.conditions import conditions
from benchmarks.options import add_rounds, at_least_one
from benchmarks.photographs import SIZES, write_photographs
from benchmarks.pipelines import BATCH, SIDE, Epoch
from trainer.data.formats.files import in_folder
from trainer.data.formats.pack import PackSettings, pack
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError

SHORT_SIDE = 256
IMAGES = 1024
_COMPARED = 100  # photographs of another size, for their pixels alone
_STOCK = "torchvision"
# Our pipelines, with the most CPU time per image that they may take of the stock one's.
ORIGINALS, _PACK, _RAW = "trainer", f"trainer, pack {SHORT_SIDE}", f"trainer, raw pack {SHORT_SIDE}"
TARGETS = {ORIGINALS: 0.50, _PACK: 0.25, _RAW: 0.10}

Check = tuple[str, float, float, str]


@dataclass(frozen=True)
class Pipeline:
    """Measurements of one way to load.

    Attributes:
        epochs: One for each round.
        pss: MiB of its process and workers, in the end.
    """

    epochs: tuple[Epoch, ...]
    pss: float

    @property
    def cpu_us(self) -> float:
        """Median over the rounds."""
        return statistics.median(epoch.cpu_us for epoch in self.epochs)

    @property
    def all_us(self) -> list[float]:
        """CPU time per image of each round with flip and normalize, as all have it then."""
        return [epoch.cpu_us + epoch.device_us for epoch in self.epochs]


@dataclass(frozen=True)
class LoadTimes:
    """Measurements of all ways.

    Attributes:
        pipelines: Ours as in `TARGETS`, then each library, by name.
    """

    pipelines: Mapping[str, Pipeline]

    @property
    def device_us(self) -> float:
        """CPU time per image of what the device does for ours, flip and normalize: median of all rounds."""
        own = (self.pipelines[name] for name in TARGETS)
        return statistics.median(epoch.device_us for pipeline in own for epoch in pipeline.epochs)


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    bench.add_argument(
        "folder", type=Path, nargs="?", metavar="DIR", help="images by class (default: photographs made here)"
    )
    bench.add_argument(
        "--against", default="", metavar="LIST", help="torchvision,timm,webdataset: which to measure too"
    )
    add_rounds(bench, 5)
    bench.add_argument(
        "--kilobytes",
        type=int,
        choices=SIZES,
        default=min(SIZES),
        help=f"size of photographs that are made here, on average (default: {min(SIZES)})",
    )
    bench.add_argument("--workers", type=at_least_one, default=2, metavar="N", help="of each (default: 2)")
    bench.set_defaults(
        run=lambda options: bench_loader(
            options.folder, options.against, options.rounds, options.workers, options.kilobytes
        )
    )


def bench_loader(
    folder: Path | None, against: str, rounds: int, workers: int, kilobytes: int = min(SIZES)
) -> int:
    """Measures, prints tables and judges.

    Args:
        folder: Images by class, or None for photographs that are made here.
        against: Libraries to measure too, separated by commas.
        rounds: Interleaved rounds of at most 1024 images.
        workers: Loader processes of each pipeline.
        kilobytes: Size of photographs that are made here.

    Returns:
        0 if every target that could be measured is met, else 1.

    Raises:
        BadInputError: If there are too few images, or a library isn't there.
    """
    libraries = list(chosen(against, "load"))
    check_proc()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        images = images_of(folder, work / "images", kilobytes)
        print(f"{conditions()}\n{about(folder, images, rounds, workers)}\n", flush=True)
        times = measure_loading(images, work, libraries, rounds, workers)
        print(_table(times), flush=True)
        checks = _ratios(times.pipelines) + _measure_checks(images, work / "large")
    print(f"\n{_HEAD_CHECKS}")
    for what, figure, target, unit in checks:
        verdict = "met" if figure <= target else "MISSED"
        print(f"| {what} | {figure:.3g} {unit} | {target:g} {unit} | {verdict} |")
    return EXIT_DONE if all(figure <= target for _, figure, target, _ in checks) else EXIT_FAILED


def check_proc() -> None:
    """Makes sure that CPU time can be measured.

    Raises:
        BadInputError: If not.
    """
    if not Path("/proc/self/schedstat").exists():
        raise BadInputError("the CPU time of a process tree is read from /proc, which this machine lacks")


def measure_loading(
    images: Path, work: Path, libraries: Sequence[str], rounds: int, workers: int
) -> LoadTimes:
    """Runs our pipelines and the libraries' in turn, each in its own process; each round begins with another.

    Args:
        images: Files by class; at least 128, of which a batch is 64.
        work: A folder for packs and shards.
        libraries: Names.
        rounds: Epochs of each, after one that warms it up.
        workers: Loader processes of each.
    """
    records = in_folder(images)
    pack(records, work / "pack", PackSettings(SHORT_SIDE))
    pack(records, work / "raw", PackSettings(SHORT_SIDE, raw=True))
    ways = {ORIGINALS: ("", images), _PACK: ("", work / "pack"), _RAW: ("", work / "raw")}
    ways |= {library: (library, images) for library in libraries}
    there: dict[str, ProcessPoolExecutor] = {}
    try:
        for name, (library, source) in ways.items():
            there[name] = _process()
            with blamed(name):
                there[name].submit(pipelines.start, library, source, work, workers).result()
        epochs: dict[str, list[Epoch]] = {name: [] for name in there}
        for number in range(rounds):
            for name in rotated(list(there), number):
                with blamed(name):
                    epochs[name].append(there[name].submit(pipelines.run).result())
        memory = {name: process.submit(pipelines.pss).result() for name, process in there.items()}
    finally:
        for process in there.values():
            with suppress(BrokenExecutor):
                process.submit(pipelines.stop)
            process.shutdown()
    return LoadTimes({name: Pipeline(tuple(epochs[name]), memory[name]) for name in there})


def rotated(names: Sequence[str], number: int) -> list[str]:
    """The order of a round: each begins with another one."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def _measure_checks(images: Path, large: Path) -> list[Check]:
    """Checks on the images that were loaded, and the first of them on larger photographs as well."""
    write_photographs(large, _COMPARED, SIZES[max(SIZES)])
    checks = [(images, *check) for check in _CHECKS]
    what, *rest = _CHECKS[0]
    checks.insert(1, (large, f"{what}, photographs of {max(SIZES)} kB", *rest))
    with _process() as alone:
        return [
            (what, alone.submit(measure, folder).result(), target, unit)
            for folder, what, measure, target, unit in checks
        ]


def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


_CHECKS = (
    ("pixels against PIL on the same cuts, mean difference", pipelines.difference, 0.05, "levels"),
    ("first batch of a later epoch, slowest of 3", pipelines.first_batch_s, 0.1, "s"),
    ("the two marks around each step's wait for data", pipelines.meter_us, 1.0, "us"),
    ("PSS with 4 workers, 1.3 million items over 1024", pipelines.growth_mib, 120, "MiB"),
)


def images_of(folder: Path | None, here: Path, kilobytes: int = min(SIZES)) -> Path:
    """A folder of 1024 images: made, or links to some of the user's."""
    if folder is None:
        write_photographs(here, IMAGES, SIZES[kilobytes])
        return here
    records = in_folder(folder)
    if len(records) < BATCH * 2:
        raise BadInputError(f"{folder}: {len(records)} images are too few to measure; give {BATCH * 2}")
    for sample in np.linspace(0, len(records) - 1, min(IMAGES, len(records))).astype(int).tolist():
        target = here / os.fsdecode(records.file_name(sample))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to((folder / os.fsdecode(records.file_name(sample))).absolute())
    return here


def _ratios(there: Mapping[str, Pipeline]) -> list[Check]:
    if _STOCK not in there:
        return []
    return [
        (f"CPU per image, {name}, of {_STOCK}'s", there[name].cpu_us / there[_STOCK].cpu_us, target, "x")
        for name, target in TARGETS.items()
    ]


def about(folder: Path | None, images: Path, rounds: int, workers: int) -> str:
    """Describes the data and the number of epochs."""
    records = in_folder(images)
    source = "photographs of scikit-image and scikit-learn" if folder is None else str(folder)
    size = statistics.mean(len(records.read(sample)) for sample in range(len(records))) / 1e3
    return (
        f"{len(records)} images of {source}, {size:.1f} kB on average; batch {BATCH}, {SIDE} x {SIDE}, "
        f"{workers} workers, {rounds} interleaved rounds"
    )


_HEAD = (
    "| pipeline | CPU us per image (median) | spread | with normalize and flip on the CPU | images/s "
    "| PSS MiB |\n|---|---|---|---|---|---|"
)
_HEAD_CHECKS = "| what | measured | target | |\n|---|---|---|---|"


def _table(times: LoadTimes) -> str:
    rows = [_HEAD]
    for name, pipeline in times.pipelines.items():
        costs = [epoch.cpu_us for epoch in pipeline.epochs]
        speed = statistics.median(epoch.images_per_s for epoch in pipeline.epochs)
        rows.append(
            f"| {name if name in TARGETS else titled(name)} | {pipeline.cpu_us:,.0f} "
            f"| {min(costs):,.0f} to {max(costs):,.0f} | {statistics.median(pipeline.all_us):,.0f} "
            f"| {speed:,.0f} | {pipeline.pss:,.0f} |"
        )
    return "\n".join(rows)
