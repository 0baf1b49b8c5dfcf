"""Which of a model's buffers a training forward pass changes: a few passes of another model tell."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from trainer.distributed.parallel import World, sum_over_ranks
from trainer.errors import BadInputError
from trainer.models.buffers import FoundBuffers, few, is_mean, place
from trainer.tasks import Task
from trainer.train.operations import stand_ins
from trainer.train.prepare import blank_batch

_TRIES = 4
_LETTERS = 160

_Place = tuple[nn.Module, str]
_Look = tuple[torch.Tensor | None, int, torch.Tensor | None]


def find_changing(
    task: Task,
    model: nn.Module,
    settled: Sequence[torch.Tensor],
    micro_batch_size: int,
    context: AbstractContextManager[object],
    world: World,
) -> FoundBuffers:
    """Finds the buffers that a training forward pass changes, the same on all ranks; collective.

    A few forward passes of another model tell, over few blank samples, or a whole micro-batch if it must be.
    Where one of a module's buffers changes, so do those of the same name in all modules of that class, as a
    layer may be left out at random; and all of that class's that hold no integers: the mean of blank samples
    may be what it was before, and some statistics begin later.

    Args:
        task: Gives the other model, and the loss.
        model: The model that is trained; stays as it is.
        settled: Its buffers that needn't be looked at.

    Raises:
        BadInputError: If a checkpoint couldn't hold what the forward pass makes of a buffer.
    """
    known = {id(buffer) for buffer in settled}
    names = [name for name, buffer in model.named_buffers() if id(buffer) not in known]
    if not names and not _has_empty_places(model):
        return FoundBuffers()
    trial = _BufferTrial()
    for samples in dict.fromkeys((min(2, micro_batch_size), micro_batch_size)):
        trial = _BufferTrial()
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
    others = [name for name in steady if world.group is not None and is_mean(model.get_buffer(name))]
    return FoundBuffers(changing, others, _notes(model, changing, others, trial.error))


def _notes(model: nn.Module, changing: list[str], others: list[str], error: str) -> list[str]:
    notes = []
    if changing:
        notes.append(
            f"a training forward pass changes the buffers {few(changing)}: they get one update a step, the "
            "mean over its micro-batches"
        )
    if lost := [name for name in changing if name not in model.state_dict()]:
        notes[-1] += f"; no checkpoint holds {few(lost)} (persistent=False): a resumed run begins them anew"
    if error and others:
        notes.append(
            f"it couldn't be tried which buffers a training forward pass changes ({error}); on several ranks "
            f"each keeps its own of {few(others)} if it does, and a checkpoint holds rank 0's"
        )
    return notes


def _has_empty_places(model: nn.Module) -> bool:
    """Whether a buffer may be made later; norms without statistics have such places for nothing."""
    modules = (module for module in model.modules() if not isinstance(module, _NormBase))
    return any(buffer is None for module in modules for buffer in module._buffers.values())


class _BufferTrial:
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
                places = {name: place(other, name) for name, _ in other.named_buffers()}
                self._kinds = {name: (type(module), key) for name, (module, key) in places.items()}
                self._means = {name for name, buffer in other.named_buffers() if is_mean(buffer)}
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
