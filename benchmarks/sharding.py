"""Cost and savings of sharding between gloo ranks of this host: memory, bytes sent, time of a step.

Memory: the pieces of memory of all tensors that operators have made and that are alive are added up after
each operator of a step, and the most is compared with the package's formula. Bytes are those that the kernel
counts on the loopback interface: run it in a network namespace of its own, so that nothing else counts.
"""

import argparse
import ctypes
import importlib
import statistics
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.conditions import conditions
from benchmarks.options import add_rounds
from benchmarks.paired import interleaved, median_interval
from benchmarks.ranks import on_ranks, received
from trainer.config.recipe import Recipe
from trainer.distributed.parallel import World, sum_over_ranks
from trainer.errors import EXIT_DONE, EXIT_FAILED
from trainer.models.activation_checkpointing import blocks
from trainer.train.components.memory import rank_memory
from trainer.train.components.run import build
from trainer.train.components.task import make_task
from trainer.train.state import Run
from trainer.train.step import train_step

MIB = 1 << 20
RANKS = 4
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"strategy": "fsdp"},
    "hsdp": {"strategy": "hsdp", "shard": 2},
}
# A large state and few activations; and one whose steps are quick.
LARGE = {"layers": 16, "heads": 4, "width": 512, "sequence_length": 4, "vocabulary": 8192}
QUICK = {"layers": 12, "heads": 4, "width": 256, "sequence_length": 64, "vocabulary": 256}


class Sizes(NamedTuple):
    """Bytes of a model's parameters: of each block, and outside of blocks."""

    blocks: list[int]
    rest: int


class Held(NamedTuple):
    """Most bytes of a rank in a step: by the formula, as counted, and what its resident memory grew by."""

    formula: int
    counted: int
    resident: int


class Traffic(NamedTuple):
    """Traffic by strategy and round: seconds of a step, CPU seconds and bytes of all ranks together."""

    seconds: list[list[float]]
    cpu: list[list[float]]
    sent: list[list[float]]
    sizes: Sizes


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    add_rounds(bench, 15)
    bench.set_defaults(run=lambda options: bench_sharding(options.rounds))


def bench_sharding(rounds: int) -> int:
    """Measures and prints.

    Args:
        rounds: Interleaved rounds of a step by each strategy.

    Returns:
        0 if memory is within 10 % of the formula, 1 if not.
    """
    print(f"{conditions()}\n\nmemory: a GPT, {LARGE}, AdamW, fp32, a micro-batch of one sample")
    print(
        "| ranks | micro-batches a step | formula | counted | counted / formula | resident memory grew by |"
    )
    print("|---|---|---|---|---|---|")
    # Before the fork: no rank imports it again, and what it takes isn't in what memory grows by.
    torch.optim.SGD([torch.zeros(1)], lr=0.1)
    importlib.import_module("torch.distributed.fsdp")
    apart = 0.0
    for size, micro_batches in ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2)):
        held = on_ranks(size, partial(_memory_alone, micro_batches=micro_batches))
        apart = max(apart, abs(held.counted / held.formula - 1))
        print(
            f"| {size} | {micro_batches} | {held.formula / MIB:,.1f} MiB | {held.counted / MIB:,.1f} MiB | "
            f"{held.counted / held.formula:.3f} | {held.resident / MIB:,.1f} MiB |",
            flush=True,
        )
    print(f"target within 10 %: {'met' if apart <= 0.1 else 'MISSED'}, {apart:.1%} apart at most\n")
    _print_traffic(on_ranks(RANKS, partial(traffic, language=QUICK, rounds=rounds)), rounds)
    return EXIT_DONE if apart <= 0.1 else EXIT_FAILED


def _print_traffic(seen: Traffic, rounds: int) -> None:
    whole = sum(seen.sizes.blocks) + seen.sizes.rest
    print(
        f"{RANKS} ranks: a GPT, {QUICK}, {whole / MIB:.1f} MiB of parameters, fp32, one micro-batch of two "
        f"samples a rank, 1 CPU thread a rank, gloo over the loopback, median of {rounds} interleaved "
        "rounds\n"
        "| strategy | sent by a rank in a step, theory | with gloo's reduce-scatter | measured | "
        "measured / that | "
        "CPU time of a step, all ranks | relative to ddp | time of a step | relative to ddp |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    for number, (name, parallel) in enumerate(STRATEGIES.items()):
        shared_by = parallel.get("shard", RANKS if parallel else 1)
        theory, gloo = (bytes_sent(seen.sizes, RANKS, shared_by, scatter) for scatter in (1.0, 2.0))
        sent = statistics.median(seen.sent[number]) / RANKS
        times = [_relative(one[number], one[0]) for one in (seen.cpu, seen.seconds)]
        print(
            f"| {name} | {theory / MIB:.1f} MiB ({theory / whole:.2f} x) | {gloo / MIB:.1f} MiB "
            f"({gloo / whole:.2f} x) | {sent / MIB:.1f} MiB | {sent / gloo:.3f} | {' | '.join(times)} |"
        )


def _relative(ours: list[float], theirs: list[float]) -> str:
    ratio, low, high = median_interval([one / other for one, other in zip(ours, theirs, strict=True)])
    shown = f"{statistics.median(ours) * 1e3:,.0f} ms | "
    return shown + ("" if ours is theirs else f"{ratio:.3f} ({low:.3f} to {high:.3f})")


def bytes_sent(sizes: Sizes, ranks: int, shared_by: int, scatter: float = 1.0) -> float:
    """Returns the bytes that each rank sends in a step of one micro-batch, by rings; it receives as many.

    Of n ranks, groups of s share a model. A ring's gathering, or its reduce-scatter, sends (s - 1) / s of the
    tensor. A block is gathered forward and again backward, the rest once, and both are summed: 3 and 2 of
    these. Then the n / s groups sum the rows that each has by an all-reduce: twice (g - 1) / g of an s-th of
    all.

    Args:
        sizes: Of the model, in what is sent.
        ranks: n.
        shared_by: s; n for FSDP, 1 for DDP.
        scatter: How many of them a reduce-scatter takes: 2 where it is an all-reduce.
    """
    groups, whole = ranks // shared_by, sum(sizes.blocks) + sizes.rest
    gathered = 2 * sum(sizes.blocks) + sizes.rest
    within = (shared_by - 1) / shared_by * (gathered + scatter * whole)
    return within + 2 * (groups - 1) / groups * whole / shared_by


def sizes_of(run: Run) -> Sizes:
    """Bytes of a run's model."""
    each = [sum(p.nbytes for p in block.parameters()) for block in blocks(run.state.model).values()]
    return Sizes(each, sum(p.nbytes for p in run.state.model.parameters()) - sum(each))


def make_run(
    world: World,
    parallel: dict[str, Any],
    language: dict[str, Any],
    micro_batch_size: int,
    micro_batches: int,
) -> Run:
    """A run of a GPT on random tokens."""
    samples = world.size * micro_batch_size * micro_batches
    recipe = Recipe.model_validate(
        {
            "task": "language",
            "epochs": 1000,  # each makes a row of the table of rates
            "data": {
                **{"name": "synthetic", "samples": samples},
                **{"global_batch_size": samples, "micro_batch_size": micro_batch_size},
            },
            "language": language,
            "parallel": {"threads": 1, **parallel},
            "optim": {"name": "adamw"},
        }
    )
    run = build(recipe, make_task(recipe), world, workers=0)
    run.replica.train()
    return run


class LiveBytes(TorchDispatchMode):
    """Adds up the memory of tensors that are alive, after each operator.

    Attributes:
        most: The largest sum.
    """

    def __init__(self) -> None:
        """Knows of no tensor yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._alive = weakref.WeakKeyDictionary[Any, None]()

    def take(self, value: object) -> None:
        """Counts the memory of tensors in a nested value from now on, each piece once."""
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                inner = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                self._alive[inner.untyped_storage()] = None

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, function, types, arguments=(), named=None
    ) -> Any:
        """Runs an operator."""
        result = function(*arguments, **(named or {}))
        self.take((arguments, named, result))
        self.most = max(self.most, sum(storage.nbytes() for storage in self._alive))
        return result


def memory(world: World, language: dict[str, Any], micro_batches: int) -> Held:
    """Measures the memory of a rank in a sharded run's second step, and evaluates the formula."""
    before = _status("VmRSS")
    run = make_run(world, STRATEGIES["fsdp"], language, 1, micro_batches)
    batches = run.loader(run.share.batches())
    train_step(run, batches, 0)
    with LiveBytes() as live:
        state = run.state
        live.take([one for kept in state.optimizer.state.values() for one in kept.values()])
        live.take(list(state.model.parameters()))
        if (peak := Path("/proc/self/clear_refs")).exists():
            peak.write_text("5")  # the kernel's peak begins here
        train_step(run, batches, 1)
    sizes = sizes_of(run)
    needs = rank_memory(*sizes, world.size, 2, accumulates=micro_batches > 1)
    return Held(sum(needs), live.most, _status("VmHWM") - before)


def _memory_alone(world: World, micro_batches: int) -> Held:
    # What is freed goes back to the kernel, so that resident memory tells what is held.
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)
    return memory(world, LARGE, micro_batches)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def traffic(world: World, language: dict[str, Any], rounds: int) -> Traffic:
    """Steps of each strategy in turn, in the same ranks."""
    runs = [make_run(world, parallel, language, 2, 1) for parallel in STRATEGIES.values()]
    cpu: list[list[float]] = [[] for _ in runs]
    sent: list[list[float]] = [[] for _ in runs]
    turns = [_turn(run, world, cpu[number], sent[number]) for number, run in enumerate(runs)]
    seconds = interleaved(turns, rounds, shown=False)
    return Traffic(seconds, [one[1:] for one in cpu], [one[1:] for one in sent], sizes_of(runs[0]))


def _turn(run: Run, world: World, cpu: list[float], sent: list[float]) -> Callable[[], float]:
    """Returns a function that runs one step, records its CPU time and bytes, and returns the seconds."""
    batches, done = run.loader(run.share.batches()), 0

    def turn() -> float:
        nonlocal done
        torch.distributed.barrier(world.group)
        before, spent, began = received(world), time.process_time(), time.perf_counter()
        train_step(run, batches, done)
        done += 1
        torch.distributed.barrier(world.group)
        seconds = time.perf_counter() - began
        used = torch.tensor([time.process_time() - spent, 0.0], dtype=torch.float64)
        used[1] = (received(world) - before) / world.size  # each rank sees all of them
        both = sum_over_ranks(used, world.group)
        cpu.append(float(both[0]))
        sent.append(float(both[1]))
        return seconds

    return turn
