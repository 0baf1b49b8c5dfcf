"""Measures the weights of a file on a recipe's evaluation data: `trainer evaluate --weights FILE RECIPE`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from trainer.config.recipe import Recipe
from trainer.config.recipe_file import load_recipe
from trainer.errors import BadInputError
from trainer.models.precision import set_matmul_mode
from trainer.models.pretrained import find_weights
from trainer.models.weights import load_initial
from trainer.tasks import Task
from trainer.train.components.task import make_task, more_sets
from trainer.train.model_of_run import NOT_NOW, with_set


class OpenedWeights(NamedTuple):
    """A recipe with weights of a file, with the fields that `OpenedRun` has.

    Attributes:
        folder: The recipe's name as typed, in place of a run folder.
        recipe: The configuration.
        task: The recipe's task, with its data.
        model: The model on the CPU, in evaluation mode, without gradients.
        weights: The file, and how many of its tensors were taken.
        threads: Compute threads of each rank.
    """

    folder: str
    recipe: Recipe
    task: Task
    model: nn.Module
    weights: str
    threads: int


def open_weights(name: str, file: str, settings: Sequence[str], on: str) -> OpenedWeights:
    """Opens a recipe's data and model, and loads all weights of a file into it.

    Args:
        name: The recipe.
        file: A source as in model.pretrained: a safetensors file, hub:… or torchvision:….
        settings: KEY=VALUE, of any key.
        on: The evaluation set.

    Raises:
        BadInputError: If the recipe, its data or the weights aren't there, or they are another model's.
    """
    if Path(name).is_dir():
        raise BadInputError(
            f"{name} is a folder: --weights needs a recipe, such as {Path(name) / 'config.yaml'}; leave it "
            "out to measure a run's own weights"
        )
    settings = [*settings, *NOT_NOW]
    recipe = with_set(load_recipe(name, settings), on)
    set_matmul_mode(recipe.precision.model_copy(update={"mode": "fp32"}))
    task = make_task(recipe)
    task.evaluation_data = more_sets(task).get(on, task.evaluation_data)
    model = task.model().eval().requires_grad_(False)
    try:
        found = find_weights(load_recipe(name, [*settings, f"model.pretrained={json.dumps(file)}"]).model)
        assert found is not None
        taken = load_initial(model, found.file, None)
    except BadInputError as error:
        raise BadInputError(str(error).replace("model.pretrained", "--weights", 1)) from error
    threads = torch.get_num_threads() if recipe.parallel.threads == "auto" else recipe.parallel.threads
    return OpenedWeights(name, recipe, task, model, f"{file} ({taken})", threads)
