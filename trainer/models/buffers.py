"""Buffers other than BatchNorm's that a training forward pass changes: one update per window for them, too.

A running mean of one's own, spectral norm's vectors, InstanceNorm's statistics. Each shard of a window starts
from the same values. Floating-point and complex buffers become the mean of what the shards that changed them
made of it; integers move by the mean of the changes, rounded (a counter counts windows).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from trainer.distributed.parallel import World, sum_over_ranks
from trainer.errors import BadInputError
from trainer.models.operations import stand_ins
from trainer.observe.console import warn
from trainer.tasks import Task
from trainer.train.prepare import blank_batch

_TRIES = 4
_NAMES = 5

_LETTERS = 160

_Place = tuple[nn.Module, str]
_Look = tuple[torch.Tensor | None, int, torch.Tensor | None]


@dataclass(frozen=True)
class Found:
    """What a trial showed of a model's buffers.

    Attributes:
        changing: Names of those that a training forward pass changes.
        others: Names of those that it left alone, where several ranks should notice if that ends.
        notes: Lines for the user.
    """

    changing: Sequence[str] = ()
    others: Sequence[str] = ()
    notes: Sequence[str] = ()


def find_changing(
    task: Task,
    model: nn.Module,
    settled: Sequence[torch.Tensor],
    micro_batch: int,
    context: AbstractContextManager[object],
    world: World,
) -> Found:
    """Finds the buffers that a training forward pass changes, the same on all ranks; collective.

    A few forward passes of another model tell, over few blank samples, or a whole micro-batch if it must be.
    Where one of a module's buffers changes, so do those of the same name in all modules of that class, as a
    layer may be left out at random; and all of that class's that hold no integers: the mean of blank samples
    may be what it was before, and some statistics begin later.

    Args:
        task: Gives the other model, and the loss.
        model: The model that is trained; stays as it is.
        settled: Its buffers that needn't be looked at.
        micro_batch: Samples of a shard.
        context: Of a forward pass.
        world: The ranks.

    Raises:
        BadInputError: If a checkpoint couldn't hold what the forward pass makes of a buffer.
    """
    known = {id(buffer) for buffer in settled}
    names = [name for name, buffer in model.named_buffers() if id(buffer) not in known]
    if not names and not _has_empty_places(model):
        return Found()
    trial = _Trial()
    for samples in dict.fromkeys((min(2, micro_batch), micro_batch)):
        trial = _Trial()
        trial.run(task, model, samples, context, world.device)
        if not trial.error and not trial.remade:
            break
    if trial.remade:
        raise BadInputError(
            f"a training forward pass makes or reshapes the model's buffer '{trial.remade}', so that no run "
            "could go on from a checkpoint: register it with the shape that it has in training, or with "
            "persistent=False if it only keeps what can be computed again"
        )
    changed = [float(trial.changes(name)) for name in names]
    flags = sum_over_ranks(torch.tensor(changed, device=world.device), world.group).tolist()
    changing = [name for name, flag in zip(names, flags, strict=True) if flag]
    steady = [name for name in names if name not in changing and not trial.reshapes(name)]
    others = [name for name in steady if world.group is not None and _is_mean(model.get_buffer(name))]
    return Found(changing, others, _notes(model, changing, others, trial.error))


def _notes(model: nn.Module, changing: list[str], others: list[str], error: str) -> list[str]:
    notes = []
    if changing:
        notes.append(
            f"a training forward pass changes the buffers {_few(changing)}: they get one update a step, the "
            "mean over its micro-batches"
        )
    if lost := [name for name in changing if name not in model.state_dict()]:
        notes[-1] += f"; no checkpoint holds {_few(lost)} (persistent=False): a resumed run begins them anew"
    if error and others:
        notes.append(
            f"it couldn't be tried which buffers a training forward pass changes ({error}); on several ranks "
            f"each keeps its own of {_few(others)} if it does, and a checkpoint holds rank 0's"
        )
    return notes


def _few(names: list[str]) -> str:
    more = f", … ({len(names)} buffers)" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more


def _has_empty_places(model: nn.Module) -> bool:
    """Whether a buffer may be made later; norms without statistics have such places for nothing."""
    modules = (module for module in model.modules() if not isinstance(module, _NormBase))
    return any(buffer is None for module in modules for buffer in module._buffers.values())


class _Trial:
    """What some forward passes do to buffers, told by the class of the module and its name for the buffer.

    Attributes:
        error: What ended it, in a few words; empty if nothing did.
        remade: A tensor that a checkpoint would hold otherwise than before them; or empty.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[type, str]] = {}
        self._means = set[str]()
        self._changed = set[tuple[type, str]]()
        self._reshaped = set[tuple[type, str]]()
        self.error = self.remade = ""

    def run(
        self,
        task: Task,
        model: nn.Module,
        samples: int,
        context: AbstractContextManager[object],
        device: torch.device,
    ) -> None:
        try:
            with stand_ins(task, model, device) as (other, twin):
                other.load_state_dict(model.state_dict())
                other.train()
                places = {name: _place(other, name) for name, _ in other.named_buffers()}
                self._kinds = {name: (type(module), key) for name, (module, key) in places.items()}
                self._means = {name for name, buffer in other.named_buffers() if _is_mean(buffer)}
                shapes = _shapes(other)
                batch = blank_batch(task, samples, device)
                for seed in range(_TRIES):
                    torch.manual_seed(seed)
                    before = [_look(place) for place in places.values()]
                    with context:
                        twin.loss(other, batch)
                    for (module, key), was in zip(places.values(), before, strict=True):
                        self._compare((type(module), key), was, module._buffers[key])
                odd = [name for name, shape in _shapes(other).items() if shapes.get(name) != shape]
                self.remade = min(odd, default="")
        except Exception as error:  # blank samples don't suit every model
            what = (str(error).strip() or "no message").splitlines()[0]
            self.error = f"{type(error).__name__}: {what[:_LETTERS]}"

    def changes(self, name: str) -> bool:
        kind = self._kinds.get(name)
        if kind is None or kind in self._reshaped:
            return False
        return kind in self._changed or (name in self._means and kind[0] in {of for of, _ in self._changed})

    def reshapes(self, name: str) -> bool:
        return self._kinds.get(name) in self._reshaped

    def _compare(self, kind: tuple[type, str], was: _Look, now: torch.Tensor | None) -> None:
        old, version, value = was
        if now is None or value is None or now.shape != value.shape:
            self._reshaped.add(kind)
        elif now is not old or now._version != version or not torch.equal(now, value):
            self._changed.add(kind)


def _look(place: _Place) -> _Look:
    buffer = place[0]._buffers[place[1]]
    return (None, 0, None) if buffer is None else (buffer, buffer._version, buffer.detach().clone())


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: t.shape for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}


class ChangingBuffers:
    """Named buffers of a model.

    Attributes:
        size: Numbers that a shard gives: the values, and for each buffer whether it was changed.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        """Starts from the values that are in the model now."""
        self._names = names
        self._places = [_place(model, name) for name in names]
        self._buffers = [model.get_buffer(name) for name in names]
        self._sizes = [buffer.numel() * (1 + buffer.is_complex()) for buffer in self._buffers]
        self.size = sum(self._sizes) + len(self._sizes)
        self.reload()

    def reload(self) -> None:
        """Starts from the values that are in the model now."""
        self._kept = [buffer.detach().clone() for buffer in self._buffers]

    def of_shard(self) -> torch.Tensor:
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
            if not _is_mean(kept):
                value = value - _reals(kept)
            values.append(torch.where(changed, value, 0.0))
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
            mean = added / count.clamp(min=1)
            if kept.is_complex():
                new = torch.view_as_complex(mean.view(*kept.shape, 2))
            else:
                new = (mean if _is_mean(kept) else _reals(kept) + mean.round()).view(kept.shape)
            changed = count > 0 if skipped is None else (count > 0) & (skipped == 0)
            self._kept[number] = torch.where(changed, new.to(kept.dtype), kept)
        self.restore()


class OtherBuffers:
    """Named buffers that no training forward pass is known to change: each rank would have its own then."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        """Starts from the values that are in the model now."""
        self._names = names
        self._places = [_place(model, name) for name in names]
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
                f"the forward pass has changed the buffers {_few(changed)}, as it did not when it was tried "
                "before training: each rank keeps its own, and a checkpoint holds rank 0's"
            )
            self._names, self._places, self._before = [], [], []


def _version(module: nn.Module, key: str) -> int:
    buffer = module._buffers[key]
    return -1 if buffer is None else buffer._version


def _is_mean(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _reals(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().reshape(-1)


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key
