"""Growth of work other than training: the index of samples, shards, and the records of a run.

Each point is measured in a process of its own, forked from one that has imported everything: CPU time, and
what it took more of memory at its peak. A line is straight where eight times as much, or more, takes at most
twice as long for each, what next to nothing takes taken off.
"""

import argparse
import ctypes
import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.conditions import conditions
from trainer.data.formats.index import Index, content_hash
from trainer.data.formats.records import Records
from trainer.data.formats.sharded import Shard, about_of, in_shards, write_index
from trainer.data.formats.tables import in_table
from trainer.data.sampling.plan import Plan
from trainer.data.shared import name_columns
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError
from trainer.observe.checksums import last_names
from trainer.observe.rows import FILES
from trainer.observe.sinks import keep_rows
from trainer.runs.folder import MANIFEST
from trainer.runs.report.page import page
from trainer.runs.report.read import read_recorded_run

SAMPLES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
SHARDS = (1, 2, 4, 8, 16, 32, 64)
STEPS = (10, 100, 1_000, 10_000)
# Of a line: how much longer for each, at most, with so many times as much at least.
BENT, _APART = 2.0, 8
_TOO_QUICK_S = 0.01
_OF_A_SHARD, _BYTES = 1_000, 100
_TENSORS = 60  # of a model as small as ResNet-18


class Point(NamedTuple):
    """Time and memory at one size.

    Attributes:
        amount: Samples, shards or steps.
        seconds: Of CPU time, the least of some rounds.
        mib: More memory at its peak.
    """

    amount: int
    seconds: float
    mib: float


class Growth(NamedTuple):
    """Growth of a cost with size.

    Attributes:
        what: What is done.
        unit: What is counted.
        points: From few to many.
    """

    what: str
    unit: str
    points: Sequence[Point]

    @property
    def us_each(self) -> float:
        """The slope: CPU time of each, in microseconds."""
        return 1e6 * _slope([(point.amount, point.seconds) for point in self.points])

    @property
    def bytes_each(self) -> float:
        """The slope of the memory."""
        return 2**20 * _slope([(point.amount, point.mib) for point in self.points])

    @property
    def bend(self) -> float | None:
        """Time of each of the last point over that of one before; None where that took too little to tell."""
        least, last = self.points[0], self.points[-1]
        before = [
            point
            for point in self.points
            if point.amount * _APART <= last.amount and point.seconds - least.seconds > _TOO_QUICK_S
        ]
        if not before:
            return None
        of_few, of_all = (
            _slope([(least.amount, least.seconds), (point.amount, point.seconds)])
            for point in (before[-1], last)
        )
        return of_all / of_few


def _slope(points: Sequence[tuple[float, float]]) -> float:
    (few, first), (many, last) = points[0], points[-1]
    return (last - first) / (many - few)


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    bench.add_argument("--rounds", type=int, default=3, metavar="N", help="of each point (default: 3)")
    bench.add_argument(
        "--most", type=int, default=SAMPLES[-1], metavar="N", help="samples (default: 10 million, 4 GB)"
    )
    bench.add_argument(
        "--runs", action="store_true", help="whole runs instead: steps, layers, classes, files"
    )
    bench.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the lines; needs matplotlib")
    bench.set_defaults(
        run=lambda options: bench_growth(options.rounds, options.most, options.plot, options.runs)
    )


def bench_growth(rounds: int, most: int, plot: Path | None = None, runs: bool = False) -> int:
    """Measures, prints a table and judges; exit code 0 if all lines are straight, else 1.

    Raises:
        BadInputError: If there is nothing to measure.
    """
    samples = [count for count in SAMPLES if count <= most]
    if rounds < 1 or len(samples) < 2:
        raise BadInputError(f"--rounds: 1 or more; --most: {SAMPLES[1]:,} or more")
    if runs:
        from benchmarks.growth_runs import measure_runs

        grown = measure_runs(rounds, most)
    else:
        with tempfile.TemporaryDirectory() as folder:
            grown = measure(Path(folder), rounds, samples, SHARDS, STEPS)
    print(
        f"{conditions()}\nCPU time: the least of {rounds} rounds; memory: what was taken more at the peak\n"
    )
    print("| what | from … to | CPU time | memory, MiB | CPU us for each | bytes for each | bend | |")
    print("|---|---|---|---|---|---|---|---|")
    for line in grown:
        first, last = line.points[0], line.points[-1]
        bend = "" if line.bend is None else f"{line.bend:.2f}"
        print(
            f"| {line.what} | {first.amount:,} to {last.amount:,} {line.unit} | {first.seconds:.3g} to "
            f"{last.seconds:.3g} s | {first.mib:.0f} to {last.mib:.0f} | {line.us_each:.3g} "
            f"| {line.bytes_each:,.0f} | {bend} | {'straight' if is_straight(line) else 'BENT'} |"
        )
    if plot:
        draw(grown, plot)
    return EXIT_DONE if all(map(is_straight, grown)) else EXIT_FAILED


def is_straight(line: Growth) -> bool:
    """Whether each takes about as long among many as among few."""
    return line.bend is None or line.bend <= BENT


def measure(
    folder: Path, rounds: int, samples: Sequence[int], shards: Sequence[int], steps: Sequence[int]
) -> list[Growth]:
    """Makes files in a folder and measures what reads them."""
    kinds: Mapping[str, tuple[str, Sequence[int], Callable[[Path, int], None], Callable[[Path, int], object]]]
    kinds = {
        "a table of files: read, fingerprint, first batches": ("samples", samples, write_table, start_table),
        "the same table by its index": ("samples", samples, write_listed, start_listed),
        "an index of shards: read, fingerprint, first batches": ("samples", samples, write_one, start_shards),
        "shards of 1,000 samples: open, an epoch in blocks": ("shards", shards, write_shards, read_epoch),
        "rows of a run: its report": ("steps", steps, write_rows, report),
        "rows of a run: kept or removed at a resume": ("steps", steps, write_rows, resume),
    }
    grown = []
    for what, (unit, counts, write, read) in kinds.items():
        points = []
        for count in counts:
            with tempfile.TemporaryDirectory(dir=folder) as here:
                write(Path(here), count)
                costs = [in_a_fork(partial(read, Path(here), count)) for _ in range(rounds)]
            points.append(Point(count, min(one for one, _ in costs), max(mib for _, mib in costs)))
        grown.append(Growth(what, unit, points))
    return grown


def in_a_fork(work: Callable[[], object]) -> tuple[float, float]:
    """CPU seconds of some work in a process of its own, and MiB that it took more at its peak."""
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            # What the parent had freed without giving it back would serve the work, and not be counted.
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
            before, began = _status("VmRSS"), time.process_time()
            work()
            spent = time.process_time() - began
            os.write(sender, json.dumps([spent, (_status("VmHWM") - before) / 1024]).encode())
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(sender)
    with os.fdopen(receiver) as answer:
        text = answer.read()
    if os.waitpid(child, 0)[1]:
        raise RuntimeError("what was to be measured failed, as said above")
    seconds, mib = json.loads(text)
    return seconds, mib


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def write_table(folder: Path, count: int) -> None:
    """train.csv with so many lines; its files aren't there."""
    with (folder / "train.csv").open("w") as file:
        file.write("path,label\n")
        file.writelines(f"n{n % 1000:08d}/n{n % 1000:08d}_{n}.JPEG,n{n % 1000:08d}\n" for n in range(count))


def start_table(folder: Path, _: int) -> None:
    """Does what a run does with a table before its first step, without looking up each file."""
    _begin(in_table(folder / "train.csv"))


def write_listed(folder: Path, count: int) -> None:
    """A table that was read before."""
    write_table(folder, count)
    in_table(folder / "train.csv", indexes=folder)


def start_listed(folder: Path, _: int) -> None:
    """Does what a run does with a table that was read before."""
    _begin(in_table(folder / "train.csv", indexes=folder))


def write_one(folder: Path, count: int) -> None:
    """An index of so many samples in 64 shards that hold nothing."""
    _write_index(folder, count, 64)


def start_shards(folder: Path, _: int) -> None:
    """Does what a run does with shards before its first step."""
    _begin(in_shards(folder))


def _begin(records: Records) -> None:
    records.fingerprint()
    plan = Plan(len(records), 64, 64, 1, last="cross", seed=0)
    batches = np.arange(min(4, plan.steps))
    records.labels[plan.read(batches).sample]


def write_shards(folder: Path, count: int) -> None:
    """Writes so many shards of 1,000 samples."""
    _write_index(folder, count * _OF_A_SHARD, count)


def read_epoch(folder: Path, count: int) -> None:
    """Opens shards and reads each sample once, shuffled within four shards at a time."""
    records = in_shards(folder)
    records.absent()
    plan = Plan(
        len(records), 100, 100, 1, "cross", 0, shards=tuple(records.sizes), shards_per_block=min(4, count)
    )
    for batch in range(plan.steps):
        for sample in plan.read(np.array([batch])).sample[0].tolist():
            records.read(sample)


def _write_index(folder: Path, count: int, shards: int) -> None:
    of_each = -(-count // shards)
    number = np.arange(count, dtype=np.int64)
    names = [b"n%08d/%d.jpg" % (n % 1000, n) for n in range(count)]
    columns = {
        **name_columns(names),
        "shard": (number // of_each).astype(np.int32),
        "offset": number % of_each * _BYTES,
        "bytes": np.full(count, _BYTES, np.int64),
        "label": number % 1000,
        "hash": np.full(count, content_hash(bytes(_BYTES)), np.uint64),
    }
    about = []
    for shard in range(shards):
        about.append(Shard(name=f"{shard:03}.tar", bytes=of_each * _BYTES, sha256="0" * 64))
        with (folder / about[-1].name).open("wb") as file:
            file.truncate(about[-1].bytes)
    classes = [f"n{n:08d}" for n in range(1000)]
    index = Index(columns, classes, (), {"shards": about})
    write_index(folder, index, about_of(index, "files", "made for a bench"))


def write_rows(folder: Path, steps: int) -> None:
    """A run folder with a row of metrics, and one of checksums, for each step."""
    (folder / MANIFEST).write_text("{}")
    parts = ("data", "copy", "forward", "backward", "update", "host")
    row = {"loss": 0.123456789, "lr": 0.001, "grad_norm": 1.2345678, "updates": 1.0, "samples_per_s": 4321.0}
    row |= {"memory_bytes": 614195200, **{f"time/{part}": 0.1234567 for part in parts}}
    with (folder / FILES["train"]).open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps({"kind": "train", "step": step, "epoch": step / 1000, **row}) + "\n")
    tensors = [f"layers.{number}.weight" for number in range(_TENSORS)]
    with (folder / "checksums.jsonl").open("w") as file:
        file.write(json.dumps({"kind": "names", "step": 0, "tensors": tensors}) + "\n")
        for step in range(1, steps + 1):
            prints = [f"{step * number:016x}" for number in range(_TENSORS)]
            file.write(json.dumps({"kind": "train", "step": step, **row, "tensors": prints}) + "\n")


def report(folder: Path, _: int) -> None:
    """Does what `trainer report` does, without writing the page."""
    page([read_recorded_run(folder)])


def resume(folder: Path, steps: int) -> None:
    """Does what a resume at the last step does with the records of a run."""
    for name in (FILES["train"], "checksums.jsonl"):
        keep_rows(folder / name, steps)
    last_names(folder / "checksums.jsonl")


def draw(grown: Sequence[Growth], path: Path) -> None:
    """Both axes logarithmic, time on the left and memory on the right; a straight line has a slope of one."""
    from matplotlib.figure import Figure

    from benchmarks.charts import FAINT, as_svg

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.set(title="CPU time, s", xlabel="how many")
    right.set(title="memory at the peak, MiB", xlabel="how many")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log")
        axes.grid(color="#dddddd")
        axes.spines[:].set_color(FAINT)
    for line in grown:
        counts = [point.amount for point in line.points]
        left.plot(counts, [point.seconds for point in line.points], "o-", markersize=4, label=line.what)
        right.plot(counts, [max(point.mib, 0.1) for point in line.points], "o-", markersize=4)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    path.write_text(as_svg(figure))
