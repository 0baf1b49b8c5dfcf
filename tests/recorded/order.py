"""The order of the samples of a recipe, by the trainer's own plan; no file of a run says it."""

import hashlib
from pathlib import Path

from trainer.commands.check.order import read_epochs
from trainer.config.recipe import Recipe
from trainer.config.yaml_text import parse_yaml
from trainer.train.components.task import make_plan, make_task


def tell(file: str) -> None:
    """Prints a hash of the order of the samples in three epochs of a recipe."""
    recipe = Recipe.model_validate(parse_yaml(Path(file).read_text(), file))
    digest = hashlib.sha256()
    for epoch in read_epochs(make_plan(recipe, make_task(recipe))):
        digest.update(f"{len(epoch)} ".encode() + epoch.astype("<i8").tobytes())
    print(digest.hexdigest())
