"""Trains a few steps of a task as the trainer does, with a snapshot after each."""

import contextlib
import copy
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.checkpoint import CHECKPOINTS
from trainer.checkpoint.background import BackgroundWriter
from trainer.commands.check import plain
from trainer.commands.check.plain import StepTensors
from trainer.config.recipe import Recipe
from trainer.config.section import validated
from trainer.data.dataset import ArrayDataset
from trainer.data.sampling.plan import Plan
from trainer.distributed.parallel import World
from trainer.errors import BadInputError
from trainer.models.precision import scale_of
from trainer.observe.console import warn
from trainer.observe.log import MetricLogger
from trainer.tasks import Task
from trainer.tasks.custom import CustomTask
from trainer.train.anomaly import AnomalyLog
from trainer.train.components.checkpoint_choice import load_checkpoint, newest_checkpoint
from trainer.train.components.run import build
from trainer.train.components.task import make_plan, make_task, refuse_padding
from trainer.train.loop import train
from trainer.train.outputs import Outputs
from trainer.train.saving import Checkpoints
from trainer.train.state import Run, gather_tensors, tensors_of
from trainer.train.step import take_metrics

STEPS, BATCH, SAMPLES = 5, 8, 20  # so that an epoch ends within a step
_TRIED = 4

Edits = Mapping[str, Any]

# What a check changes of any recipe: a few small steps on one CPU thread, one micro-batch in each.
_SMALL: Edits = {
    "device": "cpu",
    "max_steps": STEPS,
    "epochs": STEPS,
    "data.global_batch_size": BATCH,
    "data.micro_batch_size": BATCH,
    "data.workers": "auto",
    "data.check": "none",
    "precision": {},
    "model.frozen_dtype": "fp32",  # as it needs precision.mode=bf16
    "model.lora.dropout": 0.0,
    "compile": {},
    "memory": {},
    "log": {"every": 1},
    "checkpoint": {"minutes": 0},
    "parallel": {"threads": 1, "timeout_s": 60},
    "hooks": {"enabled": False},
    "evaluation.every": "end",
    "evaluation.patience": 0,
    "evaluation.sets": {},
    "evaluation.decides": "data",
}


@dataclass(frozen=True)
class Subject:
    """The task to check.

    Attributes:
        name: The recipe's or file's name, as typed.
        recipe: The recipe, cut to a few small steps.
        task: The task, its data cut to a few samples; in float64 if it can be.
        double: Whether it is in float64.
        why: The reason if it isn't.
        narrow: The task in float32.
        plan: Order of all samples of the task.
    """

    name: str
    recipe: Recipe
    task: Any
    double: bool
    why: str
    narrow: Any
    plan: Plan

    def single(self, why: str = "") -> "Subject":
        """Returns the subject in float32, which autocast needs; `why`: why it can't be in float64."""
        return replace(self, task=self.narrow, double=False, why=why or self.why)

    def pretend(self) -> contextlib.AbstractContextManager[object]:
        """Returns the context in which code of the task computes, outside of its methods too."""
        return _doubled() if self.double else contextlib.nullcontext()

    @property
    def eps(self) -> float:
        """Machine epsilon of the precision."""
        return float(torch.finfo(torch.float64 if self.double else torch.float32).eps)


def open_subject(name: str, recipe: Recipe, task: Task | None = None, double: bool | None = None) -> Subject:
    """Makes a subject of a recipe and its task.

    Args:
        double: Whether it is to be in float64; None: if it can be.
    """
    small = changed(recipe, _SMALL)
    if small.optim.warmup_steps >= 1:  # else the rate would be next to nothing in all of the steps
        small = changed(small, {"optim.warmup_steps": min(2, small.optim.warmup_steps)})
    whole = make_task(small) if task is None else task
    cut = _cut(whole)
    if not _wants_all(cut):
        small = changed(small, {"data.eval_batch_size": min(BATCH, small.data.eval_batch_size)})
    why = _not_in_double(cut) if double is None else ""
    double = not why if double is None else double
    plan = make_plan(small, whole)
    return Subject(name, small, _in_double(cut) if double else cut, double, why, cut, plan)


class Training(NamedTuple):
    """A training of a few steps.

    Attributes:
        steps: Tensors after each step; empty for the steps before a resumed one.
        did: Numbers of what happened, by name: module calls, loader workers, ranks, the first step.
    """

    steps: list[StepTensors]
    did: Mapping[str, int]


def changed(recipe: Recipe, edits: Edits) -> Recipe:
    """Returns a recipe with other values for some keys; sections are replaced whole."""
    values = recipe.model_dump()
    for name, value in edits.items():
        *parts, key = name.split(".")
        reduce(dict.__getitem__, parts, values)[key] = value
    return validated(Recipe, values, "check")


def train_steps(
    subject: Subject,
    edits: Edits,
    world: World,
    folder: Path | None = None,
    stop_after: int | None = None,
    workers: int = 0,
) -> Training:
    """Trains, and returns a snapshot after each step.

    Args:
        folder: Run folder, for the checkpoint of `stop_after` or the one to resume from.
        workers: Loader workers for `data.workers=auto`.

    Raises:
        BadInputError: If the trainer refuses it.
    """
    recipe = changed(subject.recipe, edits)
    torch.set_num_threads(int(recipe.parallel.threads))
    rows, seen = list[Mapping[str, Any]](), dict[int, StepTensors]()
    did = {"calls": 0, "workers": 0, "ranks": world.size, "begun": 0}
    children = len(multiprocessing.active_children())
    with contextlib.ExitStack() as stack:
        if recipe.compile.mode != "none":
            # Compiled for float64, torch's fused attention on a CPU takes the row sums that it keeps for
            # float32, and its backward pass fails (seen with torch 2.9.1).
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            from torch._inductor import config  # slow to import

            # Compiled code has random numbers of its own: dropout would differ from the plain loop's.
            stack.enter_context(config.patch(fallback_random=True))
        run = build(recipe, subject.task, world, workers)
        stack.callback(run.close)
        refuse_padding(run.plan, subject.task, run.state.model)
        if recipe.compile.mode != "none" and not run.compiled:
            raise BadInputError(next(note for note in run.notes if note.startswith("compile.mode")))
        if recipe.compile.mode == "none":

            def called(*_: Any) -> None:
                did["calls"] += 1

            stack.callback(register_module_forward_pre_hook(called).remove)
            if world.size == 1:  # activation checkpointing repeats forward passes there
                backward = run.precision.backward

                def pretending(loss: torch.Tensor) -> torch.Tensor:
                    with subject.pretend():
                        return backward(loss)

                setattr(run.precision, "backward", pretending)  # noqa: B010
        writer = None
        if folder is not None and stop_after is None:
            load_checkpoint(run, newest_checkpoint(folder, "auto", world)[0])
        elif folder is not None:
            writer = BackgroundWriter(folder / CHECKPOINTS, 2, warn)
            stack.callback(writer.abandon)
        before = run.state.metrics

        def look(done: int) -> None:
            nonlocal before
            metrics = {} if run.state.metrics is before else run.state.metrics
            before = run.state.metrics
            measured_now = {f"metric/{n}": torch.tensor(v, dtype=torch.float64) for n, v in metrics.items()}
            seen[done] = {**_state(run), **measured_now}
            did["workers"] = max(did["workers"], len(multiprocessing.active_children()) - children)

        logger = MetricLogger(
            run.plan,
            world.device,
            [rows.append],
            partial(take_metrics, run),
            logged=run.state.logged,
            refuse=None if run.still is None else run.still.refuse,
        )
        checkpoints = Checkpoints(run, writer)
        train(run, Outputs(logger, checkpoints, AnomalyLog(None, run.plan), (look,)), stop_after=stop_after)
        checkpoints.close()
        logger.deliver()
    for row in rows:
        if row["kind"] == "train":
            figures = {
                n: v for n, v in row.items() if n in ("loss", "lr") or n.startswith(("loss/", "watched/"))
            }
            numbers = {n: torch.tensor(float(v), dtype=torch.float64) for n, v in figures.items()}
            seen[row["step"]] = {**numbers, **seen[row["step"]]}
    did["begun"] = min(seen) - 1
    return Training([seen.get(step, {}) for step in range(1, max(seen) + 1)], did)


def _state(run: Run) -> StepTensors:
    """Returns weights, buffers, optimizer state and average, unsharded, on the first rank; collective."""
    state = run.state
    tensors = {kind: dict(gather_tensors(state, kind, group)) for kind, group in tensors_of(state).items()}
    names = {id(p): name for name, p in state.model.named_parameters()}
    if state.rows is None:  # a task's own optimizer is kept otherwise
        tensors["optimizer"] = {
            f"{names[id(p)]}/{slot}": value
            for p, slots in state.optimizer.state.items()
            for slot, value in slots.items()
            if isinstance(value, torch.Tensor)
        }
    ours = {n for n in tensors["optimizer"] if n == "updates" or n.startswith(("ema/", "scaler/"))}
    tensors["optimizer"] = {n: t for n, t in tensors["optimizer"].items() if n not in ours}
    updates = {"updates": state.lr.updates[0].clone()}
    if state.scaler is not None:
        updates["scale"] = scale_of(state.scaler).clone()
    return updates | {
        f"{kind}/{name}": value.detach().clone()
        for kind, group in tensors.items()
        for name, value in group.items()
    }


# --- in float64 ---


class _InDouble:
    """Mixin before a task's class: computes in float64, and widens results that the task makes as float32."""

    def model(self) -> nn.Module:
        model: nn.Module = super().model()  # type: ignore[misc]
        return _widened(model)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        with _doubled():
            return super().loss(model, _wide(batch))  # type: ignore[misc]

    def measure(self, model: nn.Module, batch: Any) -> Any:
        with _doubled():
            return super().measure(model, _wide(batch))  # type: ignore[misc]


class _ValuesInDouble(_InDouble):
    """The same of a custom task."""

    def parts(self, model: nn.Module, batch: Any) -> Any:
        with _doubled():
            return super().parts(model, _wide(batch))  # type: ignore[misc]

    def given_loss(self, model: nn.Module, batch: Any) -> Any:
        with _doubled():
            return super().given_loss(model, _wide(batch))  # type: ignore[misc]

    def given_measure(self, model: nn.Module, batch: Any) -> Any:
        with _doubled():
            return super().given_measure(model, _wide(batch))  # type: ignore[misc]


def _widened(model: nn.Module) -> nn.Module:
    """Converts a model to float64; unlike `.double()`, tensors that share memory still share it."""
    found = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    if any(tensor.is_meta for tensor in found):
        return model.double()
    wide = dict[tuple[int, torch.dtype], torch.Tensor]()
    for tensor in found:
        memory = tensor.untyped_storage()
        if (key := (memory._cdata, tensor.dtype)) not in wide:
            wide[key] = torch.empty(0, dtype=tensor.dtype).set_(memory).double()
    for tensor, key in [(t, (t.untyped_storage()._cdata, t.dtype)) for t in found]:
        tensor.data = wide[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return model


def _in_double(task: Any) -> Any:
    wide = copy.copy(task)
    mixin = _ValuesInDouble if hasattr(task, "given_loss") else _InDouble
    wide.__class__ = type("InDouble", (mixin, type(task)), {})
    return wide


def _wide(batch: Any) -> Any:
    fields = {n: t.double() if t.is_floating_point() else t for n, t in batch.fields.items()}
    return replace(batch, fields=fields, uniform=None if batch.uniform is None else batch.uniform.double())


class _Doubled(TorchFunctionMode):
    """Context manager that gives float64 to code that asks torch for float32."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.backward:  # calls the user's code, and the mode is off in a function
            with self:
                return _backward(*args, **(kwargs or {}))
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if one is torch.float32 else one for one in args)
        given = {n: torch.float64 if one is torch.float32 else one for n, one in (kwargs or {}).items()}
        return func(*args, **given)


def _backward(
    loss: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Does what `torch.Tensor.backward` does, by a function that no mode is asked about."""
    torch.autograd.backward(loss, gradient, retain_graph, create_graph, inputs=inputs)


@contextlib.contextmanager
def _doubled() -> Iterator[None]:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Doubled():
            yield
    finally:
        torch.set_default_dtype(usual)


class _Narrow(TorchDispatchMode):
    """Context manager that notes the first operation whose result has less than float64.

    What is made of such tensors alone comes from constants, whose bits are the same in both loops.
    """

    first = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        fresh = func.overloadpacket is torch.ops.aten.lift_fresh  # of an array, which may be of the batch
        if self.first or (given and not fresh and all(map(_narrow, given))):
            return result
        for one in filter(_narrow, tree_leaves(result)):
            self.first = f"{func.overloadpacket} gives {str(one.dtype).removeprefix('torch.')}"
        return result


def _narrow(one: object) -> bool:
    return isinstance(one, torch.Tensor) and one.is_floating_point() and one.dtype != torch.float64


def _not_in_double(task: Any) -> str:
    """Returns why a task can't compute in float64, or ""."""
    wide, few = _in_double(task), np.arange(min(_TRIED, len(task.train_data)))
    try:
        model, seen = wide.model().train(), _Narrow()  # type: ignore[no-untyped-call]
        batch = plain.plain_samples(task.train_data, np.zeros_like(few), few, 0, task.uniforms)
        with torch.random.fork_rng(devices=[]), seen:
            plain.losses(wide, model, batch)[0]["loss"].backward()
    except Exception as error:  # somebody's code
        return f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0][:120]}"
    return seen.first


# --- few samples ---


class _First:
    """The first samples of a data set."""

    def __init__(self, data: Any, count: int) -> None:
        self._data, self._count = data, count

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._data, name)

    def __len__(self) -> int:
        return self._count

    @property
    def labels(self) -> Any:
        labels = getattr(self._data, "labels", None)
        return None if labels is None else labels[: self._count]


def _cut(task: Any) -> Any:
    """Copies a task with fewer samples."""
    cut = copy.copy(task)
    cut.train_data = _few(task.train_data)
    if not _wants_all(task):
        cut.evaluation_data = _few(task.evaluation_data)
    if hasattr(task, "evaluation_sets"):
        cut.evaluation_sets = {}
    return cut


def _wants_all(task: Any) -> bool:
    """Returns True if a user's `summarize` may compare its records with the whole data set."""
    return isinstance(task, CustomTask) and hasattr(task, "summarize")


def _few(data: Any) -> Any:
    """Returns the first samples; all of them where the sample order depends on buckets or files."""
    ordered = bool(getattr(data, "buckets", None)) or getattr(data, "records", None) is not None
    if len(data) <= SAMPLES or ordered:
        return data
    if data.arrays is not None:
        return ArrayDataset({name: array[:SAMPLES] for name, array in data.arrays.items()})
    return _First(data, SAMPLES)
