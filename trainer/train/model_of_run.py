"""The model that a run left: rebuilt from its manifest, with the weights that its evaluation measured."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from trainer.checkpoint import FOLDER
from trainer.checkpoint.folder import Unreadable
from trainer.checkpoint.store import newest_good
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override
from trainer.config.redact import REDACTED, redact
from trainer.config.section import validated
from trainer.config.task_file import source_hash
from trainer.data.dataset import Dataset, spread
from trainer.data.loader import Batch
from trainer.errors import BadInputError
from trainer.host import strict_json
from trainer.models.precision import set_matmul_mode
from trainer.rng import Ints
from trainer.tasks import Task
from trainer.train.manifest import file_hash
from trainer.train.recorded import Manifest
from trainer.train.resume import FREE, check_format, flat
from trainer.train.run import make_task

# Where data lies and how it comes; all else is the run's.
_ELSEWHERE = [key for key in FREE if key.startswith("data.")]
# Of `Task.describe`: what gives a model's inputs and outputs their meaning.
_MEANINGS = ("classes", "characters", "tokenizer", "vocabulary")
# What only training needs: hooks that drop branches would be exported, weights come from the run.
_NOT_NOW = (
    *("device=auto", "regularization.stochastic_depth=0"),
    *("model.pretrained=null", "model.reinit=[]"),
)


class OpenedRun(NamedTuple):
    """A run's model and what belongs to it.

    Attributes:
        folder: The run folder.
        facts: Its manifest.
        recipe: Its configuration.
        task: Of the recipe, with its data.
        model: On the CPU, in evaluation mode, float32; nothing in it asks for gradients.
        weights: Which ones it has, such as "ema.safetensors".
    """

    folder: Path
    facts: Mapping[str, Any]
    recipe: Recipe
    task: Task
    model: nn.Module
    weights: str


def open_run(folder: Path, settings: Sequence[str] = ()) -> OpenedRun:
    """Opens a run that is finished, or stopped with a checkpoint.

    Args:
        folder: The run folder.
        settings: KEY=VALUE for keys that say where the data lies.

    Raises:
        BadInputError: If it is no run, its data isn't here, or it has no weights that can be trusted.
    """
    manifest, facts = _read_manifest(folder)
    recipe = _recipe_of(folder, manifest, settings)
    known = manifest.fingerprint.get("task")
    if known and known != source_hash(Path(recipe.task)):  # before it is run
        raise BadInputError(f"{recipe.task}: isn't the file that the run was trained with; bring that back")
    set_matmul_mode(recipe.precision.model_copy(update={"mode": "fp32"}))  # for metrics that are compared
    task = make_task(recipe)
    _check_described(folder, facts, task)
    model = task.model().eval().requires_grad_(False)
    weights = _load_weights(model, folder, manifest, averaged=recipe.ema.decay > 0)
    return OpenedRun(folder, facts, recipe, task, model, weights)


def _check_described(folder: Path, facts: Mapping[str, Any], task: Task) -> None:
    """What gives the model's outputs their meaning must be as it was trained with."""
    there, here = facts.get("data"), json.loads(json.dumps(redact(dict(task.describe()))))
    for key in _MEANINGS:
        if isinstance(there, dict) and key in there and there[key] != here.get(key):
            raise BadInputError(
                f"{folder}: the data here has other {key} than the run was trained with; give the place of "
                "that data by --set data.path=…"
            )


def _read_manifest(folder: Path) -> tuple[Manifest, Mapping[str, Any]]:
    path = folder / "manifest.json"
    try:
        facts = strict_json.parse(path.read_bytes())
        check_format(folder, facts)
        return Manifest.model_validate(facts), facts
    except OSError as error:
        raise BadInputError(f"{path}: can't be read ({error.strerror}); give a run folder") from error
    except ValueError as error:  # pydantic's, too
        raise BadInputError(f"{path}: isn't the manifest of a run; give a run folder") from error


def _recipe_of(folder: Path, manifest: Manifest, settings: Sequence[str]) -> Recipe:
    for setting in settings:
        if setting.partition("=")[0].strip() not in _ELSEWHERE:
            raise BadInputError(
                f"--set {setting}: the model is the run's as it was trained; only what says where the data "
                "lies can be set, such as data.path"
            )
    config = override(dict(manifest.config), [*settings, *_NOT_NOW])
    for name, value in flat(config).items():
        if REDACTED in str(value):
            raise BadInputError(f"{folder}: {name} was redacted; give it with --set {name}=…")
    return validated(Recipe, config, str(folder / "manifest.json"))


def _load_weights(model: nn.Module, folder: Path, manifest: Manifest, averaged: bool) -> str:
    """Puts the weights into a model, in place; returns where they come from."""
    name = "ema.safetensors" if averaged else "model.safetensors"
    if name in manifest.weights:
        state, average, source = (
            _final(folder / name, manifest.weights[name]),
            dict[str, torch.Tensor](),
            name,
        )
    else:
        state, average, source = _checkpointed(folder)
    try:
        model.load_state_dict(state)
        # A checkpoint holds the average of each parameter once, also of one that two names share.
        for parameter, tensor in model.named_parameters():
            if average:
                tensor.copy_(average[parameter])
    except (RuntimeError, KeyError) as error:
        first = str(error).strip().splitlines()[-1].strip()
        raise BadInputError(f"{folder / source}: isn't of the manifest's model ({first})") from error
    return source


def _final(file: Path, digest: str) -> dict[str, torch.Tensor]:
    try:
        if file_hash(file) != digest:
            raise BadInputError(f"{file}: isn't what the run wrote (another hash); bring that back")
        return safetensors.torch.load_file(file)
    except OSError as error:
        raise BadInputError(f"{file}: can't be read ({error.strerror}); bring it back") from error
    except SafetensorError as error:
        raise BadInputError(f"{file}: isn't a safetensors file; bring it back") from error


def _checkpointed(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    """The newest checkpoint's weights and buffers, the average (maybe empty), and its name."""
    try:
        found, skipped = newest_good(folder / FOLDER)
    except (OSError, Unreadable) as error:
        raise BadInputError(f"{folder / FOLDER}: can't be read ({error}); mend that") from error
    if found is None:
        why = f" ({skipped[0]})" if skipped else ""
        raise BadInputError(
            f"{folder}: holds no weights yet, nor a good checkpoint{why}; train it, or go on with it by "
            f"--out {folder}"
        )
    kind = "ema" if "ema" in found.tensors else "model"
    source = f"{FOLDER}/{found.path.name}/{kind}.safetensors"
    return found.tensors["model"], found.tensors.get("ema", {}), source


def inputs_of(run: OpenedRun, batch: Batch) -> tuple[torch.Tensor, ...]:
    """What the run's model is called with for a batch.

    Raises:
        BadInputError: If the run's task doesn't say.
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
        BadInputError: If one can't be decoded and the recipe says that this is a failure.
    """
    out = {
        name: np.zeros((len(samples), *field.shape), field.dtype) for name, field in dataset.fields.items()
    }
    dataset.read(samples, None, out)
    fields = {name: torch.from_numpy(array) for name, array in out.items()}
    return Batch(fields, None, None, dataset.num_items * len(samples))


def some_samples(dataset: Dataset, count: int) -> Ints:
    """So many samples from all over a data set, again from its start where it has fewer: int64 (count,)."""
    return np.resize(spread(len(dataset), count), count)
