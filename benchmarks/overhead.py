"""Host time that the trainer costs per step, over a loop written by hand for one model.

Claim: at most 20 us per step on one CPU thread, with default logging, for a model whose step takes about
100 us. Both loops do the same: a shuffled batch of a resident data set, loss, clipping, AdamW with a
cosine schedule, moving average. Rounds are interleaved, so that whatever else the machine does falls on
both; the metric is the median of the paired differences, with the interval that holds the true median
with 95 % probability. Libraries that are timed beside it get the same steps, in the loop that their
documentation shows (`benchmarks.against`).
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.against import blamed, chosen, titled
from benchmarks.array_task import ArrayTask
from benchmarks.conditions import conditions
from benchmarks.options import add_rounds, at_least_one
from benchmarks.paired import interleaved, judged, median_interval, one_thread
from trainer.config.recipe import Recipe
from trainer.config.training import OptimConfig
from trainer.data.batch import Batch
from trainer.distributed.parallel import World
from trainer.observe.checksums import Checksums, checksums_to, fingerprints_of
from trainer.observe.sinks import jsonl_sink, tensorboard_sink
from trainer.optim.optimizers import clip_gradients
from trainer.tasks import Task
from trainer.train.anomaly import AnomalyDetector
from trainer.train.components.run import build
from trainer.train.loop import train
from trainer.train.outputs import Outputs, bare_outputs
from trainer.train.state import Run

Series = npt.NDArray[np.float64]

_BATCH, _FEATURES, _CLASSES, _SAMPLES = 8, 8, 4, 4096
_EMA_DECAY = 0.99


class TinyTask(ArrayTask):
    """A linear classifier of random vectors: the smallest step that is still a training step."""

    def __init__(self) -> None:
        random = np.random.Generator(np.random.Philox(0))
        self.x = random.standard_normal((_SAMPLES, _FEATURES), dtype=np.float32)
        self.y = random.integers(0, _CLASSES, _SAMPLES)
        super().__init__({"x": self.x, "y": self.y}, evaluated=1)  # at the end of a run, and not timed

    def model(self) -> nn.Module:
        """Returns a model of one matrix."""
        return nn.Linear(_FEATURES, _CLASSES, bias=False)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Cross entropy, summed."""
        return F.cross_entropy(model(batch.fields["x"]), batch.fields["y"], reduction="sum")

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:  # noqa: ARG002
        """Next to nothing: the evaluation at the end is no part of what is timed."""
        return {"loss": batch.fields["x"].sum()}


def by_hand(task: TinyTask, optim: OptimConfig, steps: int, lean: bool = False) -> float:
    """The loop that one would write for this model and nothing else; returns seconds.

    With `lean` it also leaves out what torch's own functions for clipping and for clearing gradients
    spend on cases that don't occur here, as the trainer does.
    """
    model = task.model()
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=optim.lr, weight_decay=optim.weight_decay, fused=True)
    average = [p.detach().clone() for p in params]
    weights = [p.detach() for p in params]
    x, y = torch.from_numpy(task.x), torch.from_numpy(task.y)
    per_epoch = _SAMPLES // _BATCH
    start = time.perf_counter()
    for step in range(steps):
        if step % per_epoch == 0:
            order = torch.randperm(_SAMPLES).split(_BATCH)
        picked = order[step % per_epoch]
        logits = model(torch.index_select(x, 0, picked))
        loss = F.cross_entropy(logits, torch.index_select(y, 0, picked), reduction="sum") / _BATCH
        loss.backward()
        if lean:
            clip_gradients([p.grad for p in params if p.grad is not None], optim.max_grad_norm)
        else:
            nn.utils.clip_grad_norm_(params, optim.max_grad_norm, foreach=True)
        optimizer.param_groups[0]["lr"] = optim.lr * (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.step()
        if lean:
            params[0].grad = None
        else:
            optimizer.zero_grad(set_to_none=True)
        torch._foreach_lerp_(average, weights, max(1 - _EMA_DECAY, 9 / (10 + step)))
    return time.perf_counter() - start


class TinySteps:
    """Task of a library's loop: it does the forward pass, clipping and the update itself.

    Whatever a library needn't do itself is the same plain line as in `by_hand`, so that none is charged for
    it: batches by index_select, the learning rate and the moving average.

    Attributes:
        model: New.
        optimizer: Its own.
        clip: Largest gradient norm.
        steps: How many to do.
    """

    def __init__(self, task: TinyTask, optim: OptimConfig, steps: int) -> None:
        self.model = task.model()
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            parameters, lr=optim.lr, weight_decay=optim.weight_decay, fused=True
        )
        self.clip = optim.max_grad_norm
        self.steps = steps
        self._task, self._optim = task, optim
        self._average = [p.detach().clone() for p in parameters]
        self._weights = [p.detach() for p in parameters]

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields one batch for each step: float32 (8, 8) and int64 (8,), shuffled in each epoch."""
        x, y = torch.from_numpy(self._task.x), torch.from_numpy(self._task.y)
        per_epoch = _SAMPLES // _BATCH
        for step in range(self.steps):
            if step % per_epoch == 0:
                order = torch.randperm(_SAMPLES).split(_BATCH)
            picked = order[step % per_epoch]
            yield torch.index_select(x, 0, picked), torch.index_select(y, 0, picked)

    def loss(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy; `model` is the model as the library wraps it."""
        return F.cross_entropy(model(x), y, reduction="sum") / _BATCH

    def before(self, step: int) -> None:
        """Sets the learning rate; called before the update."""
        # Looked up anew: accelerate's prepare() replaces the groups.
        self.optimizer.param_groups[0]["lr"] = (
            self._optim.lr * (1 + math.cos(math.pi * step / self.steps)) / 2
        )

    def after(self, step: int) -> None:
        """Updates the average; called after the update."""
        torch._foreach_lerp_(self._average, self._weights, max(1 - _EMA_DECAY, 9 / (10 + step)))


def by_trainer(task: Task, recipe: Recipe, folder: Path, *each_step: Callable[[int], None]) -> float:
    """The trainer's own loop, with its default logging to files; returns seconds.

    Args:
        task: What is learned.
        recipe: The configuration.
        folder: For the files.
        each_step: Told of each step how many are done.
    """
    run = build(recipe, task, World(0, 1, 0, torch.device("cpu"), None), workers=0)
    with ExitStack() as stack:
        out = logging_to(folder, run, stack)
        assert run.recent is not None
        detector = AnomalyDetector(recipe.anomaly, run.recent, None, 0, run.state.history)
        out = replace(out, each_step=tuple(each_step))
        start = time.perf_counter()
        train(run, out, detector)
        return time.perf_counter() - start


def logging_to(folder: Path, run: Run, stack: ExitStack) -> Outputs:
    """The trainer's default logging to files of a folder, until the stack is closed; no checkpoints."""
    to_board, close = tensorboard_sink(folder)
    stack.callback(close)
    to_files, close_files = jsonl_sink(folder)
    stack.callback(close_files)
    kept = stack.enter_context((folder / "checksums.jsonl").open("w"))
    model = run.state.model
    checksums = Checksums(fingerprints_of(model), checksums_to(kept, list(model.state_dict()), [], 0))
    return bare_outputs(stack, run, [to_files, to_board], checksums)


def tiny_recipe(steps: int) -> Recipe:
    """The recipe of `TinyTask`."""
    values: dict[str, Any] = {
        "epochs": -(-steps * _BATCH // _SAMPLES),
        "max_steps": steps,
        "evaluation": {"every": "end"},
        "data": {"global_batch_size": _BATCH, "micro_batch_size": _BATCH},
        "optim": {"lr": 1e-3, "max_grad_norm": 1.0, "warmup_steps": 0.0, "weight_decay": 0.01},
        "ema": {"decay": _EMA_DECAY},
        "parallel": {"threads": 1},
    }
    return Recipe.model_validate(values)


@dataclass(frozen=True)
class HostTimes:
    """Microseconds per step of each loop, float64 (rounds,).

    Attributes:
        steps: Of a round.
        log_every: Steps between the trainer's rows of metrics.
        hand: By hand, with torch's own functions for clipping and for clearing gradients.
        lean: By hand, without these two.
        ours: The trainer's.
        theirs: Of each library, by name.
    """

    steps: int
    log_every: int
    hand: Series
    lean: Series
    ours: Series
    theirs: Mapping[str, Series]


def measure_overhead(rounds: int, steps: int, libraries: Mapping[str, Callable[..., float]]) -> HostTimes:
    """Times the loops in turn, on one thread.

    Args:
        rounds: Of all loops.
        steps: Steps of a round.
        libraries: `train_tiny` of each, by name.
    """
    task, recipe = TinyTask(), tiny_recipe(steps)
    theirs = [partial(_by_library, name, each, task, recipe.optim, steps) for name, each in libraries.items()]
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        loops: list[Callable[[], float]] = [
            partial(by_hand, task, recipe.optim, steps),
            partial(by_hand, task, recipe.optim, steps, lean=True),
            partial(by_trainer, task, recipe, Path(folder)),
            *theirs,
        ]
        times = interleaved(loops, rounds)
    hand, lean, ours, *others = (np.array(series) * 1e6 / steps for series in times)
    return HostTimes(steps, recipe.log.every, hand, lean, ours, dict(zip(libraries, others, strict=True)))


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    add_rounds(bench, 40)
    bench.add_argument(
        "--steps", type=at_least_one, default=500, metavar="N", help="steps per round (default: 500)"
    )
    bench.add_argument(
        "--target", type=float, default=20.0, metavar="US", help="largest overhead, us per step"
    )
    bench.add_argument(
        "--against", default="", metavar="LIST", help="lightning,fabric,accelerate,ignite: which to time too"
    )
    bench.set_defaults(
        run=lambda options: bench_overhead(options.rounds, options.steps, options.target, options.against)
    )


def bench_overhead(rounds: int, steps: int, target_us: float, against: str = "") -> int:
    """Measures, prints and judges.

    Args:
        rounds: Pairs of runs.
        steps: Steps of a run.
        target_us: Largest median overhead of the trainer, in microseconds per step.
        against: Libraries to time beside it, separated by commas.

    Returns:
        0 if the trainer meets the target (whatever the others cost), 1 if not, 3 if it lies within the
        interval.

    Raises:
        BadInputError: If a library isn't known or isn't there.
    """
    libraries = chosen(against, "train_tiny")
    times = measure_overhead(rounds, steps, libraries)
    more, low, high = median_interval((times.ours - times.hand).tolist())
    over_lean, lean_low, lean_high = median_interval((times.ours - times.lean).tolist())
    verdict, code = judged(low, high, target_us)
    print(
        f"{conditions()}\n"
        f"median of {rounds} interleaved rounds of {steps} steps, 1 thread, us per step\n"
        "(a difference is the median of the differences of each round):\n"
        f"  by hand      {np.median(times.hand):8.1f}   torch's clip_grad_norm_ and zero_grad\n"
        f"  by hand, lean{np.median(times.lean):8.1f}   neither: what they do, inlined for this model\n"
        f"  trainer      {np.median(times.ours):8.1f}   "
        f"with a row of metrics every {times.log_every} steps\n"
        f"  trainer - by hand       {more:8.1f}   95 % interval {low:.1f} to {high:.1f}\n"
        f"  trainer - by hand, lean {over_lean:8.1f}   95 % interval {lean_low:.1f} to {lean_high:.1f}\n"
        f"  target       {target_us:8.1f}   over by hand: {verdict}"
    )
    if libraries:
        print(_table(times))
    return code


def _by_library(
    name: str, measure: Callable[[TinySteps], float], task: TinyTask, optim: OptimConfig, steps: int
) -> float:
    with blamed(name):
        return measure(TinySteps(task, optim, steps))


def _table(times: HostTimes) -> str:
    rows = ["", "| loop | us per step | over by hand | 95 % interval |", "|---|---|---|---|"]
    rows.append(f"| by hand | {np.median(times.hand):.1f} | | |")
    for name, series in {"trainer": times.ours, **times.theirs}.items():
        more, low, high = median_interval((series - times.hand).tolist())
        rows.append(f"| {titled(name)} | {np.median(series):.1f} | {more:.1f} | {low:.1f} to {high:.1f} |")
    return "\n".join(rows)
