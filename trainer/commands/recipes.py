"""`trainer recipes`: lists the recipes."""

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    """Adds `recipes` to the commands."""
    recipes = commands.add_parser("recipes", help="List the recipes.", allow_abbrev=False)
    recipes.set_defaults(run=_run)


def _run(_: argparse.Namespace) -> int:
    from trainer.config.recipe_file import read_recipe, recipe_names

    for name in recipe_names():
        print(f"{name:<20} {read_recipe(name).get('about', '')}")
    return 0
