"""`trainer recipes [NAME]`: lists the recipes, or prints one."""

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    """Adds `recipes` to the commands."""
    recipes = commands.add_parser("recipes", help="List the recipes, or print one.", allow_abbrev=False)
    recipes.add_argument(
        "name", nargs="?", metavar="NAME", help="print this one: trainer recipes digits > mine.yaml"
    )
    recipes.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from trainer.config.recipe_file import read_recipe, recipe_names, recipe_text

    if options.name is not None:
        print(recipe_text(options.name), end="")
        return 0
    for name in recipe_names():
        print(f"{name:<20} {read_recipe(name).get('about', '')}")
    return 0
