"""Detection of tensors that a training forward pass changes, by two tried steps of a copy of the model.

The two forward passes differ in samples, random numbers and trained weights, as those of two steps do. While
training, `StillTensors` finds tensors that move later, such as a teacher from its hundredth call on.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from trainer.config.recipe import Recipe
from trainer.data.batch import Batch
from trainer.data.dataset import spread
from trainer.data.sampling.plan import Plan
from trainer.distributed.overlap import buffers_of_parameters
from trainer.distributed.parallel import World, is_sharded, sum_over_ranks
from trainer.errors import BadInputError
from trainer.models.batchnorm import batchnorm_buffers
from trainer.models.buffers import FoundBuffers, TensorSlot, few, is_mean, tensor_slot
from trainer.observe.console import warn
from trainer.tasks import Task
from trainer.tasks.custom import CustomTask
from trainer.tasks.custom_trial import few_samples
from trainer.train.components.operations import blank_batch, stand_ins

_CPU = torch.device("cpu")
_TRIED = 4  # samples of a step
_LETTERS = 160
_OTHER = 1.01
_LARGER = 100.0  # weights, at which a limit on them shows
_CLOSE = 1e-5
_ONE_MICRO_BATCH = "one micro-batch a step on one rank (data.micro_batch_size=data.global_batch_size)"

_Look = tuple[torch.Tensor, int, torch.Tensor]


@dataclass
class _Seen:
    """What the tried steps showed, by names of tensors.

    Attributes:
        changed: Tensors that they changed.
        differ: The parameters among them whose change depends on the samples, or may do so.
        in_part: Buffers that a pass writes in part.
        error: The exception that ended the trial, as text; "" if there was none.
        remade: A tensor that the passes made, replaced or reshaped; "" if there is none.
        replaced: A BatchNorm statistic that is another tensor after the passes; "" if there is none.
    """

    changed: set[str] = field(default_factory=set)
    differ: set[str] = field(default_factory=set)
    in_part: set[str] = field(default_factory=set)
    error: str = ""
    remade: str = ""
    replaced: str = ""


def find_changing(recipe: Recipe, task: Task, model: nn.Module, plan: Plan, world: World) -> FoundBuffers:
    """Finds the buffers and parameters that a training forward pass changes, alike on all ranks; collective.

    Tries two steps of a copy of the model, over samples of a custom task, or blank ones. If a buffer of a
    module changes, then the buffers of the same name in all modules of its class count as changing, as a
    layer may be skipped at random; and so do all floating-point buffers of that class: the mean of blank
    samples may equal the value before, and some statistics start later. Buffers with persistent=False are
    left alone.

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
    stored, parameters = model.state_dict().keys(), dict(model.named_parameters())
    names = [name for name, one in model.named_buffers() if name in stored and id(one) not in settled]
    if not names and not isinstance(task, CustomTask) and not _has_empty_places(model):
        return FoundBuffers()
    seen, several = _try(task, model), plan.micro_batches > 1
    if seen.remade:
        kind = "parameter" if seen.remade in parameters else "buffer"
        raise BadInputError(
            f"a training forward pass makes, replaces or reshapes the model's {kind} '{seen.remade}', so "
            "that no checkpoint could be resumed: let model() make it, with the shape that it has in "
            "training, or register it with persistent=False if it only keeps what can be computed again"
        )
    if seen.replaced and several:
        raise BadInputError(
            f"a training forward pass puts another tensor in the place of BatchNorm's '{seen.replaced}', so "
            "that each micro-batch would change it further, and each rank its own; change its numbers in "
            f"place (copy_), or take {_ONE_MICRO_BATCH}"
        )
    names += parameters
    signs = [[float(n in some) for n in names] for some in (seen.changed, seen.differ, seen.in_part)]
    flags = sum_over_ranks(torch.tensor(signs, device=world.device), world.group).tolist()
    changed, differ, in_part = (
        [name for name, flag in zip(names, each, strict=True) if flag] for each in flags
    )
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    moved, sharded = [name for name in changed if name in parameters], is_sharded(recipe.parallel, world)
    if moved and sharded:
        raise BadInputError(
            f"a training forward pass changes the parameters {few(moved)}, which parallel.strategy="
            f"{recipe.parallel.strategy} gathers for it and then forgets: use parallel.strategy=ddp"
        )
    if several and (further := [name for name in moved if name in trained and name in differ]):
        raise BadInputError(
            f"a training forward pass changes the parameters {few(further)}, which are trained: each of a "
            f"step's {plan.micro_batches} micro-batches would change them further, and each rank its own; "
            "let model() start them from samples, limit or normalize them by torch.nn.utils.parametrize or "
            f"after the optimizer's step (register_step_post_hook), or take {_ONE_MICRO_BATCH}"
        )
    changing = [name for name in changed if name not in trained]
    left = {*names} - {*changed} - (parameters.keys() if sharded else trained)
    if in_part and several and world.rank == 0:
        warn(
            f"a forward pass overwrites a part of {few(in_part)}, as of a queue of keys or a bank of "
            f"samples: the mean over a step's {plan.micro_batches} micro-batches mixes what they wrote; "
            f"{_ONE_MICRO_BATCH} leaves it as it is written"
        )
    alike = [name for name in moved if name not in trained and name not in differ]
    still = [name for name in names if name in left] if several else []
    tensors = {**parameters, **dict(model.named_buffers())}
    means = [name for name in changing if name not in alike and is_mean(tensors[name])]
    if means and _passes_over_padding(plan, task):
        raise BadInputError(
            f"data.last_batch=weighted: a training forward pass changes {few(means)}, and in the last step "
            "of an epoch would do so by padding (samples of weight 0); use data.last_batch=cross or drop"
        )
    return FoundBuffers(changing, _notes(changing, still, parameters, seen.error), alike, still)


def _passes_over_padding(plan: Plan, task: Task) -> bool:
    """True if a forward pass gets padding: a custom task's only where a micro-batch has nothing else."""
    last = plan.samples % plan.global_batch_size
    room = plan.micro_batch_size if isinstance(task, CustomTask) else 1
    return plan.last == "weighted" and 0 < last <= plan.global_batch_size - room


def _notes(changing: list[str], still: list[str], parameters: Iterable[str], error: str) -> list[str]:
    notes = []
    kinds = {"buffers": [n for n in changing if n not in parameters]}
    kinds["frozen parameters"] = [n for n in changing if n in parameters]
    for kind, names in kinds.items():
        if names:
            notes.append(
                f"a training forward pass changes the {kind} {few(names)}: they get one update a step, the "
                "mean over its micro-batches"
            )
    if error and still:
        notes.append(
            f"it couldn't be tried what a training forward pass changes ({error}): the run ends if it "
            f"changes {few(still)}"
        )
    return notes


def _has_empty_places(model: nn.Module) -> bool:
    """True if a buffer is None and may be made later; norms without statistics don't count."""
    modules = (module for module in model.modules() if not isinstance(module, _NormBase))
    return any(buffer is None for module in modules for buffer in module._buffers.values())


def _try(task: Task, model: nn.Module) -> _Seen:
    """Tries two steps of a copy of the model, on the CPU."""
    seen = _Seen()
    try:
        with stand_ins(task, model, _CPU) as (other, twin):
            other.load_state_dict(model.state_dict())
            batches = _two_batches(task)
            _look_at(seen, other, twin, batches)
            if seen.differ and not seen.remade and isinstance(task, CustomTask):
                with suppress(Exception):  # changes that can't be tried count as dependent on the samples
                    seen.differ = _dependent(model, other, twin, seen.differ, batches)
    except Exception as error:  # a model may not suit blank samples, or the CPU
        what = (str(error).strip() or "no message").splitlines()[0]
        seen.error = f"{type(error).__name__}: {what[:_LETTERS]}"
    return seen


def _two_batches(task: Task) -> list[Batch]:
    """Returns the samples of two steps: a custom task's own, spread over its data; else blank ones."""
    if not isinstance(task, CustomTask):
        return [blank_batch(task, _TRIED, _CPU) for _ in range(2)]
    samples = np.resize(spread(len(task.train_data), 2 * _TRIED), 2 * _TRIED)
    return [few_samples(task, some) for some in (samples[::2], samples[1::2])]


def _forward(other: nn.Module, twin: Task, batch: Batch, seed: int) -> None:
    torch.manual_seed(seed)
    twin.loss(other, batch)


def _look_at(seen: _Seen, other: nn.Module, twin: Task, batches: Sequence[Batch]) -> None:
    """Notes what the forward pass of each step changes; only the first pass may raise."""
    parameters, buffers, shapes = dict(other.named_parameters()), dict(other.named_buffers()), _shapes(other)
    slots = {name: tensor_slot(other, name) for name in (*buffers, *parameters)}
    means = {name for name, buffer in buffers.items() if is_mean(buffer)}
    statistics = {id(buffer) for buffer in batchnorm_buffers(other)}
    moved = set[str]()
    for step, batch in enumerate(batches):
        written = means & seen.changed
        with torch.no_grad():
            for parameter in other.parameters():
                if parameter.requires_grad:  # a teacher that equals its student would show no change
                    parameter.mul_(_OTHER).add_(_OTHER - 1)
            for name in written:  # entries that are equal afterwards are those that the pass leaves alone
                other.get_buffer(name).add_(_OTHER)  # no count, which the pass may give again
        before = {name: _look(at) for name, at in slots.items()}
        try:
            _forward(other, twin, batch, step)
        except Exception:
            if not step:
                raise
            break
        if remade := _remade(other, parameters, shapes):
            seen.remade = remade
            return
        for name, was in before.items():
            now = slots[name].tensors.get(slots[name].key)
            if now is None or now.shape != was[2].shape:  # a cache, with persistent=False
                continue
            if _is_changed(was, now):
                moved.add(name)
            if name in written and (now == was[2]).any() and (now != was[2]).any():
                seen.in_part.add(name)
        seen.differ = moved & parameters.keys()
        seen.changed = moved | _of_their_kind(moved, {name: slots[name] for name in buffers}, means)
    now_there = {name: slots[name].tensors.get(slots[name].key) for name in buffers}
    replaced = (n for n, one in buffers.items() if id(one) in statistics and now_there[n] is not one)
    seen.replaced = min(replaced, default="")


def _of_their_kind(moved: set[str], buffers: Mapping[str, TensorSlot], means: set[str]) -> set[str]:
    """Returns the buffers that count as changing if these have moved, by class and name."""
    kinds = {name: (type(at.module), at.key) for name, at in buffers.items()}
    changed = {kinds[name] for name in moved & kinds.keys()}
    classes = {kind for kind, _ in changed}
    return {n for n, kind in kinds.items() if kind in changed or (n in means and kind[0] in classes)}


def _dependent(
    model: nn.Module, other: nn.Module, twin: Task, moved: set[str], batches: Sequence[Batch]
) -> set[str]:
    """Returns the moved parameters whose change depends on the samples.

    Trained parameters also count if a second pass changes them further; they are scaled up before, so that a
    limit on them shows.
    """
    trained = [name for name in moved if other.get_parameter(name).requires_grad]

    def after(*steps: int) -> dict[str, torch.Tensor]:
        other.load_state_dict(model.state_dict())
        with torch.no_grad():
            for name in trained:
                other.get_parameter(name).mul_(_LARGER)
        for step in steps:
            _forward(other, twin, batches[step], step)
        return {name: other.get_parameter(name).detach().clone() for name in moved}

    first, second = after(0), after(1)
    both = after(0, 1) if trained else first
    return {
        name
        for name in moved
        if not torch.equal(first[name], second[name])
        or (name in trained and not torch.allclose(first[name], both[name], rtol=_CLOSE))
    }


def _remade(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], shapes: Mapping[str, torch.Size]
) -> str:
    """Returns the name of a tensor that has another shape, is new or gone, or is another parameter."""
    now, after = _shapes(model), dict(model.named_parameters())
    odd = {name for name in shapes.keys() | now.keys() if shapes.get(name) != now.get(name)}
    return min(odd | {name for name, one in parameters.items() if after.get(name) is not one}, default="")


def _look(at: TensorSlot) -> _Look:
    tensor = at.tensors[at.key]
    assert tensor is not None
    return tensor, tensor._version, tensor.detach().clone()


def _is_changed(was: _Look, now: torch.Tensor) -> bool:
    tensor, version, value = was
    return now is not tensor or now._version != version or not torch.equal(_bits(now), _bits(value))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)  # so that NaN equals NaN


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: t.shape for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
