"""Ablations of DDP: two ranks over gloo on this host, in processes of their own."""

import multiprocessing
import os
import queue
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.queues import Queue
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.claims.claim import Series
from benchmarks.claims.measuring import MIB, Ablation, Measurement, Scene, Side, Size, Turns, chosen, steps_in
from benchmarks.paired import interleaved
from benchmarks.reduction import received
from trainer.distributed.parallel import World, joined_world
from trainer.errors import BadInputError

# Much to send for what is computed, as where a network is slow.
_CPU = (
    *("device=cpu", "precision.mode=fp32", "model.channels_last=false", "model.name=small_resnet"),
    *("model.width=64", "data.image_size=8", "data.samples=64", "data.classes=10"),
    *("data.global_batch_size=8", "data.micro_batch_size=4", "parallel.threads=1"),
)
_SCENE = Scene("resnet50-synthetic", _CPU, _CPU)
_SIDES = {"copied": Side(), "views": Side(), "bf16": Side(("parallel.compress=bf16",))}
_LIMIT_S = 300.0

Found = dict[str, Series]


def _measure(wanted: Sequence[str], size: Size) -> Measurement:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    answers: Queue[Found] = context.Queue()
    arguments = (port, list(wanted), size, answers)
    ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(2)]  # type: ignore[attr-defined]
    for process in ranks:
        process.start()
    try:
        found = answers.get(timeout=_LIMIT_S)
    except queue.Empty:
        raise BadInputError(f"two ranks over gloo gave nothing within {_LIMIT_S:.0f} s") from None
    finally:
        for process in ranks:
            process.join(5)
            process.kill()
    return Measurement(f"two ranks over gloo on this host: {_SCENE}", found)


def _rank(rank: int, port: int, wanted: Sequence[str], size: Size, answers: "Queue[Any]") -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with joined_world("cpu", _LIMIT_S) as world, ExitStack() as stack:
        found = _sides(world, wanted, size, stack)
    if rank == 0:
        answers.put(found)


def _sides(world: World, wanted: Sequence[str], size: Size, stack: ExitStack) -> Found:
    turns = {}
    for name, side in chosen(_SIDES, wanted).items():
        with _views(name != "copied"):
            turns[name] = Turns(_SCENE, side, stack, world)
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
