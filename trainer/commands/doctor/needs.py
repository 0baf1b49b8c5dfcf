"""Requirements of a recipe, for the checks."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.commands.doctor.facts import Gpus, RecipeNeeds
from trainer.config.formats import FORMATS
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import provisional
from trainer.data.workers import Sizes, by_rule, bytes_needed
from trainer.host.limits import Limits


def read_for_needs(recipe: str, settings: Sequence[str]) -> Recipe:
    """Reads a recipe as `trainer train` would; its own micro-batch size stands in for `auto`.

    Raises:
        BadInputError: For the first thing that is wrong.
    """
    return provisional(recipe, settings)[0]


def make_needs(name: str, recipe: Recipe, limits: Limits, gpus: Gpus) -> RecipeNeeds:
    """Computes the requirements of a run on this machine.

    Args:
        name: Name of the recipe.
        recipe: The recipe.
        limits: Limits of the container.
        gpus: The GPUs: one rank each.
    """
    ranks = max(1, len(gpus.cards)) if recipe.device != "cpu" else 1
    data = recipe.data
    if not FORMATS[data.name].workers:
        return RecipeNeeds(recipe=name, ranks=ranks)
    sample = 3 * data.image_size**2  # uint8, as it lies in the ring
    sizes = Sizes(
        sample,
        sample * data.micro_batch_size,
        sample * data.eval_batch_size,
        evaluation_sets=1 + len(recipe.evaluation.sets),
        workers=data.workers,
    )
    chosen = by_rule(data.workers, data.prefetch, sizes, limits, ranks)
    return RecipeNeeds(name, chosen.workers, ranks * bytes_needed(chosen, sizes), ranks)
