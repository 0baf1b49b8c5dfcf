"""Preparation of a model for training: initial weights, precision, activation checkpointing, compilation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.config.recipe import Recipe
from trainer.config.sizes import MIB
from trainer.distributed.overlap import first_names, sharing
from trainer.distributed.parallel import World, check_agreement, is_sharded, words_of_ranks
from trainer.errors import BadInputError
from trainer.models.activation_checkpointing import blocks, candidates
from trainer.models.activations import ModelCost, measure
from trainer.models.batchnorm import synchronize_batchnorm
from trainer.models.compiling import (
    compile_blocks,
    compile_model,
    ddp_notes,
    missing_for_compiling,
    prepare_cache,
    uncompiled,
)
from trainer.models.finetune import adapted, fine_tune, hold_frozen
from trainer.models.modes import begin_training
from trainer.models.nonfinite import FirstNonFinite
from trainer.models.pointwise import mend_pointwise
from trainer.models.precision import autocast, fp32_modules, keep_in_fp32
from trainer.models.pretrained import find_weights
from trainer.models.weights import load_initial
from trainer.observe.oom import is_out_of_memory
from trainer.rng import Purpose, key
from trainer.tasks import Task
from trainer.train.components.operations import blank_batch, never_called, without_values

_NAMES = 5


@dataclass(frozen=True)
class Prepared:
    """Model that is ready for training.

    Attributes:
        model: The bare model.
        call: The model as training calls it: itself, or compiled.
        compiled: True if torch.compile is in use.
        nonfinite: Finds the first module whose output isn't finite, or None.
        cuda_graphs: True if forward and backward pass are replayed as CUDA graphs.
        notes: Lines for the user.
        checkpointed: Modules for activation checkpointing, see `recompute`.
    """

    model: nn.Module
    call: Callable[..., Any]
    compiled: bool
    nonfinite: FirstNonFinite | None
    cuda_graphs: bool
    notes: list[str]
    checkpointed: list[nn.Module]


def prepare_model(recipe: Recipe, task: Task, world: World, fresh: bool = True) -> Prepared:
    """Builds the model of a recipe on this rank's device; on the CPU if it is to be sharded.

    Args:
        recipe: The configuration.
        task: The task that makes the model.
        world: The ranks.
        fresh: True to load pretrained weights; False if a checkpoint replaces them.

    Raises:
        BadInputError: If the recipe names modules or parameters that the model doesn't have.
    """
    device, notes = world.device, []
    if recipe.parallel.strategy != "ddp" and world.group is None:
        notes.append(f"parallel.strategy={recipe.parallel.strategy}: a rank alone has nothing to share")
    sharded = is_sharded(recipe.parallel, world)
    home = torch.device("cpu") if sharded else device
    # On the CPU, whatever the device: the same seed gives the same weights everywhere.
    torch.default_generator.manual_seed(key(recipe.seed, Purpose.WEIGHTS) >> 1)
    model = task.model()
    if still := begin_training(model):
        notes.append(
            f"in evaluation mode in training, too, as model() gave them: {_few(still)}; .train() there lets "
            "dropout act and BatchNorm learn"
        )
    hold_frozen(model, recipe.model)
    if fresh and (start := find_weights(recipe.model)) is not None:
        taken = load_initial(model, start.file, recipe.model.reinit)
        notes.append(f"starts from {recipe.model.pretrained or recipe.model.name} ({taken})")
        # A different file under the same name on another host would give ranks different models.
        weights = sum(float(tensor.double().sum()) for tensor in model.state_dict().values())
        check_agreement(f"initial weights {weights!r}", world)
    if line := fine_tune(model, recipe.model):
        notes.append(line)
    _check_dropout(recipe, task, model, device)
    if fresh and (unlearned := _unlearned(model, task)):
        notes.append(
            f"the embedding isn't trained, and is zero for tokens of the template ({', '.join(unlearned)}): "
            "the model can't tell them apart; begin with a model that knows the template, or train it whole"
        )
    together = sharing(dict(model.named_parameters()))
    layout = torch.channels_last if recipe.model.channels_last else torch.preserve_format
    model = model.to(device=home, memory_format=layout)  # type: ignore[call-overload]
    if apart := [group for group in together if group not in sharing(dict(model.named_parameters()))]:
        notes.append(
            f"{first_names(apart)} share memory no more: torch moves each by itself to the {home.type} or to "
            "channels_last; give both modules one Parameter if they are to stay tied"
        )
    mend_pointwise(model)
    if kept := fp32_modules(model, recipe.precision.keep_fp32):
        keep_in_fp32(kept.values(), device)
        idle = never_called(task, model, list(kept), device)
        notes.append(
            f"in float32: {_few(list(kept))}"
            + f"; without effect on {_few(idle)}, which the loss of blank samples never calls (a tied head "
            "is only read): name the module that computes with its weights" * bool(idle)
        )
    # Before anything that talks to other ranks or reads tensors on the device: it runs forward passes.
    checkpointed, cost_of_checkpointing = _choose_checkpointed(recipe, task, model, home, sharded)
    notes.extend(cost_of_checkpointing)
    if recipe.parallel.sync_batchnorm and world.group is not None:
        notes.append(f"BatchNorm over all ranks: {synchronize_batchnorm(model, world.group)} layers")
    nonfinite = FirstNonFinite(model, device, world.group) if recipe.precision.debug else None
    compiled = recipe.compile.mode != "none" and _can_compile(recipe, world, notes)
    if compiled and recipe.compile.scope == "blocks":
        compile_blocks(blocks(model).values(), recipe.compile, device)
    call = (
        compile_model(model, recipe.compile, device)
        if compiled and recipe.compile.scope == "model"
        else model
    )
    if compiled and recipe.parallel.strategy == "ddp":
        notes += ddp_notes(world.size)
    graphs = compiled and device.type == "cuda" and recipe.compile.cuda_graphs
    return Prepared(model, call, compiled, nonfinite, graphs, notes, checkpointed)


def _check_dropout(recipe: Recipe, task: Task, model: nn.Module, device: torch.device) -> None:
    """Rejects model.lora.dropout on layers that the loss of blank samples never calls."""
    if recipe.model.lora.dropout and (idle := never_called(task, model, adapted(model), device)):
        raise BadInputError(
            f"model.lora.dropout: the weight of '{idle[0]}' is read and the layer never called, so that "
            "nothing is there to drop; leave it out of model.lora.targets, or dropout"
        )


def _unlearned(model: nn.Module, task: Task) -> list[str]:
    """Returns the special tokens of conversations whose embeddings are zero, and not trained."""
    chat, arrays = getattr(task, "chat", None), task.train_data.arrays
    table = next((one.weight for one in model.modules() if isinstance(one, nn.Embedding)), None)
    if chat is None or arrays is None or table is None or table.requires_grad:
        return []
    used, ends = arrays["tokens"], chat.ends.items()
    return [text for text, number in ends if (used == number).any() and not table[number].any()]


def _few(names: list[str]) -> str:
    more = f", … ({len(names)} modules)" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more


def _choose_checkpointed(
    recipe: Recipe, task: Task, model: nn.Module, device: torch.device, sharded: bool
) -> tuple[list[nn.Module], list[str]]:
    """Returns the modules to checkpoint, and a line on the memory that this saves.

    Args:
        recipe: The configuration.
        task: Gives the loss.
        model: The model.
        device: Where the model is.
        sharded: True to count with shapes only, as the model isn't on the device that trains it.
    """
    possible, chosen = candidates(recipe.memory, model)
    if not possible:
        return [], []
    cost = _measured(recipe, task, model, possible, None if sharded else device)
    if isinstance(cost, str):
        line = f"activation checkpointing: {_few(chosen)}; what it saves {cost}"
        return [possible[name] for name in chosen], [line]
    if uncalled := [name for name in chosen if name not in cost.saved]:
        raise BadInputError(
            f"memory.names: the model never calls '{uncalled[0]}' itself (as an attention does with its "
            "projection, whose weights it reads); name what lies around it"
        )
    return [possible[name] for name in chosen], [_cost_line(cost, chosen)]


def _forward(
    recipe: Recipe, task: Task, model: nn.Module, device: torch.device
) -> Callable[[], torch.Tensor]:
    batch = blank_batch(task, recipe.data.micro_batch_size, device)
    context = autocast(recipe.precision, device)

    def forward() -> torch.Tensor:
        with context:
            return task.loss(model, batch)

    return forward


def _measured(
    recipe: Recipe,
    task: Task,
    model: nn.Module,
    possible: dict[str, nn.Module],
    device: torch.device | None,
) -> ModelCost | str:
    """Returns the cost of activation checkpointing on a device, None: of shapes; or why it is unknown."""
    try:
        if device is not None:
            with uncompiled():
                return measure(model, possible, _forward(recipe, task, model, device))
        with without_values(task, model) as twin:
            return measure(model, possible, _forward(recipe, twin, model, torch.device("cpu")))
    except BadInputError:
        raise
    except Exception as error:  # user code that needs values, or takes gradients itself
        if is_out_of_memory(error):
            raise
        return f"can't be counted ({type(error).__name__})"


def _cost_line(cost: ModelCost, chosen: list[str]) -> str:
    kept = f"{cost.kept() / MIB:,.1f}"
    return (
        f"activation checkpointing: {_few(chosen)}; a micro-batch keeps "
        f"{cost.kept(chosen) / MIB:,.1f} MiB of activations, and backward {cost.again(chosen) / MIB:,.1f} "
        f"more for the block that it computes again, instead of {kept}"
    )


def _missing_somewhere(missing: str | None, world: World) -> str | None:
    """Returns this rank's fault, or that of the first rank with one: all decide alike; collective."""
    words = words_of_ranks(missing or "", world)
    return missing or next((f"rank {rank}: {word}" for rank, word in enumerate(words) if word), None)


def _can_compile(recipe: Recipe, world: World, notes: list[str]) -> bool:
    """True if every rank can compile; otherwise all train eagerly, so that they compute alike."""
    if missing := _missing_somewhere(missing_for_compiling(world.device), world):
        notes.append(f"compile.mode={recipe.compile.mode}: {missing}; training eagerly")
        return False
    folder, problem = prepare_cache()
    if problem:
        notes.append(problem)
    where = f", kept in {folder}" if folder else ""
    notes.append(
        f"compiling the {recipe.compile.scope} ({recipe.compile.mode}) in the first step{where}; "
        f"speed is measured after step {recipe.compile.warm_up}"
    )
    return True
