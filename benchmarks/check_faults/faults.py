"""Known faults, put into the process one at a time: which does `trainer check` see?

A fault is a row of `FAULTS`: what is wrong, how it is put in, in which task, and the variants that must see
it.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import nn

from trainer.commands.check import training
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import load_recipe
from trainer.config.training import AverageConfig
from trainer.data import loader
from trainer.data.sampling.class_order import ClassDraws
from trainer.data.sampling.plan import Plan, Share
from trainer.distributed import tree
from trainer.distributed.sharding import Rows
from trainer.distributed.tree import TreeReduction
from trainer.models import activation_checkpointing, batchnorm, buffers, finetune, precision
from trainer.models.batchnorm import StepStatistics
from trainer.models.buffers import ChangingBuffers
from trainer.optim import muon, optimizers, schedules
from trainer.optim.average import WeightAverage
from trainer.optim.optimizers import LRScheduler
from trainer.optim.own import HostSchedule
from trainer.rng import permuted
from trainer.train import evaluate, loop, reduction, state, step
from trainer.train.components import run, updates
from trainer.train.reduction import AllReduce, GivenCount, Gradients, ItemCount, TreeSum
from trainer.train.state import Run
from trainer.train.step import ValuesOf

_TASKS = Path(__file__).with_name("tasks.py")
_SMALL = ("data.global_batch_size=8", "data.micro_batch_size=8")
# Tasks by name: class in tasks.py or recipe, and settings beside its own.
KNOWN_TASKS = MappingProxyType(
    {
        "simple": ("Simple", ()),
        "ragged": ("Ragged", ()),
        "weighted": ("Unnormed", ("optim.name=sgd", "data.last_batch=weighted")),
        "averaged": ("Simple", ("ema.decay=0.2",)),
        "averaged-each-2": ("Simple", ("ema.decay=0.2", "ema.every=2")),
        "dropped": ("Unnormed", ("data.last_batch=drop",)),
        "layers": (
            "Simple",
            ("optim.layer_decay=0.5", "optim.schedule=one-cycle", "optim.warmup_steps=0.4"),
        ),
        "muon": ("Simple", ("optim.name=muon", "optim.schedule=wsd", "optim.decay=0.6")),
        "milestones": ("Simple", ("optim.schedule=step", "optim.milestones=[0.5, 1]")),
        "several": ("Several", ()),
        "own": ("Own", ()),
        "jitter": ("digits", ("data.jitter=0.2",)),
        "drawn": ("digits", ("data.class_weights={3: 5}",)),
    }
)
Change = Callable[[Callable[..., Any]], Callable[..., Any]]


class Fault(NamedTuple):
    """A fault.

    Attributes:
        name: Its name.
        what: What is wrong.
        owner: Class or module whose attribute is changed.
        attribute: The attribute.
        change: Makes the faulty function of the right one.
        seen_by: Variants that must see it; one of them is enough.
        task: A name of `KNOWN_TASKS`.
        there: Whether it is put only into processes that the check starts.
    """

    name: str
    what: str
    owner: Any
    attribute: str
    change: Change
    seen_by: tuple[str, ...]
    task: str = "simple"
    there: bool = False

    @contextlib.contextmanager
    def put_in(self) -> Iterator[None]:
        """Context in which the fault is in this process."""
        wrong = self.change(getattr(self.owner, self.attribute))
        with mock.patch.object(self.owner, self.attribute, wrong):
            yield


def task_of(name: str) -> Recipe:
    """Returns the recipe of one of the tasks."""
    task, settings = KNOWN_TASKS[name]
    return load_recipe(f"{_TASKS}:{task}" if task[0].isupper() else task, [*_SMALL, *settings])


def _instead(wrong: Callable[..., Any]) -> Change:
    """Returns a change that puts another function in the place of any."""
    return lambda _: wrong


def _given(**edits: Any) -> Change:
    """Returns a change that calls the right function with other arguments, by name."""
    return lambda right: lambda *args, **named: right(*args, **{**named, **edits})


def _before(act: Callable[..., Any]) -> Change:
    """Returns a change that does something with the arguments first."""

    def change(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any, **named: Any) -> Any:
            act(*args)
            return right(*args, **named)

        return wrong

    return change


def _after(act: Callable[..., Any]) -> Change:
    """Returns a change that does something with the arguments afterwards."""

    def change(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any, **named: Any) -> Any:
            result = right(*args, **named)
            act(*args)
            return result

        return wrong

    return change


def _of_result(act: Callable[[Any], Any]) -> Change:
    """Returns a change of the result."""
    return lambda right: lambda *args, **named: act(right(*args, **named))


def _keyed(first: Callable[[Run, int], int]) -> Change:
    """Returns a change of `train_step`: seeds of dropout begin elsewhere."""

    def change(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(run: Run, batches: Any, number: int) -> None:
            key = run.first_key
            object.__setattr__(run, "first_key", first(run, number))
            right(run, batches, number)
            object.__setattr__(run, "first_key", key)

        return wrong

    return change


_BEGUN = dict[int, int]()  # first step of a run, by id


def _since_start(run: Run, number: int) -> int:
    return run.first_key - _BEGUN.setdefault(id(run), number) * run.micro_batches


def _sample(change: Callable[[Any, Any, Any], Any]) -> Change:
    """Returns a change of `Plan._sample`: of epoch and position, given the right function."""
    return lambda right: lambda plan, epoch, position: change(functools.partial(right, plan), epoch, position)


def _zero_slot(slot: str) -> Callable[..., None]:
    def act(run_state: Any, *_: Any) -> None:
        for slots in run_state.optimizer.state.values():
            if slot in slots:
                slots[slot].zero_()

    return act


def _halve_gradients(run: Run, *_: Any) -> None:
    if run.world.size > 1:
        torch._foreach_mul_(run.gradients.present(), 0.5)


def _round_weights(run_state: Any, *_: Any) -> None:
    with torch.no_grad():
        for parameter in run_state.model.parameters():
            parameter.copy_(parameter.bfloat16())


def _average_is_model(run_state: Any, *_: Any) -> None:
    for name, parameter in run_state.model.named_parameters():
        run_state.average.tensors[name].copy_(parameter.detach())


def _clip_scaled(_: Any, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.5)


def _count_skipped(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(own: Any, optimizer: torch.optim.Optimizer, norm: torch.Tensor) -> Any:
        skipped = right(own, optimizer, norm)
        for slots in optimizer.state.values():
            slots["step"] += skipped
        return skipped

    return wrong


def _average_first(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(run: Run, number: int, loss: torch.Tensor) -> None:
        average = run.state.average
        assert average is not None
        average.update(number, None, torch.zeros(1), number + 1 == run.steps)
        with mock.patch.object(average, "update", lambda *_: None):
            right(run, number, loss)

    return wrong


def _decay_less(average: Any, *_: Any) -> None:
    # Less by a part of it, so that it is seen only where the decay counts, not the ramp.
    average._config = AverageConfig(decay=0.9 * average._config.decay)


def _last_gradient(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(own: Any, last: bool) -> Any:
        for parameter in own._replica.parameters():
            parameter.grad = None
        return right(own, last)

    return wrong


def _evaluating(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    model.eval()
    return contextlib.nullcontext()


@contextlib.contextmanager
def _without_swap_back(average: WeightAverage) -> Iterator[None]:
    for name, parameter in ((n, w) for n, w in zip(average.tensors, average._weights, strict=True)):
        parameter.data.copy_(average.tensors[name])
    yield


def _other_order(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(plan: Plan, micro_batches: Any) -> Any:
        return type(found := right(plan, micro_batches))(*(one[:, ::-1].copy() for one in found))

    return wrong


def _padding_counted(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value * 10 / 16 for name, value in metrics.items()}


def _swapped_betas(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        group["betas"] = tuple(0.9 * one for one in group["betas"])
    return optimizer


def _no_decay(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**group, "weight_decay": 0.0} for group in groups]


def _late(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(own: Any, rates: list[float], *more: Any, **named: Any) -> None:
        right(own, [rates[0], *rates[:-1]], *more, **named)

    return wrong


def _too_high(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(own: Any, rates: list[float], *more: Any, **named: Any) -> None:
        right(own, [*rates[:-1], rates[-1] + 1e-4], *more, **named)

    return wrong


def _every_other(right: Callable[..., Any]) -> Callable[..., Any]:
    count = 0

    def wrong(own: Any, gradients: list[torch.Tensor], metrics: torch.Tensor) -> None:
        nonlocal count
        count += 1
        right(own, [one * (count % 2) for one in gradients], metrics)

    return wrong


def _items_in_loss(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(own: Any, loss: torch.Tensor, gradients: Gradients) -> Any:
        with mock.patch.object(gradients, "present", list):
            return right(own, loss, gradients)

    return wrong


def _piled_up(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(run: Run) -> Any:
        kept = run.state.loss.clone()
        found = right(run)
        run.state.loss.copy_(kept)
        return found

    return wrong


def _group(name: str, value: object) -> Callable[[torch.optim.Optimizer], torch.optim.Optimizer]:
    """Returns a function that gives all groups of an optimizer a value."""

    def change(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        for group in optimizer.param_groups:
            group[name] = value
        return optimizer

    return change


def _labels_moved(filler: Any, batch: int, *_: Any) -> None:
    if (labels := filler._ring.arrays(batch).get("y")) is not None:
        labels[...] = np.roll(labels, 1, 0)


def _zeros_for_none(own: Gradients) -> None:
    for parameter in own.parameters:
        parameter.grad = torch.zeros_like(parameter)


_ORDER, _PLAIN, _ADDED, _EMA, _TREE = ("order",), ("plain",), ("micro-batches-2",), ("ema",), ("tree",)
_FP16, _RESUMED, _DDP = ("fp16",), ("resume",), ("ranks-ddp",)

# fmt: off
FAULTS = (
    # the order of samples
    Fault("never-reshuffled", "each epoch has the order of the first", Plan, "_sample",
          _sample(lambda right, epoch, position: right(epoch * 0, position)), _ORDER),
    Fault("not-shuffled", "samples come in the order of the data", Plan, "_sample",
          _sample(lambda _, __, position: position), _ORDER),
    Fault("turned-around", "samples come in the opposite order of the data", Plan, "_sample",
          _sample(lambda _, __, position: 29 - position), _ORDER),
    Fault("shifted", "each epoch begins one sample later", Plan, "_sample",
          _sample(lambda right, epoch, position: right(epoch * 0, (position + epoch) % 30)), _ORDER),
    Fault("twice-in-epoch-1", "each sample comes twice in the second epoch, half of them never",
          Plan, "_sample",
          _sample(lambda right, epoch, at: right(epoch, np.where(epoch > 0, at // 2, at))), _ORDER),
    Fault("drops-the-same", "each epoch drops the same samples", Plan, "_sample",
          _sample(lambda _, epoch, position: permuted(0, epoch, position, 24)), _ORDER, "dropped"),
    Fault("drawn-evenly", "class weights have no effect", ClassDraws, "drawn",
          lambda _: lambda own, seed, epoch, at: permuted(seed, epoch, at, len(own.by_class)),
          _ORDER, "drawn"),
    Fault("one-twice-in-epoch-2", "a sample comes twice in the third epoch",
          Plan, "_sample",
          _sample(lambda right, epoch, at: right(epoch, np.where((epoch == 2) & (at == 0), 1, at))), _ORDER),
    # loss and its divisor
    Fault("bound-of-items", "a loss that says what counts is divided by the samples",
          GivenCount, "correct", _instead(lambda _, loss, __: loss[0]), _PLAIN, "ragged"),
    Fault("micro-batch-divisor", "the loss is divided by the samples of the micro-batch", ItemCount, "begin",
          _instead(lambda own, _: own._plan.micro_batch_size), _ADDED),
    Fault("full-last-batch", "the last batch of an epoch is divided by the samples of a full one",
          Plan, "step_samples", _instead(lambda plan, _: plan.global_batch_size), _PLAIN, "weighted"),
    Fault("last-loss", "the loss of a step is that of its last micro-batch", AllReduce, "add",
          _before(lambda own, *_: setattr(own, "_loss", None)), _ADDED),
    Fault("items-in-loss-alone", "gradients are divided by the samples, the loss by what counts",
          GivenCount, "correct", _items_in_loss, _PLAIN, "ragged"),
    Fault("first-loss-alone", "of several losses the first is trained", ValuesOf, "__init__",
          _after(lambda own, *_: setattr(own, "trained", 1)), _PLAIN, "several"),
    Fault("watched-trained", "what is only watched counts in the loss, too", ValuesOf, "__init__",
          _after(lambda own, *_: setattr(own, "trained", len(own.task.losses))), _PLAIN, "several"),
    Fault("losses-pile-up", "a record has the losses since the run began", training, "take_metrics",
          _piled_up, _PLAIN),
    Fault("last-gradient", "the gradient of a step is that of its last micro-batch", AllReduce, "micro_batch",
          _last_gradient, _ADDED),
    Fault("zeros-for-none", "a layer without samples has a gradient of 0, and decays", Gradients, "clear",
          _instead(_zeros_for_none),
          _PLAIN, "several"),
    Fault("frozen-trained", "frozen layers are trained", finetune, "_freeze",
          _instead(lambda *_: None), _PLAIN, "several"),
    Fault("gradients-stay", "gradients aren't cleared after a step",
          Gradients, "clear", _instead(lambda _: None), _PLAIN),
    Fault("tree-half", "the tree leaves out each second micro-batch", TreeReduction, "add_micro_batch",
          _every_other, _TREE),
    Fault("tree-statistics", "the tree leaves BatchNorm's statistics out", TreeSum, "finish",
          _after(lambda own: setattr(own._statistics, "_sums", [])), _TREE),
    # update
    Fault("no-clipping", "gradients aren't clipped",
          Gradients, "clip", _instead(lambda own, _: own.norm()), _PLAIN),
    Fault("largest-norm", "gradients are clipped by the largest norm of a tensor", optimizers, "grad_norm",
          _instead(lambda gradients: torch.stack(torch._foreach_norm(gradients)).max()), _PLAIN),
    Fault("clipped-scaled", "gradients are clipped before they are unscaled",
          precision.ScaledPrecision, "unscale", _before(_clip_scaled), _FP16),
    Fault("decay-on-biases", "biases and norms decay, too",
          optimizers, "undecayed", _instead(lambda *_: []), _PLAIN),
    Fault("no-decay", "weights don't decay", updates, "parameter_groups", _of_result(_no_decay), _PLAIN),
    Fault("other-betas", "Adam's betas are 10 % smaller",
          updates, "make_optimizer", _of_result(_swapped_betas), _PLAIN),
    Fault("updated-twice", "the optimizer makes each step twice", precision.Precision, "update",
          _after(lambda _, optimizer, __: optimizer.step()), _PLAIN),
    Fault("rate-late", "each update has the rate of the one before", LRScheduler, "__init__", _late, _PLAIN),
    Fault("last-rate", "the last rate is too high", LRScheduler, "__init__", _too_high, _PLAIN),
    Fault("other-eps", "Adam's eps is 100 times larger",
          updates, "make_optimizer", _of_result(_group("eps", 1e-6)), _PLAIN),
    Fault("no-nesterov", "SGD's momentum isn't Nesterov's",
          updates, "make_optimizer", _of_result(_group("nesterov", False)), _PLAIN, "weighted"),
    Fault("dampened", "SGD's momentum is dampened",
          updates, "make_optimizer", _of_result(_group("dampening", 0.1)), _PLAIN, "weighted"),
    Fault("muon-4", "Muon makes 4 iterations in place of 5", muon, "orthogonalize", _given(steps=4),
          _PLAIN, "muon"),
    Fault("muon-all", "Muon updates the first and the last layer, too", muon, "hidden_matrices",
          _instead(lambda model: [p for p in model.parameters() if p.ndim > 1]), _PLAIN, "muon"),
    Fault("layers-off-by-one", "each layer has the rate of the one below", optimizers, "layer_factors",
          _of_result(lambda factors: {name: 0.5 * factor for name, factor in factors.items()}),
          _PLAIN, "layers"),
    Fault("layers-alike", "layers have one rate", optimizers, "layer_factors",
          _of_result(lambda factors: dict.fromkeys(factors, 1.0)), _PLAIN, "layers"),
    Fault("linear-wsd", "the last phase of wsd falls linearly", schedules, "wsd",
          _of_result(lambda rates: [1 - (1 - rate) ** 2 for rate in rates]), _PLAIN, "muon"),
    Fault("one-cycle-ends-early", "one-cycle ends a step early", schedules, "one_cycle",
          _of_result(lambda rates: [*rates[1:], rates[-1]]), _PLAIN, "layers"),
    Fault("milestone-late", "the rate falls a step after its milestone", schedules, "step",
          _of_result(lambda rates: [1.0, *rates[:-1]]), _PLAIN, "milestones"),
    Fault("own-scheduler-twice", "the task's scheduler makes two steps an update", HostSchedule, "advance",
          _after(lambda own, *_: own._scheduler.step()), _PLAIN, "own"),
    Fault("own-scheduler-skips-too", "the task's scheduler steps after a skipped update", HostSchedule,
          "advance", lambda right: lambda own, _=None: right(own), _FP16, "own"),
    # random numbers
    Fault("augmented-alike", "each epoch augments a sample in the same way", loader, "uniforms",
          lambda right: lambda seed, epoch, *more: right(seed, epoch * 0, *more), _PLAIN, "jitter"),
    Fault("same-dropout", "each step draws the same dropout", loop, "train_step",
          _keyed(lambda run, number: run.first_key - number * run.micro_batches), _PLAIN),
    Fault("dropout-of-the-step-before", "each step draws the dropout of the one before", loop, "train_step",
          _keyed(lambda run, _: run.first_key - run.micro_batches), _PLAIN),
    # statistics of forward passes
    Fault("statistics-go-on", "BatchNorm isn't put back between micro-batches", StepStatistics, "restore",
          _instead(lambda _: None), _ADDED),
    Fault("last-statistics", "BatchNorm keeps the statistics of the last micro-batch", StepStatistics, "add",
          _before(lambda own, _: setattr(own, "_sums", [])), _ADDED),
    Fault("buffers-go-on", "buffers aren't put back between micro-batches", ChangingBuffers, "restore",
          _instead(lambda _: None), _ADDED, "several"),
    Fault("counts-cut", "the mean of what micro-batches add to integers is cut in place of rounded",
          buffers, "is_mean", _instead(lambda _: True), _ADDED, "several"),
    Fault("evaluation-moves", "what an evaluation makes of a buffer stays", StepStatistics, "restore",
          _instead(lambda _: None), _EMA, "several"),
    # average
    Fault("average-slower", "the average has another decay", WeightAverage, "update",
          _before(_decay_less), _EMA),
    Fault("average-each-step", "the average moves after each step, not each second", WeightAverage, "update",
          lambda right: lambda own, step, skipped, updates, _=False: right(own, step, skipped, updates, True),
          _EMA, "averaged-each-2"),
    Fault("ramp-off-by-one", "the average's ramp is one update ahead", WeightAverage, "update",
          lambda right: lambda own, number, *more: right(own, number + 1, *more), _EMA),
    Fault("average-first", "the average moves before the update", step, "_update", _average_first, _EMA),
    Fault("average-stays", "averaged weights stay after an evaluation", WeightAverage, "in_place",
          _instead(_without_swap_back), _EMA),
    # evaluation
    Fault("evaluated-at-the-end", "evaluations before the last are left out", loop, "next_evaluation",
          _instead(lambda _, plan, __: plan.steps), _EMA),
    Fault("one-left-out", "the last sample isn't evaluated", run, "evaluation_share",
          lambda right: lambda samples, *more: right(samples - 1, *more), _PLAIN),
    Fault("stays-in-evaluation", "the model stays in evaluation mode", evaluate, "in_evaluation_mode",
          _instead(_evaluating), _EMA),
    Fault("measured-in-training", "evaluation is done in training mode", evaluate, "in_evaluation_mode",
          _instead(lambda _: contextlib.nullcontext()), _EMA),
    Fault("padding-counted", "metrics are divided by the padded number of samples", evaluate, "evaluate",
          _of_result(_padding_counted), _PLAIN),
    Fault("measured-weights", "evaluation measures the weights in place of their average",
          WeightAverage, "in_place", _instead(lambda _: contextlib.nullcontext()), _EMA),
    # number formats and memory
    Fault("never-bf16", "bfloat16 is computed in float32", precision, "autocast",
          _instead(lambda *_: contextlib.nullcontext()), ("bf16",)),
    Fault("skipped-moves-rate", "a skipped update moves the schedule", LRScheduler, "advance",
          lambda right: lambda own, _=None: right(own), _FP16),
    Fault("skipped-moves-statistics", "BatchNorm keeps the statistics of a skipped update",
          StepStatistics, "end_step", lambda right: lambda own, _=None: right(own), _FP16),
    Fault("skipped-counts", "Adam counts a skipped update",
          precision.ScaledPrecision, "update", _count_skipped, _FP16),
    Fault("never-grows", "the loss scale stays where it fell to", precision.ScaledPrecision, "update",
          _before(lambda own, *_: own.scaler.set_growth_interval(2000)), _FP16),
    Fault("computed-twice", "a repeated forward pass counts in BatchNorm's statistics",
          activation_checkpointing, "checkpoint",
          lambda right: lambda block, *given, **named: (block(*given), right(block, *given, **named))[1],
          ("checkpointing",)),
    Fault("row-of-another", "a slot has labels of other rows", loader._Filler, "_read",
          _after(_labels_moved), ("workers-0",)),
    Fault("recomputed-otherwise", "the repeated forward pass draws other dropout",
          activation_checkpointing, "checkpoint", _given(preserve_rng_state=False), ("checkpointing",)),
    # resume
    Fault("resumed-at-0", "a resumed run begins with the first samples", Share, "batches",
          lambda right: lambda own, _=0: right(own, 0), _RESUMED, there=True),
    Fault("resumed-in-epoch-0", "a resumed run takes the order of the first epoch", Plan, "_sample",
          _sample(lambda right, epoch, position: right(epoch * 0, position)), ("resume-late",), there=True),
    Fault("resumed-keys", "dropout begins again in a resumed run",
          loop, "train_step", _keyed(_since_start), _RESUMED),
    Fault("momentum-lost", "SGD's momentum isn't restored", state, "load_tensors",
          _after(_zero_slot("momentum_buffer")), _RESUMED, "weighted"),
    Fault("moments-lost", "Adam's second moment isn't restored", state, "load_tensors",
          _after(_zero_slot("exp_avg_sq")), _RESUMED),
    Fault("steps-lost", "Adam's count of steps isn't restored",
          state, "load_tensors", _after(_zero_slot("step")), _RESUMED),
    Fault("average-lost", "the average isn't restored",
          state, "load_tensors", _after(_average_is_model), _RESUMED, "averaged"),
    Fault("average-begins-again", "a resumed average counts the updates from the first", WeightAverage,
          "go_on", _instead(lambda *_: None), ("resume-late",), "averaged-each-2", there=True),
    Fault("statistics-begin-again", "BatchNorm begins where the run began", StepStatistics, "reload",
          _instead(lambda _: None), ("resume-late",), there=True),
    Fault("weights-rounded", "a checkpoint's weights are rounded to bfloat16", state, "load_tensors",
          _after(_round_weights), _RESUMED),
    # processes
    Fault("order-in-a-batch", "another process reads the samples of a micro-batch in another order",
          Plan, "read", _other_order, ("hash-seed",), there=True),
    Fault("rows-of-another", "a loader worker gives labels of other rows", loader._Filler, "_read",
          _after(_labels_moved), ("workers-2",), there=True),
    Fault("synchronized-each-time", "gradients are summed over the ranks in each micro-batch", reduction,
          "unsynchronized", _instead(lambda _: contextlib.nullcontext()), _DDP),
    Fault("same-share", "all ranks train on the samples of the first", Share, "micro_batches",
          lambda right: lambda own, batches: right(dataclasses.replace(own, rank=0), batches), _DDP),
    Fault("norm-of-a-rank", "a rank clips by the norm of its own rows", Rows, "norm",
          _instead(lambda _, norm: norm), ("ranks-fsdp",)),
    Fault("metrics-of-a-rank", "metrics are those of the first rank", evaluate, "sum_over_ranks",
          _instead(lambda tensor, _: tensor), _DDP),
    Fault("tree-of-a-rank", "the tree leaves out the other ranks", tree, "_over_ranks",
          _instead(lambda *_: None), ("ranks-tree",)),
    Fault("gradients-halved", "ranks average gradients in place of their sum", step, "_update",
          _before(_halve_gradients), ("ranks-ddp", "ranks-fsdp")),
    Fault("dropout-alike", "ranks draw the same dropout", loop, "train_step",
          _keyed(lambda run, _: run.first_key - run.world.rank * run.gradient_accumulation_steps), _DDP),
    Fault("statistics-of-a-rank", "BatchNorm's statistics aren't summed over ranks",
          batchnorm, "sum_over_ranks", _instead(lambda tensor, _: tensor), _DDP),
    Fault("items-of-a-rank", "items are counted on each rank alone", reduction, "sum_over_ranks",
          _instead(lambda tensor, _: tensor), _DDP, "ragged"),
    Fault("loss-of-a-rank", "the loss is that of the first rank", step, "sum_over_ranks",
          _instead(lambda tensor, _: tensor), _DDP),
)
# fmt: on
BY_NAME = MappingProxyType({fault.name: fault for fault in FAULTS})
