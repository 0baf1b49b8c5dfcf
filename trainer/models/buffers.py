"""Buffers and frozen parameters that a training forward pass changes: one update per step, as BatchNorm's.

Examples are a running mean, spectral norm's vectors, InstanceNorm's statistics, a teacher's parameters. Each
micro-batch of a step starts from the same values. Floating-point and complex tensors become the mean of the
new values of the micro-batches that changed them; integers move by the rounded mean of the changes, so a
counter counts steps. Tensors that all micro-batches change alike, such as a teacher that follows its student,
need no mean and aren't sent to other ranks.

The other buffers and frozen parameters are compared before and after each forward pass of some steps. Two
rows of metrics can't be compared instead: between them a hook of the optimizer may rightly move a target
network. Nor can the whole step: a hook of the backward pass may keep statistics of gradients. Trained
parameters, which each update moves, aren't compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import distributed as dist, nn

from trainer.distributed.parallel import sum_over_ranks
from trainer.errors import BadInputError

_NAMES = 5
_APART = 127  # steps: at most 1 % of the time; a prime, so that what moves at every 100th call is met, too
_WHOLE = 8 << 20  # bytes; with 64 MiB it took 3 % of the time on a CPU
_SAMPLE = 64 << 10  # bytes
_WORD = 8  # bytes


@dataclass(frozen=True)
class FoundBuffers:
    """Buffers and frozen parameters that a trial of the forward pass changed.

    Attributes:
        changing: Names of the changed tensors.
        notes: Lines for the user.
        alike: Names of tensors whose change doesn't depend on the samples.
        still: Names of the other buffers and frozen parameters, where a step has several micro-batches.
    """

    changing: Sequence[str] = ()
    notes: Sequence[str] = ()
    alike: Sequence[str] = ()
    still: Sequence[str] = ()


def few(names: list[str]) -> str:
    """Lists the first few names of tensors, for messages."""
    more = f", … ({len(names)} tensors)" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more


class TensorSlot(NamedTuple):
    """Position of a tensor in a model.

    Attributes:
        module: Module that owns the tensor.
        key: Name in the module.
        tensors: The module's dict of buffers or of parameters.
    """

    module: nn.Module
    key: str
    tensors: dict[str, torch.Tensor | None]


class ChangingBuffers:
    """Named buffers and frozen parameters of a model.

    Attributes:
        size: Length of a micro-batch's vector: the values, and for each tensor a flag if it was changed.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], alike: Sequence[str] = ()) -> None:
        """Starts from the values that are in the model now.

        Args:
            model: Model with the tensors.
            names: Names of the tensors.
            alike: Names of those that all micro-batches change alike.
        """
        self._names = names
        self._slots = [tensor_slot(model, name) for name in names]
        self._buffers = [_tensor(slot) for slot in self._slots]
        self._alike = [name in alike for name in names]
        self._made: dict[int, torch.Tensor] = {}
        self._sizes = [
            0 if alike else buffer.numel() * (1 + buffer.is_complex())
            for buffer, alike in zip(self._buffers, self._alike, strict=True)
        ]
        self.size = sum(self._sizes) + len(self._sizes)
        self.reload()

    def reload(self) -> None:
        """Starts from the values that are in the model now."""
        self._kept = [buffer.detach().clone() for buffer in self._buffers]

    def of_micro_batch(self) -> torch.Tensor:
        """Returns the values after the last forward pass, float64 (size,).

        Raises:
            BadInputError: If the shape of a tensor has changed.
        """
        values, flags = [], []
        for number, (name, slot, kept) in enumerate(zip(self._names, self._slots, self._kept, strict=True)):
            now = slot.tensors[slot.key]
            if now is None or now.shape != kept.shape:
                raise BadInputError(
                    f"the forward pass gave the model's buffer '{name}' another shape than "
                    f"{list(kept.shape)}, with which it began: no mean over micro-batches can be made of it; "
                    "keep its shape, or keep it in a plain attribute"
                )
            changed = (now != kept).any()
            flags.append(changed.double().view(1))
            if self._alike[number]:
                if number not in self._made:
                    self._made[number] = now.detach().clone()
                continue
            value = _reals(now.detach())
            if not is_mean(kept):
                value = value - _reals(kept)
            values.append(torch.where(changed, value, 0.0))
        return torch.cat([*values, *flags])

    @torch.no_grad()
    def restore(self) -> None:
        """Restores the values from before the step."""
        for slot, buffer, kept in zip(self._slots, self._buffers, self._kept, strict=True):
            slot.tensors[slot.key] = buffer  # the forward pass may have replaced the tensor
            buffer.copy_(kept)

    def update(self, total: torch.Tensor, skipped: torch.Tensor | None) -> None:
        """Sets the new values from the sum over a step's micro-batches, float64 (size,)."""
        *sums, counts = total.split([*self._sizes, len(self._sizes)])
        for number, (kept, added, count) in enumerate(zip(self._kept, sums, counts.unbind(), strict=True)):
            mean = added / count.clamp(min=1)
            if self._alike[number]:
                new = self._made[number]
            elif kept.is_complex():
                new = torch.view_as_complex(mean.view(*kept.shape, 2))
            else:
                new = (mean if is_mean(kept) else _reals(kept) + mean.round()).view(kept.shape)
            changed = count > 0 if skipped is None else (count > 0) & (skipped == 0)
            self._kept[number] = torch.where(changed, new.to(kept.dtype), kept)
        self._made.clear()
        self.restore()


class StillTensors:
    """Buffers and frozen parameters that no training forward pass is to change, compared on the device."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        """Takes the tensors of a model by name."""
        slots = {name: tensor_slot(model, name) for name in names}
        self._slots = {name: at for name, at in slots.items() if _is_plain(_tensor(at))}
        self._shapes = {name: _tensor(at).shape for name, at in self._slots.items()}
        self._strides, room = dict[str, int](), _WHOLE
        for name, at in sorted(self._slots.items(), key=lambda one: _tensor(one[1]).nbytes):
            tensor = _tensor(at)
            room -= tensor.nbytes
            most = _SAMPLE // tensor.element_size()
            self._strides[name] = 1 if room >= 0 else -(-tensor.numel() // most)
        parts = [part.numel() for part in self._parts()]
        device = next((_tensor(at).device for at in self._slots.values()), None)
        self._ends = torch.tensor(parts, dtype=torch.int64).cumsum(0).to(device)
        # Flags: a forward pass changed none of them; it changed this one.
        self._moved = torch.zeros(1 + len(parts), device=device)

    def due(self, step: int) -> bool:
        """True if the forward passes of a step are to be compared."""
        return not step % _APART and bool(self._slots)

    def _parts(self) -> list[torch.Tensor]:
        """Returns the bits that are compared, int64 (n,) each: all, or those at fixed places."""
        parts = []
        for name, at in self._slots.items():
            tensor = at.tensors[at.key]
            if tensor is None or tensor.shape != self._shapes[name]:
                raise BadInputError(_changed(name))
            some = tensor.detach().reshape(-1)[:: self._strides[name]].contiguous().view(torch.uint8)
            if len(some) % _WORD or some.storage_offset() % _WORD:
                some = nn.functional.pad(some, (0, -len(some) % _WORD))
            parts.append(some.view(torch.int64))
        return parts

    def look(self) -> None:
        """Keeps the bits before a forward pass, for `compare`."""
        self._before = torch.cat(self._parts())

    def compare(self) -> None:
        """Notes, without a synchronization, the first tensor that a forward pass has changed."""
        differ = (torch.cat(self._parts()) != self._before).view(torch.uint8)
        del self._before
        at = differ.argmax().view(1)
        number = (1 + torch.searchsorted(self._ends, at, right=True)) * differ.take(at)
        self._moved.index_fill_(0, number, 1.0)

    def first_moved(self, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Returns the number of the first tensor that moved on any rank, from 1; 0: none did; collective."""
        moved = sum_over_ranks(self._moved.clone(), group)
        moved[0] = 0.0
        return moved.clamp(max=1.0).argmax()

    def refuse(self, number: int) -> None:
        """Ends the run for a tensor that moved; `number`: as of `first_moved`."""
        raise BadInputError(_changed([*self._slots][number - 1]))


def _is_plain(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
    return plain and tensor.numel() > 0


def _changed(name: str) -> str:
    return (
        f"a training forward pass changed the model's '{name}', which two steps that were tried before "
        "training left alone: each of a step's micro-batches would change it further, and each rank its own; "
        "let the forward pass change it from the first call on, register it with persistent=False if it can "
        "be computed again, or take one micro-batch a step on one rank"
    )


def is_mean(buffer: torch.Tensor) -> bool:
    """True if the micro-batches' mean is a valid value of a buffer: not for integers."""
    return buffer.is_floating_point() or buffer.is_complex()


def _reals(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().reshape(-1)


def tensor_slot(model: nn.Module, name: str) -> TensorSlot:
    """Finds a buffer or a parameter in a model."""
    path, _, key = name.rpartition(".")
    module = nn.Module.get_submodule(model, path)  # ScriptModule's own raises
    tensors: Any = module._parameters if key in module._parameters else module._buffers
    return TensorSlot(module, key, tensors)


def _tensor(slot: TensorSlot) -> torch.Tensor:
    tensor = slot.tensors[slot.key]
    assert tensor is not None
    return tensor
