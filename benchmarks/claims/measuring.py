"""Common parts of the ablations: the size of a measurement, and a recipe's steps in one process."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import profile

from benchmarks.claims.claim import Series
from benchmarks.paired import interleaved
from benchmarks.setting import now
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override, read_recipe
from trainer.config.section import validated
from trainer.distributed.parallel import World, silenced
from trainer.host.limits import read_limits, threads_per_rank, workers_per_rank
from trainer.models.precision import set_matmul_mode
from trainer.train.components.run import build, set_determinism
from trainer.train.components.task import check_request, device_kind, make_task
from trainer.train.state import Run
from trainer.train.step import train_step

MIB = 1 << 20
_MOST_STEPS = 20_000  # a rate for each is worked out
_LENGTH = ("epochs=1000000000", f"max_steps={_MOST_STEPS}")
_MOST_IN_A_TURN = 500


class Size(NamedTuple):
    """Size of a measurement.

    Attributes:
        rounds: Interleaved.
        turn_s: Seconds of a side's turn, about; a turn has one step at least.
        images: Photographs of an epoch, where some are loaded.
        scratch: A folder for them, which all ablations share.
    """

    rounds: int
    turn_s: float
    images: int
    scratch: Path


class Measurement(NamedTuple):
    """Result of an ablation: the conditions common to all sides, in words, and its quantities by name."""

    conditions: str
    series: Mapping[str, Series]


@dataclass(frozen=True)
class Ablation:
    """Measurement of a setting's sides.

    Attributes:
        measure: Given the names of the sides that are wanted.
        needs: What a machine must have, see `needs`.
        seconds: What it takes, about; a sixth of that with --quick.
        quick: Whether it can be that quick.
    """

    measure: Callable[[Sequence[str], Size], Measurement]
    needs: tuple[str, ...] = ()
    seconds: float = 24.0
    quick: bool = True


class Scene(NamedTuple):
    """A recipe that is measured: a small one on a CPU, a real one on a GPU.

    Attributes:
        recipe: Its name.
        cpu: Settings on a CPU.
        cuda: Settings on a GPU.
    """

    recipe: str
    cpu: Sequence[str]
    cuda: Sequence[str]

    @property
    def settings(self) -> Sequence[str]:
        """Settings of the recipe for this machine."""
        return self.cuda if torch.cuda.is_available() else self.cpu

    def __str__(self) -> str:
        """The recipe as on the command line."""
        return " ".join([self.recipe, *self.settings])


class Side(NamedTuple):
    """A way to train.

    Attributes:
        settings: KEY=VALUE.
        prepare: What the trainer doesn't offer, done to a run that was built.
        each: The same, done after each step.
    """

    settings: tuple[str, ...] = ()
    prepare: Callable[[Run], object] | None = None
    each: Callable[[Run], object] | None = None


class Turns:
    """A run of a side, some steps at a time."""

    def __init__(self, scene: Scene, side: Side, stack: ExitStack, world: World | None = None) -> None:
        """Builds the run; `stack` closes its loaders."""
        values = override(read_recipe(scene.recipe), [*scene.settings, *side.settings, *_LENGTH])
        self.recipe = validated(Recipe, values, scene.recipe)
        task = make_task(self.recipe)
        world = world or World(0, 1, 0, _device(self.recipe), None)
        check_request(self.recipe, task, world.size)
        limits = read_limits()
        self.device = world.device
        self.run = build(self.recipe, task, world, workers_per_rank(limits, 1))
        stack.callback(self.run.loader.close)
        stack.callback(self.run.evaluation_loader.close)
        if side.prepare is not None:
            side.prepare(self.run)
        self._each, self._done = side.each, 0
        threads = self.recipe.parallel.threads
        self._threads = threads_per_rank(limits, world.size) if threads == "auto" else threads
        self.run.replica.train()

    def __call__(self, steps: int) -> float:
        """Trains the next steps and returns the seconds.

        Nothing is read ahead of them: what one side prepared during another's turn would count for nothing.
        """
        # They are the process's, and the sides take turns.
        set_matmul_mode(self.recipe.precision)
        set_determinism(self.recipe, self.device)
        torch.set_num_threads(self._threads)
        run, first = self.run, self._done
        self._done += steps
        accumulation = run.share.gradient_accumulation_steps
        began = now(self.device)
        batches = run.loader(range(first * accumulation, self._done * accumulation))
        for step in range(first, self._done):
            train_step(run, batches, step)
            if self._each is not None:
                self._each(run)
        for _ in batches:  # there is none; the loader is told that this was the end
            pass
        return now(self.device) - began

    def peak_bytes(self) -> int:
        """Returns the peak bytes of a step above those at its start."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self(1)
            return torch.cuda.max_memory_allocated(self.device) - before
        with silenced(sys.stderr), profile(use_cpu=True, profile_memory=True) as seen:
            self(1)
        return _highest(seen)

    def lasting_bytes(self) -> int:
        """Bytes of weights, buffers, gradients that stay, and the optimizer's state."""
        run = self.run
        tensors = [*run.state.model.parameters(), *run.state.model.buffers()]
        tensors += [p.grad for p in run.gradients.parameters if p.grad is not None]
        for state in run.state.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return sum(tensor.nbytes for tensor in tensors)


def measure_steps(
    scene: Scene, sides: Mapping[str, Side], size: Size, per_turn: int = 0, memory: bool = False
) -> Measurement:
    """Times a recipe's steps with each side's settings in turn.

    Args:
        scene: What is trained.
        sides: By name.
        size: How much.
        per_turn: Steps of a turn; 0: as many as take `size.turn_s`.
        memory: Counts bytes as well: "peak", of a step above what lies there before it, and "memory", with
            weights, gradients and the optimizer's state.

    Returns:
        "time" and perhaps the others.
    """
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        turns = {name: Turns(scene, side, stack) for name, side in sides.items()}
        count = per_turn or steps_in(size.turn_s, next(iter(turns.values())))
        for turn in turns.values():
            turn(3)  # compiles, records CUDA graphs, lets cuDNN choose
        seconds = interleaved([_with(turn, count) for turn in turns.values()], size.rounds, shown=False)
        per_step = [[s / count * 1e3 for s in series] for series in seconds]
        series = {"time": Series(dict(zip(turns, per_step, strict=True)), "ms a step")}
        if memory:
            peaks = {name: turn.peak_bytes() / MIB for name, turn in turns.items()}
            whole = {name: peaks[name] + turn.lasting_bytes() / MIB for name, turn in turns.items()}
            series["peak"] = Series({name: [value] for name, value in peaks.items()}, "MiB", counted=True)
            series["memory"] = Series({name: [value] for name, value in whole.items()}, "MiB", counted=True)
    return Measurement(f"{scene}; {count} steps a turn", series)


def steps_in(seconds: float, turn: Turns) -> int:
    """Returns the number of steps that take about so many seconds."""
    turn(2)
    return min(_MOST_IN_A_TURN, max(1, round(seconds / min(turn(1), turn(1)))))


def chosen(sides: Mapping[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
    """Returns the requested sides, in their order."""
    return {name: side for name, side in sides.items() if name in wanted}


def _with(turn: Turns, count: int) -> Callable[[], float]:
    return lambda: turn(count)


def _device(recipe: Recipe) -> torch.device:
    return torch.device("cuda", 0) if device_kind(recipe) == "cuda" else torch.device("cpu")


def _highest(seen: Any) -> int:
    """Measures the peak bytes of tensors that were made while it was open."""
    changes, events = [], list(seen.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        if hasattr(event.extra_fields, "alloc_size"):
            changes.append((event.start_time_ns, int(event.extra_fields.alloc_size)))
    there = highest = 0
    for _, change in sorted(changes, key=lambda one: one[0]):
        there += change
        highest = max(highest, there)
    return highest
