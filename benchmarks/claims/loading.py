"""Ablations of how batches reach the device: workers, prefetch, uint8, packs, page-locked memory."""

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.claims.claim import Series
from benchmarks.claims.measuring import (
    MIB,
    Ablation,
    Measurement,
    Scene,
    Side,
    Size,
    Turns,
    chosen,
    measure_steps as steps_of,
)
from benchmarks.paired import interleaved
from benchmarks.photographs import write_photographs
from benchmarks.setting import now
from trainer.data import dataset as data
from trainer.data.corrupt import Bad
from trainer.data.formats.files import in_folder
from trainer.data.formats.pack import PackSettings, pack
from trainer.data.loader import Loader, Source, make_loader
from trainer.data.workers import Loading
from trainer.host.limits import read_limits, workers_per_rank
from trainer.rng import Float32, Ints

_BATCH, _VALIDATION = 8, 10
_RECIPE = "resnet50-imagenet"
_OURS = ("precision.mode=fp32", "model.channels_last=false", "model.name=small_resnet", "model.width=8")
_BATCHES = (f"data.global_batch_size={_BATCH}", f"data.micro_batch_size={_BATCH}", "data.eval_batch_size=8")
_COPIES, _WORK = 20, 2048


def photographs(size: Size) -> Path:
    """A folder of JPEGs by class, train and val, made when it is first asked for."""
    folder = size.scratch / "photographs"
    if not folder.exists():
        write_photographs(folder / "val", _VALIDATION)
        write_photographs(folder / "train", size.images)
    return folder


def packed(size: Size, raw: bool) -> Path:
    """The same photographs as a pack with a short side of 256 pixels."""
    folder = size.scratch / ("raw" if raw else "pack")
    if not folder.exists():
        for part in ("train", "val"):
            pack(in_folder(photographs(size) / part), folder / part, PackSettings(256, raw=raw))
    return folder


def _scene(folder: Path, kind: str = "folder", image_size: int = 64, loading_only: bool = False) -> Scene:
    # torch's own way on Linux. Left to itself the trainer starts the second side's workers anew, which import
    # torch: the first side's have threads by then.
    method = "fork" if sys.platform == "linux" else "auto"
    there = (f"data.name={kind}", f"data.path={folder}", f"data.start_method={method}")
    small = (*there, *_BATCHES, *_OURS, f"data.image_size={image_size}")
    # What only loads has a model because a run has one: it isn't used.
    return Scene(_RECIPE, small, small if loading_only else (*there, *_BATCHES))


def _training(sides: Callable[[], Mapping[str, Side]]) -> Callable[[Sequence[str], Size], Measurement]:
    """Steps from photographs: a turn is an epoch of them."""

    def measure(wanted: Sequence[str], size: Size) -> Measurement:
        scene = _scene(photographs(size))
        found = steps_of(scene, chosen(sides(), wanted), size, per_turn=size.images // _BATCH)
        return found._replace(conditions=_short(found.conditions, size))

    return measure


def _short(conditions: str, size: Size) -> str:
    return conditions.replace(str(size.scratch), "PHOTOGRAPHS")


def _workers() -> dict[str, Side]:
    quota = workers_per_rank(read_limits(), 1)
    sides = {f"{count} workers": Side((f"data.workers={count}",)) for count in (0, 1, 2)}
    return {**sides, "the quota": Side((f"data.workers={quota}",)), "by rule": Side()}


def _prefetch() -> dict[str, Side]:
    workers = max(1, workers_per_rank(read_limits(), 1))
    return {
        f"{count} ahead": Side((f"data.workers={workers}", f"data.prefetch={count}")) for count in (1, 2, 4)
    }


class _Epochs:
    """Epochs of a loader alone, one per call; returns the seconds.

    Args:
        turns: The run whose data it is.
        make: Gives its loader.
        anew: Whether that is made for each epoch.
        size: How much.
    """

    def __init__(self, turns: Turns, make: Callable[[], Loader], anew: bool, size: Size) -> None:
        self._turns, self._make, self._anew = turns, make, anew
        self._loader = None if anew else make()
        self._batches, self._next = size.images // _BATCH, 0

    def __call__(self) -> float:
        device, first = self._turns.device, self._next
        self._next += self._batches
        torch.set_num_threads(1)
        began = now(device)
        loader = self._loader or self._make()
        for batch in loader(range(first, self._next)):
            image = batch.fields["image"]
            if image.dtype == torch.uint8:
                image.to(torch.float32).div_(255)  # as every model wants it
        if self._anew:
            loader.close()
        return now(device) - began


def _loader_of(turns: Turns, dataset: data.Dataset | None = None) -> Loader:
    """A new loader of a run's data, or of other data in its place."""
    run = turns.run
    dataset = run.task.train_data if dataset is None else dataset
    source = Source(dataset, run.share, dataset.uniforms + run.task.uniforms)
    return make_loader(source, turns.device, turns.recipe.data, workers_per_rank(read_limits(), 1))


def _epochs(loops: Mapping[str, _Epochs], size: Size) -> Series:
    seconds = interleaved(list(loops.values()), size.rounds, shown=False)
    per_image = [[s / size.images * 1e6 for s in series] for series in seconds]
    return Series(dict(zip(loops, per_image, strict=True)), "us an image")


@contextmanager
def _same_threads() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        yield stack


def _one_worker_at_least() -> Side:
    return Side((f"data.workers={max(1, workers_per_rank(read_limits(), 1))}",))


def _persistence(wanted: Sequence[str], size: Size) -> Measurement:
    scene, side = _scene(photographs(size), loading_only=True), _one_worker_at_least()
    with _same_threads() as stack:
        loops = {}
        for name, anew in chosen({"started anew": True, "persistent": False}, wanted).items():
            turns = Turns(scene, side, stack)
            make = partial(_loader_of, turns) if anew else partial(_same, turns.run.loader)
            loops[name] = _Epochs(turns, make, anew, size)
        time = _epochs(loops, size)
    return Measurement(
        f"the loader alone, {side.settings[0]}, epochs of {size.images} photographs", {"time": time}
    )


class AsFloats:
    """A data set whose images are floats from 0 to 1 as they leave the worker: what is often done."""

    def __init__(self, inner: data.Dataset) -> None:
        self._inner = inner
        self.num_items, self.uniforms, self.arrays = inner.num_items, inner.uniforms, inner.arrays
        self.in_process = inner.in_process
        image = inner.fields["image"]
        self.fields: Mapping[str, data.Field] = {
            **inner.fields,
            "image": image._replace(dtype=np.dtype(np.float32)),
        }

    def __len__(self) -> int:
        return len(self._inner)

    def fingerprint(self) -> str:
        """Fingerprint of the wrapped data set."""
        return self._inner.fingerprint()

    def read(self, samples: Ints, random: Float32 | None, out: data.Arrays) -> Sequence[Bad] | None:
        """Reads as the wrapped data set does, and converts."""
        image = np.empty(out["image"].shape, np.uint8)
        replaced = self._inner.read(samples, random, {**out, "image": image})
        np.divide(image, np.float32(255), out=out["image"])
        return replaced


def _floats(wanted: Sequence[str], size: Size) -> Measurement:
    scene = _scene(photographs(size), loading_only=True, image_size=224)
    with _same_threads() as stack:
        loops, bytes_of = {}, {}
        for name in chosen({"float32": 0, "uint8": 0}, wanted):
            turns = Turns(scene, _one_worker_at_least(), stack)
            dataset: data.Dataset = turns.run.task.train_data
            if name == "float32":
                dataset = AsFloats(dataset)
            loader = _loader_of(turns, dataset)
            stack.callback(loader.close)
            loops[name] = _Epochs(turns, partial(_same, loader), False, size)
            fields = dataset.fields.values()
            bytes_of[name] = [_BATCH * sum(math.prod(f.shape) * f.dtype.itemsize for f in fields) / MIB]
        time = _epochs(loops, size)
    return Measurement(
        f"the loader alone, epochs of {size.images} photographs, 224 x 224, floats at the end either way",
        {"time": time, "bytes": Series(bytes_of, "MiB a batch", counted=True)},
    )


def _same(loader: Loader) -> Loader:
    return loader


def _packs(wanted: Sequence[str], size: Size) -> Measurement:
    only = partial(_scene, image_size=224, loading_only=True)
    scenes = {
        "JPEG files": partial(photographs, size),
        "pack": partial(packed, size, raw=False),
        "raw pack": partial(packed, size, raw=True),
    }
    with _same_threads() as stack:
        loops = {}
        for name, folder in chosen(scenes, wanted).items():
            scene = only(folder(), "folder" if name == "JPEG files" else "pack")
            turns = Turns(scene, Side(("data.workers=1",)), stack)
            loops[name] = _Epochs(turns, partial(_same, turns.run.loader), False, size)
        time = _epochs(loops, size)
    return Measurement(
        f"the loader alone, 1 worker, epochs of {size.images} photographs, 224 x 224", {"time": time}
    )


def _side(loading: Loading) -> Side:
    return Side((f"data.workers={loading.workers}", f"data.prefetch={loading.prefetch}"))


def _rules(wanted: Sequence[str], size: Size) -> Measurement:
    """Compares the fastest of several settings with rules of thumb."""
    scene, per_turn = _scene(photographs(size)), size.images // _BATCH
    counts = {"75 % of the CPUs": workers_per_rank(read_limits(), 1), "4 per GPU": 4}
    tried = [Loading(workers, 4) for workers in sorted({0, 1, *counts.values()})]
    timed = steps_of(scene, {str(one): _side(one) for one in tried}, size, per_turn=per_turn).series["time"]
    found = min(tried, key=lambda one: statistics.median(timed.values[str(one)]))
    loads = {"the search": found, **{name: Loading(count, 4) for name, count in counts.items()}}
    sides = {name: _side(setting) for name, setting in loads.items()}
    measured = steps_of(scene, chosen(sides, wanted), size, per_turn=per_turn)
    about = ", ".join(f"{name}: {loads[name]}" for name in chosen(sides, wanted))
    return measured._replace(conditions=f"{_short(measured.conditions, size)}; {about}")


def _copies(wanted: Sequence[str], size: Size, computing: bool) -> Measurement:
    """Copies batches of 64 images of 224 x 224 to the GPU, alone or during matrix multiplications."""
    device = torch.device("cuda", 0)
    pageable = torch.randint(0, 256, (64, 224, 224, 3), dtype=torch.uint8)
    page_locked = pageable.pin_memory()
    matrix = torch.randn(_WORK, _WORK, device=device)

    def turn(source: torch.Tensor, ahead: bool) -> float:
        began = now(device)
        for _ in range(_COPIES):
            source.to(device, non_blocking=ahead)
            if computing:
                for _ in range(4):
                    torch.mm(matrix, matrix)
        return now(device) - began

    sides = {
        "pageable": partial(turn, pageable, False),
        "pageable, non_blocking": partial(turn, pageable, True),
        "pinned": partial(turn, page_locked, False),
        "pinned, non_blocking": partial(turn, page_locked, True),
    }
    loops = chosen(sides, wanted)
    seconds = interleaved(list(loops.values()), size.rounds, shown=False)
    per_copy = [[s / _COPIES * 1e3 for s in series] for series in seconds]
    doing = "while it multiplies matrices" if computing else "by themselves"
    return Measurement(
        f"64 images of 224 x 224 as uint8, {doing}",
        {"time": Series(dict(zip(loops, per_copy, strict=True)), "ms a batch")},
    )


LOADING = {
    "copy": Ablation(partial(_copies, computing=False), ("cuda",)),
    "transfer": Ablation(partial(_copies, computing=True), ("cuda",)),
    "workers": Ablation(_training(_workers), ("photographs",), 48.0),
    "persistence": Ablation(_persistence, ("photographs",)),
    "prefetch": Ablation(_training(_prefetch), ("photographs",)),
    "floats": Ablation(_floats, ("photographs",)),
    "packs": Ablation(_packs, ("photographs",)),
    "rules": Ablation(_rules, ("photographs",), 80.0, quick=False),
}
