"""Model of a run: rebuilt from its manifest, with the weights that its evaluation measured."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from trainer.checkpoint import CHECKPOINTS
from trainer.checkpoint.folder import Damaged, Unreadable, odd_weights, read, read_weights
from trainer.checkpoint.store import newest_good
from trainer.config.model import LoraConfig
from trainer.config.own_code import refuse_unnamed
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override
from trainer.config.redact import redact
from trainer.config.section import validated
from trainer.config.suggest import nearest
from trainer.config.training import MAIN_SET
from trainer.data.batch import Batch
from trainer.data.dataset import Dataset, spread
from trainer.errors import BadInputError, reading
from trainer.models.finetune import merged
from trainer.models.precision import set_matmul_mode
from trainer.observe.console import warn
from trainer.rng import Ints
from trainer.runs.altered import altered_config
from trainer.runs.differences import names_a_place, own_config
from trainer.runs.folder import MANIFEST, checkpoints_of
from trainer.runs.manifest import FORMAT, Manifest, RunFolder, read_run
from trainer.tasks import Task
from trainer.train.components.checkpoint_choice import chosen_checkpoint
from trainer.train.components.task import make_task, more_sets, refuse_other_task
from trainer.train.provenance import file_hash

# Keys of `Task.describe` that give a model's inputs and outputs their meaning.
_CONFIG = "model_config"  # of a language model's files
_MEANINGS = ("classes", "characters", "tokenizer", "tokenizer_sha256", "vocabulary", _CONFIG)
# Settings that switch off what only training needs: dropped branches would be exported, and the weights come
# from the run.
NOT_NOW = (
    *("device=auto", "regularization.stochastic_depth=0"),
    *("model.pretrained=null", "model.reinit=[]", "log.to=[]"),
    "hooks.enabled=false",
    *("anomaly.nonfinite=stop", "anomaly.spike=off"),  # may be rollback in a run of 0.1
    *("model.freeze=[]", f"model.lora={json.dumps(LoraConfig().model_dump(mode='json'))}"),
)


class OpenedRun(NamedTuple):
    """Run with its model.

    Attributes:
        folder: The run folder.
        manifest: Its manifest.
        recipe: Its configuration.
        task: Task of the recipe, with its data.
        model: Model on the CPU, in evaluation mode, float32, without gradients.
        weights: Source of its weights, such as "ema.safetensors".
    """

    folder: Path
    manifest: Manifest
    recipe: Recipe
    task: Task
    model: nn.Module
    weights: str

    @property
    def threads(self) -> int:
        """Threads of each rank in the newest attempt: part of the arithmetic on a CPU."""
        return self.manifest.attempts[-1].threads


def open_run(
    folder: Path,
    settings: Sequence[str] = (),
    checkpoint: str | None = None,
    weights: str | None = None,
    on: str = MAIN_SET,
) -> OpenedRun:
    """Opens a run that is finished, or stopped with a checkpoint.

    Args:
        folder: The run folder.
        settings: KEY=VALUE for keys of the data's place, and for the file of a custom task.
        checkpoint: Checkpoint to take the weights from: "best", "last" or a step; None: the final weights, or
            the newest checkpoint without them.
        weights: File of final weights, such as "model.safetensors"; None: those that were evaluated.
        on: Name of the evaluation set that becomes the task's evaluation data.

    Raises:
        BadInputError: If it is no run, its data isn't here, or it has no intact weights.
    """
    run = read_run(folder)
    recipe = with_set(_recipe_of(run, settings), on)
    set_matmul_mode(recipe.precision.model_copy(update={"mode": "fp32"}))  # for metrics that are compared
    task = make_task(recipe)
    refuse_other_task(run, task)
    _check_described(run, task)
    task.evaluation_data = more_sets(task).get(on, task.evaluation_data)
    model = task.model().eval().requires_grad_(False)
    name = weights or ("ema.safetensors" if recipe.ema.decay else "model.safetensors")
    if weights is not None and weights not in run.manifest.weights:
        raise BadInputError(f"{folder / weights}: isn't one of the run's final weights; give the run folder")
    source = _load_weights(model, run, name, checkpoint)
    for line in altered_config(run.manifest.as_facts()) if run.manifest.format == FORMAT else ():
        warn(f"{folder}: {line}")  # not of the configuration that was hashed; one of 0.1 lacks keys
    return OpenedRun(folder, run.manifest, recipe, task, model, source)


def with_set(recipe: Recipe, on: str) -> Recipe:
    """Returns a recipe with only one evaluation set: the data of the others needn't be here.

    Raises:
        BadInputError: If there is no set of that name.
    """
    sets = recipe.evaluation.sets
    if on not in (names := [MAIN_SET, *sets]):
        raise BadInputError(
            f"--on {on}: there is no such evaluation set{nearest(on, names)} (there are: {', '.join(names)})"
        )
    chosen = {name: one for name, one in sets.items() if name == on}
    evaluation = recipe.evaluation.model_copy(update={"sets": chosen, "decides": on})
    return recipe.model_copy(update={"evaluation": evaluation})


def _check_described(run: RunFolder, task: Task) -> None:
    """Checks that classes, vocabulary and the like are those of the training."""
    there, here = run.manifest.data, json.loads(json.dumps(redact(dict(task.describe()))))
    for key in _MEANINGS:
        if key in there and there[key] != here.get(key):
            what, place = ("model", "model.name=hf/…") if key == _CONFIG else ("data", "data.path=…")
            raise BadInputError(
                f"{run.path}: the {what} here has other {key} than the run was trained with; give the place "
                f"of that {what} by --set {place}"
            )


def _recipe_of(run: RunFolder, settings: Sequence[str]) -> Recipe:
    for setting in settings:
        if not names_a_place(setting, run.manifest.config):
            raise BadInputError(
                f"--set {setting}: the model is the run's as it was trained; only what says where things "
                "lie can be set, such as data.path"
            )
    config = own_config(run, [*settings, *NOT_NOW])
    recipe = validated(Recipe, config, str(run.path / MANIFEST))
    refuse_unnamed(run.path, recipe, override({}, settings), run.manifest.recipe)
    return recipe


def _load_weights(model: nn.Module, run: RunFolder, name: str, checkpoint: str | None) -> str:
    """Loads a run's weights into a model, in place; returns their source."""
    folder, weights = run.path, run.manifest.weights
    state, average, source = (
        (_final(folder / name, weights[name]), dict[str, torch.Tensor](), name)
        if checkpoint is None and name in weights
        else _checkpointed(run, checkpoint, averaged=name == "ema.safetensors")
    )
    averaged = merged({**state, **average}, _lora_scale(run))
    try:
        model.load_state_dict(averaged)
        # A checkpoint holds the average of each trained parameter once, also of a tied one or one that shares
        # memory with a buffer.
        for parameter, tensor in model.named_parameters():
            if average and averaged[parameter] is not state.get(parameter):
                tensor.copy_(averaged[parameter])
    except (RuntimeError, KeyError) as error:
        first = str(error).strip().splitlines()[-1].strip()
        raise BadInputError(f"{folder / source}: isn't of the manifest's model ({first})") from error
    return source


def _lora_scale(run: RunFolder) -> float:
    """Returns the factor of LoRA's update of each weight."""
    stored = run.manifest.config.get("model", {}).get("lora", {})
    lora = validated(LoraConfig, stored, str(run.path / MANIFEST))
    return lora.alpha / (lora.rank or 1)


def _check_final(file: Path, digest: str) -> None:
    """Checks that a file of final weights is what the run wrote."""
    if (problem := odd_weights(file)) is not None:
        raise BadInputError(f"{file}: can't be read ({problem}); bring it back")
    with reading(file, "bring it back"):
        if file_hash(file) != digest:
            raise BadInputError(f"{file}: isn't what the run wrote (another hash); bring it back")


def _final(file: Path, digest: str) -> dict[str, torch.Tensor]:
    _check_final(file, digest)
    try:
        with reading(file, "bring it back"):
            return read_weights(file)
    except (Damaged, Unreadable) as error:
        raise BadInputError(f"{file}: can't be read ({error}); bring it back") from error


def _checkpointed(
    run: RunFolder, which: str | None, averaged: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    """Reads a checkpoint's weights and buffers, its average (empty without one), and its path in the run."""
    if which not in (None, "best", "last") and not (str(which).isascii() and str(which).isdigit()):
        raise BadInputError(f"--checkpoint {which}: give best, last or a step")
    folder, path = run.path, None
    try:
        if which in (None, "last"):
            found, skipped = newest_good(checkpoints_of(folder), run.manifest.foreign)
            for line in skipped if found else ():
                warn(f"{folder}: skips {line}")
        else:
            path = chosen_checkpoint(folder, str(which), f"--checkpoint {which}")[1]
            found, skipped = read(path), []
            if (reason := run.manifest.foreign(found.state)) is not None:
                raise Damaged(reason)
    except Damaged as damage:
        raise BadInputError(f"{path}: {damage}; give another step") from damage
    except (OSError, Unreadable) as error:
        raise BadInputError(f"{folder / CHECKPOINTS}: can't be read ({error}); mend that") from error
    if found is None:
        why = f" ({skipped[0]})" if skipped else ""
        raise BadInputError(
            f"{folder}: holds no weights yet, nor a good checkpoint{why}; train it, or go on with it by "
            f"--out {folder}"
        )
    kind = "ema" if averaged and "ema" in found.tensors else "model"
    source = f"{CHECKPOINTS}/{found.path.name}/{kind}.safetensors"
    return found.tensors["model"], found.tensors["ema"] if kind == "ema" else {}, source


def inputs_of(run: OpenedRun, batch: Batch) -> tuple[torch.Tensor, ...]:
    """Returns the inputs of the run's model for a batch.

    Raises:
        BadInputError: If the run's task has no method `inputs`, or it gives anything but tensors.
    """
    make = getattr(run.task, "inputs", None)
    if make is None:
        raise BadInputError(
            f"{run.folder}: task={run.recipe.task} has no method inputs(batch), which says what its model is "
            "called with; add one"
        )
    made = make(batch)
    inputs = (made,) if isinstance(made, torch.Tensor) else tuple(made)
    if not inputs or not all(isinstance(one, torch.Tensor) for one in inputs):
        raise BadInputError(f"{run.folder}: inputs(batch) of its task gives the tensors that the model takes")
    return inputs


def read_samples(dataset: Dataset, samples: Ints) -> Batch:
    """Reads samples of evaluation data into a batch on the CPU.

    Raises:
        BadInputError: If a sample can't be decoded and data.on_corrupt is "fail".
    """
    out = {
        name: np.zeros((len(samples), *field.shape), field.dtype) for name, field in dataset.fields.items()
    }
    dataset.read(samples, None, out)
    fields = {name: torch.from_numpy(array) for name, array in out.items()}
    return Batch(fields, None, None, dataset.num_items * len(samples))


def some_samples(dataset: Dataset, count: int) -> Ints:
    """Returns samples spread over a data set, repeated where it has fewer: int64 (count,)."""
    return np.resize(spread(len(dataset), count), count)
