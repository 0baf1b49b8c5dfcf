"""Buffers and frozen parameters that a training forward pass changes: one update per step, as BatchNorm's.

Examples are a running mean, spectral norm's vectors, InstanceNorm's statistics, a teacher's parameters. Each
micro-batch of a step starts from the same values. Floating-point and complex tensors become the mean of the
new values of the micro-batches that changed them; integers move by the rounded mean of the changes, so a
counter counts steps. Tensors that all micro-batches change alike, such as a teacher that follows its student,
need no mean and aren't sent to other ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from trainer.errors import BadInputError

_NAMES = 5


@dataclass(frozen=True)
class FoundBuffers:
    """Buffers and frozen parameters that a trial of the forward pass changed.

    Attributes:
        changing: Names of the changed tensors.
        notes: Lines for the user.
        alike: Names of tensors whose change doesn't depend on the samples.
    """

    changing: Sequence[str] = ()
    notes: Sequence[str] = ()
    alike: Sequence[str] = ()


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
