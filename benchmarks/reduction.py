"""Cost of parallel.reduction=tree: time, memory and bytes on the wire, against plain accumulation and DDP.

Both do the same steps of the same model in the same process, in turn, so that whatever else the machine
does falls on both. With two ranks these are real processes over gloo on this host.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.conditions import conditions
from benchmarks.options import add_rounds
from benchmarks.paired import interleaved, judged, median_interval, one_thread
from benchmarks.ranks import on_ranks, received
from benchmarks.setting import timed_steps
from trainer.config.recipe import Recipe
from trainer.distributed.parallel import World
from trainer.distributed.tree import Sums, Tournament
from trainer.train.components.run import build
from trainer.train.components.task import make_task
from trainer.train.reduction import TreeSum
from trainer.train.state import Run

_MICRO_BATCHES, MICRO_BATCH_SIZE, _WIDTH, _IMAGE, _STEPS = 8, 16, 128, 16, 1
_MIB = 1 << 20
_REDUCTIONS = ("all_reduce", "tree")


class _Price(NamedTuple):
    """Costs by reduction: seconds of a step by round, bytes received by a rank, peak bytes."""

    seconds: list[list[float]]
    received: list[float]
    peak: list[int]
    gradients: int


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    add_rounds(bench, 15)
    bench.add_argument(
        "--target", type=float, default=1.05, metavar="X", help="largest ratio on one rank (default: 1.05)"
    )
    bench.set_defaults(run=lambda options: bench_reduction(options.rounds, options.target))


def bench_reduction(rounds: int, target: float) -> int:
    """Measures, prints and judges.

    Args:
        rounds: Interleaved rounds.
        target: Largest ratio of a step's time on one rank, tree over plain accumulation.

    Returns:
        0 if the target is met, 1 if not, 3 if it lies within the interval.
    """
    cuda = torch.cuda.is_available()
    with one_thread():
        device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        alone = _measure(World(0, 1, 0, device, None), rounds)
    verdict, code = judged(*_ratio(alone)[1:], target)
    print(
        f"{conditions()}\n"
        f"small_resnet of width {_WIDTH} on {_IMAGE} x {_IMAGE} pixels, {alone.gradients / _MIB:.1f} MiB of "
        f"gradients, a step of {_MICRO_BATCHES} micro-batches of {MICRO_BATCH_SIZE}, 1 CPU thread a rank, "
        f"median of {rounds} interleaved rounds\n"
        f"one rank:   {_times(alone)}\n"
        f"            target {target:.2f}: {verdict}\n"
        f"            {_memory(alone, cuda)}"
    )
    if cuda:
        print("several GPUs: not measured, this command uses one")
    else:
        _print_two_ranks(rounds)
    return code


def _print_two_ranks(rounds: int) -> None:
    both = on_ranks(2, partial(_measure, rounds=rounds), method="spawn")
    wire = ", ".join(
        f"{name} {received / _MIB:.1f} MiB" for name, received in zip(_REDUCTIONS, both.received, strict=True)
    )
    print(
        f"two ranks:  {_times(both)} (gloo, this host)\n            received by each rank in a step: {wire}"
    )


def _times(price: _Price) -> str:
    plain, tree = (statistics.median(seconds) / _STEPS * 1e3 for seconds in price.seconds)
    ratio, low, high = _ratio(price)
    return (
        f"all_reduce {plain:,.0f} ms a step, tree {tree:,.0f} ms; ratio {ratio:.3f}, 95 % interval "
        f"{low:.3f} to {high:.3f}"
    )


def _ratio(price: _Price) -> tuple[float, float, float]:
    plain, tree = price.seconds
    return median_interval([t / p for p, t in zip(plain, tree, strict=True)])


def _memory(price: _Price, cuda: bool) -> str:
    if cuda:
        plain, tree = (peak / _MIB for peak in price.peak)
        return f"peak of a step above what was there: all_reduce {plain:,.1f} MiB, tree {tree:,.1f} MiB"
    share = price.peak[1] / price.gradients
    return f"the tree keeps gradients and sums of them of {share:.1f} x the model's size at most"


def _measure(world: World, rounds: int) -> _Price:
    """Does the steps on this rank."""
    sides = [_side(name, world, rounds) for name in _REDUCTIONS]
    barrier = partial(torch.distributed.barrier, world.group) if world.group else lambda: None
    bytes_in: list[list[int]] = [[], []]

    def timed(which: int) -> float:
        _, steps = sides[which]
        barrier()
        before = received(world)
        seconds = steps()
        bytes_in[which].append(received(world) - before)
        return seconds

    seconds = interleaved([partial(timed, which) for which in range(2)], rounds)
    peak = [_peak(training, steps, world.device) for training, steps in sides]
    # What goes over this host's loopback is received by one of the ranks.
    per_step = [statistics.median(counts) / _STEPS / world.size for counts in bytes_in]
    return _Price(seconds, per_step, peak, sum(p.nbytes for p in sides[0][0].gradients.parameters))


def _side(reduction: str, world: World, rounds: int) -> tuple[Run, Callable[[], float]]:
    """A run with one of the reductions, and what does some of its steps and returns the seconds."""
    samples = _MICRO_BATCHES * MICRO_BATCH_SIZE
    recipe = Recipe.model_validate(
        {
            "epochs": _STEPS * (rounds + 3),
            "data": {
                **{"name": "synthetic", "image_size": _IMAGE, "samples": samples, "classes": 10},
                **{"global_batch_size": samples, "micro_batch_size": MICRO_BATCH_SIZE},
            },
            "model": {"width": _WIDTH},
            "optim": {"max_grad_norm": 1.0},
            "parallel": {"threads": 1, "reduction": reduction},
        }
    )
    run = build(recipe, make_task(recipe), world, workers=0)
    return run, timed_steps(run, _STEPS, world.device)


def _peak(run: Run, steps: Callable[[], float], device: torch.device) -> int:
    """Most bytes that a step needs above what was there; on a CPU only those of the tree's sums."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        steps()
        return torch.cuda.max_memory_allocated(device) - before
    if not isinstance(run.reduction, TreeSum):
        return 0
    counting = _Counting()
    run.reduction._tree._own = counting
    steps()
    return counting.peak


class _Counting(Tournament):
    peak = 0

    def add(self, one: Sums) -> None:
        kept = [one, *self._branches]
        self.peak = max(self.peak, sum(g.nbytes for sums in kept for g in sums.gradients))
        super().add(one)
