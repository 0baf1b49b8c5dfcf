"""Detection of tensors that a training forward pass changes, by a few passes through a copy of the model."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from trainer.config.recipe import Recipe
from trainer.data.batch import Batch
from trainer.data.sampling.plan import Plan
from trainer.distributed.overlap import buffers_of_parameters
from trainer.distributed.parallel import World, is_sharded, sum_over_ranks
from trainer.errors import BadInputError
from trainer.models.batchnorm import batchnorm_buffers
from trainer.models.buffers import FoundBuffers, TensorSlot, few, is_mean, tensor_slot
from trainer.models.precision import autocast
from trainer.observe.console import warn
from trainer.tasks import Task
from trainer.tasks.custom import CustomTask
from trainer.train.components.operations import blank_batch, stand_ins

_TRIES = 4
_FEW = 2  # samples
_LETTERS = 160
_OTHER = 1.01
_LARGER = 100.0  # weights, at which a limit on them shows
_CLOSE = 1e-5
_ONE_MICRO_BATCH = "one micro-batch a step on one rank (data.micro_batch_size=data.global_batch_size)"

_Look = tuple[torch.Tensor | None, int, torch.Tensor | None]
_Values = dict[str, torch.Tensor]


def find_changing(recipe: Recipe, task: Task, model: nn.Module, plan: Plan, world: World) -> FoundBuffers:
    """Finds the buffers and parameters that a training forward pass changes, alike on all ranks; collective.

    Runs a few forward passes through a copy of the model, over two blank samples, or a whole micro-batch if
    these fail; for a custom task over random numbers, too. If a buffer of a module changes, then the buffers
    of the same name in all modules of its class count as changing, as a layer may be skipped at random; and
    so do all floating-point buffers of that class: the mean of blank samples may equal the value before, and
    some statistics start later.

    Args:
        recipe: The configuration.
        task: Gives the copy of the model, and the loss.
        model: The model that is trained, before it is sharded; it isn't changed.
        plan: Gives the number of micro-batches of a step.
        world: The ranks.

    Returns:
        The changing buffers, with notes for the user.

    Raises:
        BadInputError: If the pass makes tensors that a checkpoint can't hold, or the training would depend on
            the number of micro-batches or ranks.
    """
    settled = {id(buffer) for buffer in (*batchnorm_buffers(model), *buffers_of_parameters(model))}
    names = [name for name, buffer in model.named_buffers() if id(buffer) not in settled]
    own = isinstance(task, CustomTask)
    if not names and not own and not _has_empty_places(model):
        return FoundBuffers()
    size, device = plan.micro_batch_size, world.device
    lively = [partial(_lively_batch, task, min(_FEW, size), device, seed) for seed in range(own * 2)]
    trial = _Trial(recipe, task, model, device)
    for samples in dict.fromkeys((min(_FEW, size), size)):
        trial = _Trial(recipe, task, model, device)
        trial.run([partial(blank_batch, task, samples, device), *lively])
        if not trial.error and not trial.remade:
            trial.compare(lively)
            break
    if trial.remade:
        kind = "parameter" if trial.remade in dict(model.named_parameters()) else "buffer"
        raise BadInputError(
            f"a training forward pass makes, replaces or reshapes the model's {kind} '{trial.remade}', so "
            "that no checkpoint could be resumed: let model() make it, with the shape that it has in "
            "training, or register it with persistent=False if it only keeps what can be computed again"
        )
    if trial.replaced and plan.micro_batches > 1:
        raise BadInputError(
            f"a training forward pass puts another tensor in the place of BatchNorm's '{trial.replaced}', so "
            "that each micro-batch would change it further, and each rank its own; change its numbers in "
            f"place (copy_), or take {_ONE_MICRO_BATCH}"
        )
    names += [name for name, _ in model.named_parameters()]
    signs = (trial.changes, trial.differs.__contains__, trial.in_part.__contains__)
    found = [[float(of(name)) for name in names] for of in signs]
    flags = sum_over_ranks(torch.tensor(found, device=world.device), world.group).tolist()
    chosen = [{name for name, flag in zip(names, each, strict=True) if flag} for each in flags]
    parameters = dict(model.named_parameters())
    changing = [name for name in names if name in chosen[0]]
    moved = [name for name in changing if name in parameters]
    _refuse(recipe, plan, world, moved, [n for n in moved if parameters[n].requires_grad and n in chosen[1]])
    changing = [name for name in changing if name not in moved or not parameters[name].requires_grad]
    alike = [name for name in changing if name in parameters and name not in chosen[1]]
    untried = [] if world.group is None else [n for n in names if n not in parameters and n not in changing]
    notes = _notes(model, changing, untried, trial.error)
    partly = [name for name in changing if name in chosen[2]]
    if partly and plan.micro_batches > 1 and world.rank == 0:
        warn(
            f"a forward pass overwrites a part of {few(partly)}, as of a queue of keys or a bank of samples: "
            f"the mean over a step's {plan.micro_batches} micro-batches mixes what they wrote; "
            f"{_ONE_MICRO_BATCH} leaves it as it is written"
        )
    return FoundBuffers(changing, notes, alike)


def _refuse(recipe: Recipe, plan: Plan, world: World, moved: list[str], trained: list[str]) -> None:
    """Refuses parameters that a forward pass changes where results would depend on ranks or micro-batches."""
    if moved and is_sharded(recipe.parallel, world):
        raise BadInputError(
            f"a training forward pass changes the parameters {few(moved)}, which parallel.strategy="
            f"{recipe.parallel.strategy} gathers for it and then forgets: use parallel.strategy=ddp"
        )
    if trained and plan.micro_batches > 1:
        raise BadInputError(
            f"a training forward pass changes the parameters {few(trained)}, which are trained: each of a "
            f"step's {plan.micro_batches} micro-batches would change them further, and each rank its own; "
            "let model() start them from samples, limit or normalize them by torch.nn.utils.parametrize or "
            f"after the optimizer's step (register_step_post_hook), or take {_ONE_MICRO_BATCH}"
        )


def _notes(model: nn.Module, changing: list[str], untried: list[str], error: str) -> list[str]:
    notes = []
    parameters = dict(model.named_parameters())
    kinds = {"buffers": [n for n in changing if n not in parameters]}
    kinds["frozen parameters"] = [n for n in changing if n in parameters]
    for kind, names in kinds.items():
        if names:
            notes.append(
                f"a training forward pass changes the {kind} {few(names)}: they get one update a step, the "
                "mean over its micro-batches"
            )
    if lost := [name for name in changing if name not in model.state_dict()]:
        notes[-1] += f"; no checkpoint holds {few(lost)} (persistent=False): a resumed run resets them"
    if error and untried:
        notes.append(
            f"it couldn't be tried which buffers a training forward pass changes ({error}); on several ranks "
            f"each keeps its own of {few(untried)} if it does, and a checkpoint holds rank 0's"
        )
    return notes


def _has_empty_places(model: nn.Module) -> bool:
    """True if a buffer is None and may be made later; norms without statistics don't count."""
    modules = (module for module in model.modules() if not isinstance(module, _NormBase))
    return any(buffer is None for module in modules for buffer in module._buffers.values())


def _lively_batch(task: Task, samples: int, device: torch.device, seed: int) -> Batch:
    """Returns a batch of random numbers; integers, such as classes or tokens, are all equal to the seed."""
    drawn = torch.Generator().manual_seed(seed)
    batch = blank_batch(task, samples, device)
    for tensor in batch.fields.values():
        real = tensor.is_floating_point()
        tensor.copy_(torch.randn(tensor.shape, generator=drawn) if real else torch.full(tensor.shape, seed))
    return batch


class _Trial:
    """Trial of some forward passes: records which tensors they change, buffers by module class and name.

    Attributes:
        error: The exception that ended the trial, as text; "" if there was none.
        remade: Name of a tensor that the passes made, replaced or reshaped; "" if there is none.
        replaced: Name of a BatchNorm statistic that is another tensor after the passes; "" if there is none.
        differs: Names of tensors that change by the samples.
        in_part: Names of buffers that one pass writes in part.
    """

    def __init__(self, recipe: Recipe, task: Task, model: nn.Module, device: torch.device) -> None:
        self._recipe, self._task, self._model, self._device = recipe, task, model, device
        self._kinds: dict[str, tuple[type, str]] = {}
        self._means = set[str]()
        self._changed = set[tuple[type, str]]()
        self._reshaped = set[tuple[type, str]]()
        self._moved, self.differs, self.in_part = set[str](), set[str](), set[str]()
        self.error = self.remade = self.replaced = ""

    def run(self, batches: Sequence[Callable[[], Batch]]) -> None:
        """Runs forward passes over the first batch several times, and over each further batch once."""
        try:
            with stand_ins(self._task, self._model, self._device) as (other, twin):
                other.load_state_dict(self._model.state_dict())
                with torch.no_grad():  # a teacher that equals its student would show no change
                    for weights in other.parameters():
                        if weights.requires_grad:
                            weights.mul_(_OTHER).add_(_OTHER - 1)
                self._look_at(other, twin, batches)
        except Exception as error:  # blank samples don't suit every model
            what = (str(error).strip() or "no message").splitlines()[0]
            self.error = f"{type(error).__name__}: {what[:_LETTERS]}"

    def _look_at(self, other: nn.Module, twin: Task, batches: Sequence[Callable[[], Batch]]) -> None:
        places = {name: tensor_slot(other, name) for name, _ in other.named_buffers()}
        self._kinds = {name: (type(at.module), at.key) for name, at in places.items()}
        self._means = {name for name, buffer in other.named_buffers() if is_mean(buffer)}
        statistics = {id(buffer): buffer for buffer in batchnorm_buffers(other)}
        of_batchnorm = [name for name, buffer in other.named_buffers() if id(buffer) in statistics]
        shapes = _shapes(other)
        weights = {name: _look(tensor_slot(other, name)) for name, _ in other.named_parameters()}
        tried = [batches[0]] * _TRIES + [*batches[1:]]
        for seed, batch in enumerate(tried):
            before = [_look(at) for at in places.values()]
            try:
                self._pass(other, twin, batch(), seed)
            except Exception:
                if seed < _TRIES:
                    raise
            for at, was in zip(places.values(), before, strict=True):
                now = at.tensors[at.key]
                if now is None or was[2] is None or now.shape != was[2].shape:
                    self._reshaped.add((type(at.module), at.key))
                elif _is_changed(was, now):
                    self._changed.add((type(at.module), at.key))
        now_there = (
            name for name in of_batchnorm if id(places[name].tensors[places[name].key]) not in statistics
        )
        self.replaced = min(now_there, default="")
        after = dict(other.named_parameters())
        odd = {name for name, shape in _shapes(other).items() if shapes.get(name) != shape}
        odd |= {name for name, was in weights.items() if after.get(name) is not was[0]} | shapes.keys() ^ {
            *_shapes(other)
        }
        self.remade = min(odd, default="")
        self._moved |= {name for name, was in weights.items() if not odd and _is_changed(was, after[name])}

    def _pass(self, other: nn.Module, twin: Task, batch: Batch, seed: int) -> None:
        torch.manual_seed(seed)
        with autocast(self._recipe.precision, self._device):
            twin.loss(other, batch)

    def compare(self, batches: Sequence[Callable[[], Batch]]) -> None:
        """Finds changes that depend on the samples, and buffers that one pass writes in part.

        Trained parameters also count if a second pass changes them further; they are scaled up before, so
        that a limit on them shows.
        """
        names = [
            name for name, _ in self._model.named_buffers() if self.changes(name) and name in self._means
        ]
        self.differs, self.in_part = set(self._moved), set()
        if not batches or not (names or self._moved):
            return
        try:
            with stand_ins(self._task, self._model, self._device) as (other, twin):
                start = {name: tensor.detach().clone() for name, tensor in self._model.state_dict().items()}
                trained = [n for n, p in other.named_parameters() if p.requires_grad and n in self._moved]
                start |= {name: start[name] * _LARGER for name in trained}
                given = [batch() for batch in batches]
                first, second, both = self._after(other, twin, start, given)
                self.differs = {
                    name
                    for name in self._moved
                    if not torch.equal(first[name], second[name])
                    or (name in trained and not torch.allclose(first[name], both[name], rtol=_CLOSE))
                }
                self.in_part = _written_in_part(
                    other, twin, names, partial(self._pass, batch=given[0], seed=0)
                )
        except Exception:  # changes that can't be tried count as dependent on the samples
            return

    def _after(
        self, other: nn.Module, twin: Task, start: _Values, batches: Sequence[Batch]
    ) -> Iterator[_Values]:
        """Yields the moved parameters after a pass over one batch, over the other, and over both."""
        for passes in ((0,), (1,), (0, 1)):
            other.load_state_dict(start)
            for number in passes:
                self._pass(other, twin, batches[number], number)
            yield {n: p.detach().clone() for n, p in other.named_parameters() if n in self._moved}

    def changes(self, name: str) -> bool:
        if name in self._moved:
            return True
        kind = self._kinds.get(name)
        if kind is None or kind in self._reshaped:
            return False
        return kind in self._changed or (name in self._means and kind[0] in {of for of, _ in self._changed})


def _written_in_part(
    other: nn.Module, twin: Task, names: list[str], forward: Callable[..., None]
) -> set[str]:
    """Returns the buffers that one pass writes in part: all entries get other values before it."""
    with torch.no_grad():
        for name in names:
            other.get_buffer(name).add_(1)
    before = {name: other.get_buffer(name).detach().clone() for name in names}
    forward(other, twin)
    same = {name: (other.get_buffer(name) == before[name]).flatten() for name in names}
    return {name for name, entries in same.items() if bool(entries.any()) and not bool(entries.all())}


def _look(at: TensorSlot) -> _Look:
    tensor = at.tensors[at.key]
    return (None, 0, None) if tensor is None else (tensor, tensor._version, tensor.detach().clone())


def _is_changed(was: _Look, now: torch.Tensor) -> bool:
    tensor, version, value = was
    return (
        value is None
        or now is not tensor
        or now._version != version
        or not torch.equal(_bits(now), _bits(value))
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)  # so that NaN equals NaN


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: t.shape for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
