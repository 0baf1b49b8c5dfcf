"""Buffers other than BatchNorm's that a training forward pass changes: one update per step for them, too.

A running mean of one's own, spectral norm's vectors, InstanceNorm's statistics. Each micro-batch of a step
starts from the same values. Floating-point and complex buffers become the mean of what the micro-batches that
changed them made of it; integers move by the mean of the changes, rounded (a counter counts steps).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from trainer.errors import BadInputError
from trainer.observe.console import warn

_NAMES = 5


@dataclass(frozen=True)
class FoundBuffers:
    """What a trial showed of a model's buffers.

    Attributes:
        changing: Names of those that a training forward pass changes.
        others: Names of those that it left alone, where several ranks should notice if that ends.
        notes: Lines for the user.
    """

    changing: Sequence[str] = ()
    others: Sequence[str] = ()
    notes: Sequence[str] = ()


def few(names: list[str]) -> str:
    """The first names of a list of buffers."""
    more = f", … ({len(names)} buffers)" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more


class ChangingBuffers:
    """Named buffers of a model.

    Attributes:
        size: Numbers that a micro-batch gives: the values, and for each buffer whether it was changed.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        """Starts from the values that are in the model now."""
        self._names = names
        self._places = [place(model, name) for name in names]
        known = dict(model.named_buffers(remove_duplicate=False))
        self._buffers = [known[name] for name in names]
        self._sizes = [buffer.numel() * (1 + buffer.is_complex()) for buffer in self._buffers]
        self.size = sum(self._sizes) + len(self._sizes)
        self.reload()

    def reload(self) -> None:
        """Starts from the values that are in the model now."""
        self._kept = [buffer.detach().clone() for buffer in self._buffers]

    def of_micro_batch(self) -> torch.Tensor:
        """What the last forward pass made of them, float64 (size,).

        Raises:
            BadInputError: If it gave one another shape.
        """
        values, flags = [], []
        for name, (module, key), kept in zip(self._names, self._places, self._kept, strict=True):
            now = module._buffers[key]
            if now is None or now.shape != kept.shape:
                raise BadInputError(
                    f"the forward pass gave the model's buffer '{name}' another shape than "
                    f"{list(kept.shape)}, with which it began: no mean over micro-batches can be made of it; "
                    "keep its shape, or keep it in a plain attribute"
                )
            changed = (now != kept).any()
            value = _reals(now.detach())
            if not is_mean(kept):
                value = value - _reals(kept)
            values.append(torch.where(changed, value, 0.0))
            flags.append(changed.double().view(1))
        return torch.cat([*values, *flags])

    @torch.no_grad()
    def restore(self) -> None:
        """Puts back the values from before the step."""
        for (module, key), buffer, kept in zip(self._places, self._buffers, self._kept, strict=True):
            module._buffers[key] = buffer  # the forward pass may have put another tensor in its place
            buffer.copy_(kept)

    def update(self, total: torch.Tensor, skipped: torch.Tensor | None) -> None:
        """Takes the sum over a step's micro-batches, float64 (size,)."""
        *sums, counts = total.split([*self._sizes, len(self._sizes)])
        for number, (kept, added, count) in enumerate(zip(self._kept, sums, counts.unbind(), strict=True)):
            mean = added / count.clamp(min=1)
            if kept.is_complex():
                new = torch.view_as_complex(mean.view(*kept.shape, 2))
            else:
                new = (mean if is_mean(kept) else _reals(kept) + mean.round()).view(kept.shape)
            changed = count > 0 if skipped is None else (count > 0) & (skipped == 0)
            self._kept[number] = torch.where(changed, new.to(kept.dtype), kept)
        self.restore()


class OtherBuffers:
    """Named buffers that no training forward pass is known to change: each rank would have its own then."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        """Starts from the values that are in the model now."""
        self._names = names
        self._places = [place(model, name) for name in names]
        self.reload()

    def reload(self) -> None:
        """Starts from the values that are in the model now."""
        # Held, so that no tensor that takes a buffer's place comes to have its identity.
        self._before = [
            (module, key, module._buffers[key], _version(module, key)) for module, key in self._places
        ]

    def tell(self) -> None:
        """Says once which ones were changed after all; the host waits for no device."""
        changed = [
            name
            for name, (module, key, buffer, version) in zip(self._names, self._before, strict=True)
            if module._buffers[key] is not buffer or _version(module, key) != version
        ]
        if changed:
            warn(
                f"the forward pass has changed the buffers {few(changed)}, as it did not when it was tried "
                "before training: each rank keeps its own, and a checkpoint holds rank 0's"
            )
            self._names, self._places, self._before = [], [], []


def _version(module: nn.Module, key: str) -> int:
    buffer = module._buffers[key]
    return -1 if buffer is None else buffer._version


def is_mean(buffer: torch.Tensor) -> bool:
    """Whether the mean of what micro-batches made of a buffer is a value for it: of an integer it isn't."""
    return buffer.is_floating_point() or buffer.is_complex()


def _reals(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().reshape(-1)


def place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has a buffer, and its name for it."""
    path, _, key = name.rpartition(".")
    return nn.Module.get_submodule(model, path), key  # TorchScript's own raises
