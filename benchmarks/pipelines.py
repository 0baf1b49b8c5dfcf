"""Processes of `python -m benchmarks loader`: one pipeline each, or one check."""

import gc
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.against import chosen
from trainer.config.data import LoaderConfig
from trainer.data.formats.crop import Box, random_cut, snapped_cut
from trainer.data.formats.files import Files, in_folder
from trainer.data.formats.images import ImageDataset
from trainer.data.formats.index import index_of
from trainer.data.formats.records import Records
from trainer.data.formats.sharded import INDEX, in_shards
from trainer.data.loader import RingLoader, Source
from trainer.data.sampling.plan import Plan, Share
from trainer.observe.phases import enter_phase
from trainer.tasks.augment import Normalization

BATCH, SIDE = 64, 224
_EPOCHS = 10_000
_CPU = torch.device("cpu")


class Epoch(NamedTuple):
    """Cost of an epoch: user and system time of the process tree, and speed.

    Attributes:
        cpu_us: Of an image.
        images_per_s: By the clock.
        device_us: CPU time per image of what the device does for ours, with this epoch's last batch: flip
            and normalize. 0 for the others, who have done it.
    """

    cpu_us: float
    images_per_s: float
    device_us: float = 0.0


_pipeline: list[Callable[[], Iterator[int]]] = []
_last: list[torch.Tensor] = []  # of ours: images, uint8 (64, 224, 224, 3); kept until the next one is read


def start(library: str, source: Path, work: Path, workers: int) -> None:
    """Opens this process's pipeline, starts its workers and runs an epoch."""
    torch.set_num_threads(1)
    if library:
        (work / library).mkdir()
        _pipeline.append(chosen(library, "load")[library](source, work / library, BATCH, SIDE, workers))
    else:
        records: Records = in_shards(source) if (source / INDEX).exists() else in_folder(source)
        _pipeline.append(_ours(records, workers))
    run()


def stop() -> None:
    """Ends the workers: torch does it when nobody holds the loader."""
    _pipeline.clear()
    _last.clear()
    gc.collect()


def run() -> Epoch:
    """An epoch."""
    cpu, began = _cpu_us(), time.perf_counter()
    count = sum(_pipeline[0]())
    seconds = time.perf_counter() - began
    used = _cpu_us() - cpu
    return Epoch(used / count, count / seconds, device_side_us(_last[0]) if _last else 0.0)


def _ours(records: Records, workers: int) -> Callable[[], Iterator[int]]:
    """Each call is the next epoch."""
    loader, epoch = _loader(records, workers)
    starts = iter(range(0, _EPOCHS * epoch, epoch))

    def sizes() -> Iterator[int]:
        first = next(starts)
        for batch in loader(range(first, first + epoch)):
            _last[:] = [batch.fields["image"]]
            yield len(batch.fields["label"])

    return sizes


def _loader(records: Records, workers: int) -> tuple[RingLoader, int]:
    """A loader, and how many batches are an epoch."""
    plan = Plan(len(records), BATCH, BATCH, _EPOCHS, last="drop", seed=0, max_steps=20_000_000)
    dataset = ImageDataset(records, SIDE, random_crop=True)
    source = Source(dataset, Share(plan), dataset.uniforms + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of more workers than CPUs
        return RingLoader(source, _CPU, workers, LoaderConfig()), plan.steps_per_epoch


def _workers() -> list[int]:
    return [child.pid for child in multiprocessing.active_children() if child.pid]


def _cpu_us() -> float:
    """User and system time of this process and its workers."""
    total = time.process_time_ns()
    for worker in _workers():
        for thread in Path(f"/proc/{worker}/task").iterdir():
            total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e3


def pss() -> float:
    """Proportional set size of this process and its workers, in MiB: what they share counts once."""
    return _pss([os.getpid(), *_workers()])


def _pss(processes: Sequence[int]) -> float:
    total = 0
    for process in processes:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return float(total / 1024)


def device_side_us(batch: torch.Tensor) -> float:
    """CPU time per image of what the device does for ours, flip and normalize, with uint8 (B, H, W, 3)."""
    random, normalize = torch.rand(len(batch), 1), Normalization((0.5,) * 3, (0.3,) * 3)
    times = []
    for _ in range(9):
        began = time.process_time_ns()
        normalize(batch, True, flips=random)
        times.append((time.process_time_ns() - began) / 1e3 / len(batch))
    return statistics.median(times)


def difference(images: Path) -> float:
    """Mean absolute difference of ours and PIL's pixels, in levels of 256.

    PIL takes the same cuts: of what is decoded smaller, the snapped one, of an image that it has decoded at
    the same part of its size.
    """
    from PIL import Image

    records = in_folder(images)
    count = min(100, len(records))
    random = np.random.default_rng(0).random((count, 4), dtype=np.float32)
    out: dict[str, Any] = {
        "image": np.empty((count, SIDE, SIDE, 3), np.uint8),
        "label": np.empty(count, np.int64),
    }
    ImageDataset(records, SIDE, random_crop=True).read(np.arange(count), random, out)
    total = 0.0
    for row in range(count):
        with Image.open(os.fsdecode(records.path(row))) as file:
            drawn = random_cut(file.height, file.width, *random[row].tolist())
            box, by = snapped_cut(drawn, SIDE if file.format == "JPEG" else 0, file.height, file.width)
            if by > 1:
                file.draft("RGB", (file.width // by, file.height // by))
            image = file.convert("RGB")
        box = Box(*(edge // by for edge in box))
        edges = (box.left, box.top, box.left + box.width, box.top + box.height)
        theirs = np.asarray(image.crop(edges).resize((SIDE, SIDE), Image.Resampling.BILINEAR))
        total += float(np.abs(out["image"][row].astype(np.int16) - theirs).mean())
    return total / count


def first_batch_s(images: Path) -> float:
    """The longest wait for the first batch of epochs 2 to 4.

    Batches are used up at half the loader's speed. It isn't told of epochs: it reads on.
    """
    loader, epoch = _loader(in_folder(images), 2)
    began = time.perf_counter()
    for _ in loader(range(epoch)):
        pass
    used = 2 * (time.perf_counter() - began) / epoch
    batches, waits = loader(range(3 * epoch + 1)), []
    for number in range(3 * epoch + 1):
        asked = time.perf_counter()
        next(batches)
        if number and number % epoch == 0:
            waits.append(time.perf_counter() - asked)
        time.sleep(used)
    loader.close()
    return max(waits)


def meter_us(_: Path, steps: int = 200_000) -> float:
    """CPU time of the two marks around a step's wait for data: the least of some rounds, less the loop's."""

    def loop(marked: bool) -> float:
        began = time.process_time_ns()
        for _ in repeat(0, steps):
            if marked:
                enter_phase("data")
                enter_phase("host")
        return (time.process_time_ns() - began) / 1e3 / steps

    rounds = [(loop(False), loop(True)) for _ in range(5)]
    bare, marked = (min(column) for column in zip(*rounds, strict=True))
    return float(marked - bare)


class _Million(Files):
    """1.3 million names for one file."""

    def __init__(self, one: bytes) -> None:
        names = [b"n%08d/n%08d_%d.JPEG" % (n % 1000, n % 1000, n) for n in range(1_300_000)]
        super().__init__(Path("/"), index_of(names, [0] * len(names), ["one"]))
        self._one = one

    def path(self, sample: int) -> bytes:
        super().path(sample)
        return self._one


def growth_mib(images: Path) -> float:
    """Measures the additional memory of a process and its 4 loader workers with 1.3 million items."""
    few = in_folder(images)
    least = _with_workers(few)
    return _with_workers(_Million(few.path(0))) - least


def _with_workers(records: Records) -> float:
    loader, _ = _loader(records, 4)
    for _ in islice(loader(range(64)), 64):
        pass
    taken = pss()
    loader.close()
    return taken
