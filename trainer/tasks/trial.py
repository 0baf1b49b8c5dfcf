"""Trials of the user's loss before training: its values, its means, and is all state in a checkpoint?"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from trainer.models.modes import begin_training
from trainer.models.pointwise import mend_pointwise
from trainer.optim.own import HostSchedule
from trainer.rng import Ints
from trainer.tasks.values import Values, bytes_of

_SAME = 1e-4  # relative: float32 rounds, and kernels differ by the size of a batch
_ZERO = 1e-6
_TWICE = 1e-3  # relative
_UNDERFLOW = 8  # times the spacing of numbers, and the smallest one
_LARGER = 2.0**16  # factor of a loss: a power of two, by which no bit of a mantissa changes
_LARGEST_BYTES = 1 << 20  # of an attribute that is compared: larger ones are data
_MARKED = 4096  # elements of a tensor that are compared
_DEEPEST = 2  # depth of nested lists and dicts that are searched
_MOVED = 0.01  # added to weights for a trial with other weights

Read = Callable[[Ints, int], Mapping[str, Values]]  # values by name, of samples with a seed


def beside_others(read: Read, samples: Ints) -> tuple[list[str], list[str]]:
    """Compares values of some samples with those of the first half of them alone.

    Returns:
        Names of the values that draw random numbers, and so aren't compared; and of those that differ.
    """
    whole, again = read(samples, 0), read(samples, 1)
    values = {name: _of_each(one) for name, one in whole.items() if one.values.ndim}
    draws = [
        name
        for name, one in values.items()
        if name not in again or not _same(one, _of_each(again[name]), 0.0)
    ]
    half = len(samples) // 2
    first = read(samples[:half], 0) if half else {}
    return draws, [
        name
        for name, one in values.items()
        if name not in draws and name in first and not _same(one[:half], _of_each(first[name]), _SAME)
    ]


def of_halves(read: Read, samples: Ints, items: Callable[[Ints], int]) -> dict[str, str | None]:
    """Compares means of some samples with the means of two halves, weighed by their items.

    Args:
        read: Returns them, as values ().
        samples: Samples for the trial.
        items: Returns how many items samples have.

    Returns:
        By name what is to be told of it; None if it is a sum: twice as much for the samples twice.
    """

    def figures(some: Ints, seed: int = 0) -> dict[str, float]:
        return {n: float(one.values.detach()) for n, one in read(some, seed).items() if not one.values.ndim}

    whole, again, twice = figures(samples), figures(samples, 1), figures(np.tile(samples, 2))
    halves = [half for half in np.array_split(samples, 2) if len(half)]
    each, weights = [figures(half) for half in halves], [items(half) for half in halves]
    found = dict[str, str | None]()
    for name, mean in whole.items():
        parts = [one[name] for one in each]
        if mean != again[name]:
            found[name] = "is random: not tried"
        elif math.isfinite(mean) and not all(map(math.isfinite, parts)):
            found[name] = "isn't finite for a micro-batch without any item that counts"
        elif abs(mean) > _ZERO and abs(twice[name] / mean - 2) < _TWICE:
            found[name] = None
        else:
            weighed = sum(p * w for p, w in zip(parts, weights, strict=True)) / max(1, sum(weights))
            equal = abs(weighed - mean) <= _SAME * abs(mean) + _ZERO
            apart = abs(weighed - mean) / max(abs(mean), _ZERO)
            depends = f"depends on the micro-batch by {100 * apart:.2g} %"
            found[name] = "is equal: exact for any micro-batch" if equal else depends
    return found


def _of_each(one: Values) -> torch.Tensor:
    """Returns the sum of each sample's values, float64, and beside it that of its counts."""
    values = one.values.detach()
    values = torch.view_as_real(values) if values.is_complex() else values.double()
    counts = torch.ones_like(values) if one.counts is None else one.counts.double()
    counted = torch.where(counts != 0, values * counts, 0.0).double()
    return torch.stack([part.reshape(len(part), -1).sum(1) for part in (counted, counts)], 1)


def _same(one: torch.Tensor, other: torch.Tensor, relative: float) -> bool:
    return torch.allclose(one, other, rtol=relative, atol=_ZERO * (relative > 0), equal_nan=True)


class UnsavedState(NamedTuple):
    """State that training changes or depends on, and that no checkpoint holds; and odd gradients.

    Attributes:
        buffers: Names of non-persistent buffers that change with each training forward pass.
        differs: The first result that differs in a repetition from the same state; "" if none does.
        attributes: Names of plain attributes, numbers or tensors, and of tensors in modules and optimizers
            outside of the model, that change with each forward pass.
        sparse: Names of parameters whose gradients are sparse.
        disproportionate: Names of parameters whose gradients aren't proportional to the loss.
    """

    buffers: list[str]
    differs: str
    attributes: list[str]
    sparse: list[str]
    disproportionate: list[str]


def outside_of_checkpoint(model: nn.Module, loss: Callable[[], torch.Tensor], owner: object) -> UnsavedState:
    """Trains on the same samples twice, from the same state_dict and random numbers, as after a resume.

    It runs on one thread, so that the bits repeat. A cache that is filled once, or state that each forward
    pass overwrites, is equal after both passes. Two more passes with other weights find state outside of the
    model that follows its weights, also if it was copied from them in the first pass.

    The second pass is for a larger loss: its gradients, divided by as much, have the same bits unless a hook
    or a Function of the user does what isn't linear, such as clipping. Then a third pass tells which it is.

    Args:
        model: The model; its state_dict is restored afterwards.
        loss: Computes the loss of some samples, float ().
        owner: The task, whose attributes are compared, too.
    """
    kept = {name: value.detach().clone() for name, value in _tensors(model).items()}
    try:
        with _repeatable(model):
            (results, state, attributes), again = (
                _trained(model, kept, loss, owner, factor) for factor in (1.0, _LARGER)
            )
            odd = list[str]()
            if again[0] != results:
                gradients = {name: p.grad for name, p in model.named_parameters()}
                again = _trained(model, kept, loss, owner)
                odd = [name for name, p in model.named_parameters() if _is_apart(gradients[name], p.grad)]
            sparse = [n for n, p in model.named_parameters() if p.grad is not None and p.grad.is_sparse]
            followed, further = _followed(model, kept, loss, owner)
    finally:
        _put_back(model, kept)
        model.zero_grad(set_to_none=True)
    differing = [name for name, digest in results.items() if again[0].get(name) != digest]
    changed = [name for name, digest in state.items() if again[1].get(name) != digest]
    saved = _tensors(model)
    differing += [f"the buffer '{name}'" for name in changed if name in saved]
    pairs = ((attributes, again[2]), (followed, further))
    moving = [name for one, other in pairs for name, digest in one.items() if other.get(name) != digest]
    return UnsavedState(
        [name for name in changed if name not in saved],
        differing[0] if differing else "",
        list(dict.fromkeys(moving)),
        sparse,
        [name for name in odd if f"the gradient of {name}" not in differing],
    )


def _is_apart(scaled: torch.Tensor | None, gradient: torch.Tensor | None) -> bool:
    """True if a gradient for a larger loss differs by more than an underflow, and without an overflow."""
    if scaled is None or gradient is None or gradient.element_size() == 1:
        return False
    one, other = (part.to_dense().to(torch.complex128) for part in (scaled, gradient))
    distance, numbers = float((one - other).norm()), torch.finfo(gradient.dtype)
    return _UNDERFLOW * (numbers.eps * float(other.norm()) + numbers.tiny) < distance < math.inf


def resumes_alike(
    model: nn.Module, make: Callable[[], HostSchedule], update: Callable[[HostSchedule], None]
) -> bool:
    """True if a new optimizer and scheduler, after loading the saved state, make the same second update.

    Args:
        model: The model; it is trained.
        make: Creates the optimizer and its learning rates for the model.
        update: Makes one update.

    Raises:
        ValueError: If their state has a type that no checkpoint can hold.
    """
    with _repeatable(model):
        rates = make()
        torch.default_generator.manual_seed(0)
        update(rates)
        weights = {name: value.detach().clone() for name, value in _tensors(model).items()}
        tensors, plain = rates.kept()
        tensors = {name: value.detach().clone() for name, value in tensors.items()}
        plain, updates = json.loads(json.dumps(plain)), rates.updates.clone()
        torch.default_generator.manual_seed(1)
        update(rates)
        wanted = _after(model, rates)
        again = make()
        _put_back(model, weights)
        again.load(tensors, plain)
        again.updates.copy_(updates)
        again.look_up()
        torch.default_generator.manual_seed(1)
        update(again)
        return _after(model, again) == wanted


@contextmanager
def _repeatable(model: nn.Module) -> Iterator[None]:
    """A context that trains a model on one thread, so that the bits repeat."""
    begin_training(model)
    mend_pointwise(model)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _after(model: nn.Module, rates: HostSchedule) -> tuple[Any, Any]:
    tensors, plain = rates.kept()
    return {name: _digest(value) for name, value in {**_tensors(model), **tensors}.items()}, plain


_Digests = dict[str, bytes]


def _followed(
    model: nn.Module, kept: Mapping[str, torch.Tensor], loss: Callable[[], torch.Tensor], owner: object
) -> tuple[_Digests, _Digests]:
    """Returns digests of state outside of the model after each of two passes with other weights."""
    if not _learned(model, owner):
        return {}, {}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    moved = {name: value + _MOVED if name in trained else value for name, value in kept.items()}
    try:
        first, second = (_trained(model, moved, loss, owner)[2] for _ in range(2))
    except Exception:  # a loss may fail with such weights
        return {}, {}
    return first, second


def _trained(
    model: nn.Module,
    kept: Mapping[str, torch.Tensor],
    loss: Callable[[], torch.Tensor],
    owner: object,
    factor: float = 1.0,
) -> tuple[_Digests, _Digests, _Digests]:
    """Returns digests of loss and gradients, and of buffers and plain attributes after a backward pass.

    The gradients are those of the loss times a factor, divided by it.
    """
    _put_back(model, kept)
    model.zero_grad(set_to_none=True)
    torch.default_generator.manual_seed(0)
    value = loss()
    (value * factor).backward()
    for p in model.parameters():
        if p.grad is not None and p.grad.element_size() > 1:  # types of 8 bits have no arithmetic
            p.grad.div_(factor)
    results = {"the loss": _digest(value)}
    results |= {f"the gradient of {name}": _digest(p.grad) for name, p in model.named_parameters()}
    buffers = {name: _digest(buffer) for name, buffer in model.named_buffers()}
    attributes = _learned(model, owner)
    for name, thing in _owners(model, owner):
        attributes |= _attributes(name, thing)
    return results, buffers, attributes


def _owners(model: nn.Module, owner: object) -> Iterator[tuple[str, object]]:
    yield "self", owner
    for name, module in model.named_modules():
        yield f"model.{name}" if name else "model", module


def _attributes(owner: str, thing: object) -> _Digests:
    kinds = (int, float, np.generic, np.ndarray, torch.Tensor)
    plain = {
        name: value for name, value in getattr(thing, "__dict__", {}).items() if isinstance(value, kinds)
    }
    return {
        f"{owner}.{name}": _digest(value)
        for name, value in plain.items()
        if getattr(value, "nbytes", 0) <= _LARGEST_BYTES
    }


def _learned(model: nn.Module, owner: object) -> _Digests:
    """Returns digests of modules and optimizers that the task or model keeps outside of the model.

    Lists and dicts are searched, and tensors in them count, such as a moving average.
    """
    inside = {id(one) for one in (*model.modules(), *model.parameters(), *model.buffers())}
    digests = _Digests()
    for name, thing in _owners(model, owner):
        for key, value in getattr(thing, "__dict__", {}).items():
            if key not in _OF_MODULES:
                digests |= {n: _digest(t) for n, t in _inner(f"{name}.{key}", value, inside, _DEEPEST)}
    return digests


_OF_MODULES = vars(nn.Module()).keys()


def _inner(name: str, value: object, inside: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in a module, an optimizer, or nested lists and dicts, by name."""
    if id(value) in inside:
        return
    if isinstance(value, nn.Module):
        yield from ((f"{name}.{key}", tensor) for key, tensor in _tensors(value).items())
    elif isinstance(value, torch.optim.Optimizer):
        for number, state in enumerate(value.state.values()):
            tensors = {key: one for key, one in state.items() if isinstance(one, torch.Tensor)}
            yield from ((f"{name}.state[{number}].{key}", tensor) for key, tensor in tensors.items())
    elif isinstance(value, dict | list | tuple) and depth:
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(one, torch.Tensor):
                yield from [(f"{name}[{key!r}]", one)] * (one.nbytes <= _LARGEST_BYTES)
            else:
                yield from _inner(f"{name}[{key!r}]", one, inside, depth - 1)


def _digest(value: Any) -> bytes:
    value = bytes_of(value) if isinstance(value, torch.Tensor) else value
    data = value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
    return hashlib.sha256(data).digest()


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def size_of_weights(model: nn.Module) -> str:
    """Returns the sum of the absolute values of a model's tensors, with 9 digits."""
    total = 0.0
    for tensor in _tensors(model).values():
        if tensor.is_floating_point() and not (nn.parameter.is_lazy(tensor) or tensor.is_meta):
            # .to() first: types of 8 bits aren't promoted to another one.
            wide = tensor.detach().to(torch.float64) if tensor.element_size() == 1 else tensor.detach()
            total += float(torch.linalg.vector_norm(wide, 1, dtype=torch.float64))
    return f"{total:.9g}"


def _put_back(model: nn.Module, kept: Mapping[str, torch.Tensor]) -> None:
    """Restores a model's tensors in place, as a checkpoint does."""
    with torch.no_grad():
        for name, value in _tensors(model).items():
            if name in kept and value.shape == kept[name].shape:
                value.copy_(kept[name])


class Memory(NamedTuple):
    """Memory of a model's tensors, noted without keeping the model.

    Attributes:
        storages: Weak references: while one is there, no other storage has its number.
        foreign: Storages of arrays and mapped files, which several may share; kept, so that no other array
            is put into the same place.
    """

    storages: list[StorageWeakRef]
    foreign: list[torch.UntypedStorage]

    def shared(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Returns the tensors of another model that lie in this memory, wholly or in part, by name."""
        known = {one.cdata for one in self.storages}
        places = [(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in self.foreign]

        def is_known(one: torch.UntypedStorage) -> bool:
            begin = one.data_ptr()
            return one._cdata in known or any(begin < e and b < begin + one.nbytes() for b, e in places)

        return {name: tensor for name, tensor, storage in _storages(model) if is_known(storage)}


def memory_of(model: nn.Module) -> Memory:
    """Returns the memory of a model's parameters and buffers."""
    storages = [storage for _, _, storage in _storages(model)]
    foreign = [one for one in storages if not one.resizable() and one.device.type == "cpu"]
    return Memory([*map(StorageWeakRef, storages)], foreign)


def _storages(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.UntypedStorage]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        with suppress(NotImplementedError, RuntimeError, ValueError):  # lazy and sparse ones
            yield name, tensor, tensor.untyped_storage()


def moving(tensors: Mapping[str, torch.Tensor], act: Callable[[], object]) -> list[str]:
    """Returns the names of tensors that a function changes; small ones have their values back afterwards.

    Args:
        tensors: The tensors by name. Of a large one some of the elements are compared.
        act: The function.
    """
    kept = {name: value.detach().clone() for name, value in tensors.items() if value.nbytes <= _LARGEST_BYTES}
    before = {name: _mark(value) for name, value in tensors.items()}
    act()
    moved = [name for name, mark in before.items() if _mark(tensors[name]) != mark]
    with torch.no_grad():
        for name in kept.keys() & {*moved}:
            tensors[name].copy_(kept[name])
    return moved


def _mark(value: torch.Tensor) -> tuple[int, bytes]:
    some = value.detach().flatten()[:: max(1, value.numel() // _MARKED)]
    return (0 if value.is_inference() else value._version), _digest(some)


class Snapshot(NamedTuple):
    """State of a model, to compare with its state after a forward pass.

    Attributes:
        parameters: Parameters by name, each with its version counter.
        buffers: SHA-256 of buffers, by name.
        stored: Names of the tensors that a checkpoint holds.
    """

    parameters: dict[str, tuple[nn.Parameter, int]]
    buffers: dict[str, bytes]
    stored: frozenset[str]

    def changed(self, model: nn.Module) -> list[str]:
        """Returns the names of parameters and buffers that have changed."""
        now = snapshot(model)
        moved = [
            name
            for name, (parameter, version) in self.parameters.items()
            if name not in now.parameters
            or now.parameters[name][0] is not parameter
            or now.parameters[name][1] != version
        ]
        return moved + [name for name, digest in self.buffers.items() if now.buffers.get(name) != digest]

    def added_or_removed(self, model: nn.Module) -> str:
        """Returns the name of a tensor that a checkpoint would hold only now, or only before; "" if none."""
        return min(self.stored ^ snapshot(model).stored, default="")


def snapshot(model: nn.Module) -> Snapshot:
    """Returns the model's state now."""
    parameters = {name: (parameter, parameter._version) for name, parameter in model.named_parameters()}
    buffers = {n: _digest(one) for n, one in model.named_buffers() if not nn.parameter.is_lazy(one)}
    return Snapshot(parameters, buffers, frozenset({**_tensors(model), **parameters}))
