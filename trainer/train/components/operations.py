"""Copies of task and model for dry runs, and the count of a model's operations on such a copy."""

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from trainer.data.batch import Batch
from trainer.data.items import state_kept
from trainer.host.limits import read_limits
from trainer.host.processes import resident_bytes
from trainer.models.compiling import uncompiled
from trainer.models.finetune import like
from trainer.models.modes import Uninitialized, begin_training
from trainer.models.parts import Part, called
from trainer.models.pointwise import mend_pointwise
from trainer.observe.flops import Count, Operations
from trainer.tasks import Task

_META, _CPU = torch.device("meta"), torch.device("cpu")
_FEW = 2  # samples: BatchNorm wants more than one


def blank_batch(task: Task, micro_batch_size: int, device: torch.device) -> Batch:
    """Returns a batch of zeros, or of shapes only on the meta device."""
    fields = {
        name: torch.zeros(
            (micro_batch_size, *field.shape),
            dtype=torch.from_numpy(np.empty(0, field.dtype)).dtype,
            device=device,
        )
        for name, field in task.train_data.fields.items()
    }
    uniforms = task.train_data.uniforms + task.uniforms
    uniform = torch.zeros(micro_batch_size, uniforms, device=device) if uniforms else None
    return Batch(fields, None, uniform, micro_batch_size)


def shapes_only(task: Task) -> nn.Module:
    """Makes a new model on the meta device."""
    try:
        with torch.device("meta"), Uninitialized():
            return task.model()
    except Exception:
        # Some models read values of tensors: widths (torchvision's regnet), rates of stochastic depth.
        return task.model().to("meta")


def count_operations(
    task: Task,
    trained: nn.Module,
    micro_batch_size: int,
    device: torch.device,
    parts: Sequence[Part] = (),
) -> Count:
    """Counts the FLOPs of a forward and a backward pass, and finds code that synchronizes with the device.

    For a GPU it counts with shapes only, or over two blank samples on the CPU if the model needs values; for
    a CPU in the other order, as torch's imports for shapes take seconds. The copy isn't compiled. A failure
    isn't an error: a model may not take blank samples, talk to other ranks or lack memory.

    Args:
        task: Gives a new model and, from a copy of itself, the loss.
        trained: The model that is trained.
        micro_batch_size: Samples of a micro-batch.
        device: Device of the training.
        parts: Parts of the model that are counted each.

    Returns:
        FLOPs of a sample, in all and by part (0 if they can't be counted), and the synchronizing code.
    """
    waits = ""
    for where in (_META, _CPU) if device.type == "cuda" else (_CPU, _META):
        count = _count_on(where, task, trained, micro_batch_size, parts)
        waits = waits or count.waits
        if count.per_sample >= 0:
            return replace(count, waits=waits)
    return Count(waits=waits)


def _count_on(
    device: torch.device, task: Task, trained: nn.Module, micro_batch_size: int, parts: Sequence[Part]
) -> Count:
    """Counts on one device: FLOPs of a sample, -1 if they can't be counted there."""
    samples = micro_batch_size if device == _META else min(micro_batch_size, _FEW)
    if device == _CPU and not _has_room_for_another(trained):
        return Count(-1)
    seen = Operations(device)
    try:
        # A fused attention kernel is one operation, for which torch has no formula on a CPU.
        with stand_ins(task, trained, device) as (model, twin), sdpa_kernel(SDPBackend.MATH):
            batch = blank_batch(task, samples, device)
            for part in parts:
                seen.watch(part.name, called(model, part))
            with seen:
                loss = twin.loss(model, batch)
            waits = seen.waits
            with seen:
                loss.backward()
    except Exception:  # user code, which may not expect blank samples
        return Count(-1, seen.waits)
    by_part = {name: flops / samples for name, flops in seen.by_part.items()} if parts else {}
    return Count(seen.flops / samples, waits, by_part)


def never_called(task: Task, trained: nn.Module, names: Sequence[str], device: torch.device) -> list[str]:
    """Names modules whose forward a loss never calls, as of a tied head, whose weights are only read.

    Args:
        task: Gives a new model and, from a copy of itself, the loss of two blank samples.
        trained: The model that is trained; it isn't called.
        names: Names of the modules in question.
        device: Device of the training; for a GPU shapes alone are used.

    Returns:
        Names of those that weren't called; none if the loss can't be computed over blank samples.
    """
    left = dict.fromkeys(names)

    def noted(name: str, forward: Any, *values: Any, **named: Any) -> Any:
        left.pop(name, None)
        return forward(*values, **named)

    where = _META if device.type == "cuda" else _CPU
    try:
        with stand_ins(task, trained, where) as (model, twin), torch.no_grad():
            for name in names:
                module = model.get_submodule(name)
                module.forward = partial(noted, name, module.forward)
            twin.loss(model, blank_batch(task, _FEW, where))
    except Exception:  # user code, which may not expect blank samples
        return []
    return list(left)


@contextmanager
def stand_ins(task: Task, trained: nn.Module, device: torch.device) -> Iterator[tuple[nn.Module, Task]]:
    """Yields a new model of a task, in training mode, and a copy of the task, for dry runs without effects.

    Inside the context nothing is compiled, random states are kept, and warnings are off: they come again in
    training.

    Raises:
        ValueError: If the task gives the same model again. Errors of the task come through, too.
    """
    with uncompiled(), random_state_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = shapes_only(task) if device == _META else task.model().to(device)
        begin_training(model)
        mend_pointwise(model)
        if not {*map(id, model.parameters())}.isdisjoint(map(id, trained.parameters())):
            raise ValueError("the task's model() gives the same model again")
        like(model, trained)
        with _Onto(device):
            twin = _copy(task)
        yield model, twin


@contextmanager
def without_values(task: Task, model: nn.Module) -> Iterator[Task]:
    """Runs operations inside the context on fake tensors: shapes and dtypes without values.

    Unlike meta tensors, fake ones keep autocast and the choice of an attention kernel. Attributes of modules
    are restored afterwards; nothing is compiled.

    Yields:
        A copy of the task, to be called in place of it.
    """
    from torch._subclasses import FakeTensorMode  # here: the import takes a second

    twin = _copy(task)
    kept = [(module, {**vars(module), "_buffers": dict(module._buffers)}) for module in model.modules()]
    try:
        with uncompiled(), random_state_kept(), FakeTensorMode(allow_non_fake_inputs=True):
            yield twin
    finally:
        for module, attributes in kept:
            vars(module).clear()
            vars(module).update(attributes)


def _copy(task: Task) -> Any:
    """Copies a task, except for its data sets."""
    sets = getattr(task, "evaluation_sets", {}).values()
    return _twin(task, {id(data): data for data in (task.train_data, task.evaluation_data, *sets)})


def _has_room_for_another(model: nn.Module) -> bool:
    wanted = 2 * sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return wanted < (read_limits().memory_bytes or math.inf) - resident_bytes()


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Keeps the state of all random generators, on the CPU and on GPUs that are already in use."""
    # CUDA must not be initialized here: its allocator may not have been chosen yet.
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with state_kept(), torch.random.fork_rng(gpus):
        yield


class _Onto(TorchFunctionMode):
    """Mode in which deep copies of tensors are made on a given device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.clone:  # deepcopy of a parameter calls clone
            args = (args[0].to(self._device), *args[1:])
        elif func == torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().to(self._device, copy=True)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def _twin(thing: Any, memo: dict[int, Any]) -> Any:
    """Copies an object so that calls of the copy don't change the original.

    Arrays, which may be large, are shared with the original; so are objects that can't be copied or have a
    `__del__`.

    Args:
        thing: The original.
        memo: Copies made so far, by the originals' `id`.
    """
    if id(thing) in memo:
        return memo[id(thing)]
    kind, twin = type(thing), thing
    if isinstance(thing, torch.Tensor | nn.Module):
        twin = copy.deepcopy(thing, memo)
    elif kind is dict:
        twin = {name: _twin(value, memo) for name, value in thing.items()}
    elif kind in (list, tuple, set):
        twin = kind(_twin(value, memo) for value in thing)
    elif hasattr(thing, "__dict__") and not hasattr(kind, "__del__") and not isinstance(thing, np.ndarray):
        with suppress(TypeError):
            twin = copy.copy(thing)
        if twin is not thing:
            memo[id(thing)] = twin
            vars(twin).update({name: _twin(value, memo) for name, value in vars(thing).items()})
    return twin
