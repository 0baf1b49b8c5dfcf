"""Ablations of DDP: two ranks over gloo on this host, in processes of their own."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.claims.claim import Series
from benchmarks.claims.measuring import MIB, Ablation, Measurement, Scene, Side, Size, Turns, chosen, steps_in
from benchmarks.paired import interleaved
from benchmarks.ranks import on_ranks, received
from trainer.distributed.parallel import World

# Much to send for what is computed, as where a network is slow.
_CPU = (
    "device=cpu precision.mode=fp32 model.channels_last=false model.name=small_resnet model.width=64 "
    "data.image_size=8 data.samples=64 data.classes=10 data.global_batch_size=8 data.micro_batch_size=4 "
    "parallel.threads=1"
)
_SCENE = Scene("resnet50-synthetic", _CPU.split(), _CPU.split())
_SIDES = {"copied": Side(), "views": Side(), "bf16": Side(("parallel.compress=bf16",))}
_LIMIT_S = 300.0


def _measure(wanted: Sequence[str], size: Size) -> Measurement:
    method = "fork" if sys.platform == "linux" else "spawn"
    found = on_ranks(2, partial(_sides, wanted=list(wanted), size=size), method, _LIMIT_S)
    return Measurement(f"two ranks over gloo on this host: {_SCENE}", found)


def _sides(world: World, wanted: Sequence[str], size: Size) -> dict[str, Series]:
    with ExitStack() as stack:
        turns = {}
        for name, side in chosen(_SIDES, wanted).items():
            with _views(name != "copied"):
                turns[name] = Turns(_SCENE, side, stack, world)
        return _timed(turns, world, size)


def _timed(turns: dict[str, Turns], world: World, size: Size) -> dict[str, Series]:
    count = torch.tensor(steps_in(size.turn_s, next(iter(turns.values()))))
    torch.distributed.broadcast(count, 0, group=world.group)  # as many on both ranks
    steps = int(count)
    bytes_in: dict[str, list[float]] = {name: [] for name in turns}

    def turn(name: str) -> float:
        torch.distributed.barrier(world.group)
        before = received(world)
        seconds = turns[name](steps)
        torch.distributed.barrier(world.group)
        # What goes over this host's loopback is received by one of the ranks.
        bytes_in[name].append((received(world) - before) / steps / world.size / MIB)
        return seconds / steps * 1e3

    times = interleaved([partial(turn, name) for name in turns], size.rounds, shown=False)
    peaks = {name: [one.peak_bytes() / MIB] for name, one in turns.items()}
    return {
        "time": Series(dict(zip(turns, times, strict=True)), "ms a step"),
        "peak": Series(peaks, "MiB", counted=True),
        "bytes": Series({name: sizes[1:] for name, sizes in bytes_in.items()}, "MiB a step"),
    }


@contextmanager
def _views(on: bool) -> Iterator[None]:
    """Whether gradients of the replicas made within it are views of DDP's buckets, like the trainer's."""
    kept = DistributedDataParallel.__init__

    def made(self: DistributedDataParallel, *arguments: Any, **settings: Any) -> None:
        kept(self, *arguments, **{**settings, "gradient_as_bucket_view": on})

    DistributedDataParallel.__init__ = made  # type: ignore[method-assign]
    try:
        yield
    finally:
        DistributedDataParallel.__init__ = kept  # type: ignore[method-assign]


RANKS = {"ddp": Ablation(_measure, ("linux",))}
