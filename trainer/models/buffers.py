"""Tensors other than BatchNorm's that a training forward pass changes: one update per step for them, too.

A running mean of one's own, spectral norm's vectors, InstanceNorm's statistics; a teacher's frozen
parameters. Each micro-batch of a step starts from the same values. Floating-point and complex ones become the
mean of what the micro-batches that changed them made of it; integers move by the mean of the changes, rounded
(a counter counts steps). What all micro-batches make alike, as a teacher that follows its student, needs no
mean and isn't sent to other ranks.
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
    """Result of a trial: buffers and frozen parameters that the forward pass changes.

    Attributes:
        changing: Names of those that a training forward pass changes.
        notes: Lines for the user.
        alike: Names of those that change in the same way whatever the samples are.
    """

    changing: Sequence[str] = ()
    notes: Sequence[str] = ()
    alike: Sequence[str] = ()


def few(names: list[str]) -> str:
    """Lists the first names of tensors."""
    more = f", … ({len(names)} tensors)" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more


class Place(NamedTuple):
    """Position of a tensor in a model.

    Attributes:
        module: The module that has it.
        key: The module's name for it.
        tensors: The module's buffers, or its parameters.
    """

    module: nn.Module
    key: str
    tensors: dict[str, torch.Tensor | None]


class ChangingBuffers:
    """Named buffers and frozen parameters of a model.

    Attributes:
        size: Numbers that a micro-batch gives: the values, and for each tensor whether it was changed.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], alike: Sequence[str] = ()) -> None:
        """Starts from the values that are in the model now.

        Args:
            model: Whose they are.
            names: Theirs.
            alike: Those of them that all micro-batches change alike.
        """
        self._names = names
        self._places = [place(model, name) for name in names]
        self._buffers = [_tensor(at) for at in self._places]
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
            BadInputError: If it gave one another shape.
        """
        values, flags = [], []
        for number, (name, at, kept) in enumerate(zip(self._names, self._places, self._kept, strict=True)):
            now = at.tensors[at.key]
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
        """Puts back the values from before the step."""
        for at, buffer, kept in zip(self._places, self._buffers, self._kept, strict=True):
            at.tensors[at.key] = buffer  # the forward pass may have put another tensor in its place
            buffer.copy_(kept)

    def update(self, total: torch.Tensor, skipped: torch.Tensor | None) -> None:
        """Takes the sum over a step's micro-batches, float64 (size,)."""
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
    """Whether the mean of what micro-batches made of a buffer is a value for it: of an integer it isn't."""
    return buffer.is_floating_point() or buffer.is_complex()


def _reals(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().reshape(-1)


def place(model: nn.Module, name: str) -> Place:
    """Finds a buffer or a parameter in a model."""
    path, _, key = name.rpartition(".")
    module = nn.Module.get_submodule(model, path)  # TorchScript's own raises
    tensors: Any = module._parameters if key in module._parameters else module._buffers
    return Place(module, key, tensors)


def _tensor(at: Place) -> torch.Tensor:
    tensor = at.tensors[at.key]
    assert tensor is not None
    return tensor
