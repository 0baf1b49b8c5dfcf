"""Buffers other than BatchNorm's that a training forward pass changes: one update per window for them, too.

A running mean of one's own, spectral norm's vectors, InstanceNorm's statistics. Each shard of a window starts
from the same values. Floating-point buffers become the mean of what the shards that changed them made of it;
integers move by the mean of the changes, rounded (a counter counts windows).
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import distributed as dist, nn

from trainer.parallel import sum_over_ranks

_TRIES = 4


def find_changing(
    model: nn.Module,
    settled: Sequence[torch.Tensor],
    loss: Callable[[nn.Module], torch.Tensor],
    context: AbstractContextManager[object],
    group: dist.ProcessGroup | None,
) -> list[str]:
    """Names of the buffers that a training forward pass changes, the same on all ranks; collective.

    A few forward passes of a copy tell. Where one of a module's buffers changes, so do those of the same name
    in all modules of that class: a layer may be left out at random.

    Args:
        model: Stays as it is.
        settled: Buffers that needn't be looked at.
        loss: Calls the copy.
        context: Of a forward pass.
        group: The ranks.
    """
    known = {id(buffer) for buffer in settled}
    names = [name for name, buffer in model.named_buffers() if id(buffer) not in known]
    if not names:
        return []
    found = set[tuple[type, str]]()
    trial = copy.deepcopy(model).train()
    # The copy may still call the model itself, by a function that the model made of its own method.
    places = [_place(one, name) for one in (trial, model) for name in names]
    kept_model = ChangingBuffers(model, [name for name, _ in model.named_buffers()])
    for seed in range(_TRIES):
        torch.manual_seed(seed)
        before = [module._buffers[key] for module, key in places]
        kept = [None if b is None else (b._version, b.detach().clone()) for b in before]
        try:
            with context:
                loss(trial)
        except Exception:  # blank samples don't suit every model
            break
        for (module, key), old, was in zip(places, before, kept, strict=True):
            now = module._buffers[key]
            if was is None or now is None:
                continue
            if now is not old or now._version != was[0] or not torch.equal(now, was[1]):
                found.add((type(module), key))
    kept_model.restore()
    changed = [float((type(module), key) in found) for module, key in places[: len(names)]]
    flags = torch.tensor(changed, device=next(model.parameters()).device)
    return [n for n, flag in zip(names, sum_over_ranks(flags, group).tolist(), strict=True) if flag]


class ChangingBuffers:
    """Named buffers of a model.

    Attributes:
        size: Numbers that a shard gives: the values, and for each buffer whether it was changed.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        """Starts from the values that are in the model now."""
        self._places = [_place(model, name) for name in names]
        self._buffers = self._now()
        self._sizes = [buffer.numel() for buffer in self._buffers]
        self.size = sum(self._sizes) + len(self._sizes)
        self.reload()

    def reload(self) -> None:
        """Starts from the values that are in the model now."""
        self._kept = [buffer.detach().clone() for buffer in self._buffers]

    def of_shard(self) -> torch.Tensor:
        """What the last forward pass made of them, float64 (size,)."""
        values, flags = [], []
        for now, kept in zip(self._now(), self._kept, strict=True):
            changed = (now != kept).any()
            value = now.double() if kept.is_floating_point() else now.double() - kept.double()
            values.append(torch.where(changed, value, 0.0).reshape(-1))
            flags.append(changed.double().view(1))
        return torch.cat([*values, *flags])

    @torch.no_grad()
    def restore(self) -> None:
        """Puts back the values from before the window."""
        for (module, key), buffer, kept in zip(self._places, self._buffers, self._kept, strict=True):
            module._buffers[key] = buffer  # the forward pass may have put another tensor in its place
            buffer.copy_(kept)

    def update(self, total: torch.Tensor, skipped: torch.Tensor | None) -> None:
        """Takes the sum over a window's shards, float64 (size,)."""
        *sums, counts = total.split([*self._sizes, len(self._sizes)])
        for number, (kept, added, count) in enumerate(zip(self._kept, sums, counts.unbind(), strict=True)):
            mean = (added / count.clamp(min=1)).view(kept.shape)
            new = mean if kept.is_floating_point() else kept.double() + mean.round()
            changed = count > 0 if skipped is None else (count > 0) & (skipped == 0)
            self._kept[number] = torch.where(changed, new.to(kept.dtype), kept)
        self.restore()

    def _now(self) -> list[torch.Tensor]:
        return [b.detach() if (b := m._buffers[k]) is not None else torch.zeros(0) for m, k in self._places]


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key
