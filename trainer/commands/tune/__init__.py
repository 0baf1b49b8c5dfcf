"""`trainer tune RECIPE`: finds the micro-batch for this machine (`train.start.tune`)."""

import argparse
from pathlib import Path
from typing import Any

from trainer.runs.flags import add_settings


def add_parser(commands: Any) -> None:
    """Adds `tune` to the commands."""
    tune = commands.add_parser(
        "tune",
        help="Find the largest micro-batch that fits in memory. Exit code 1 (--check): the recipe's doesn't.",
        allow_abbrev=False,
    )
    tune.add_argument("recipe", metavar="RECIPE", help="name of a recipe, or path of a YAML file")
    add_settings(tune)
    tune.add_argument("--gpus", metavar="N|LIST", help="as of trainer train")
    tune.add_argument("--nproc-per-node", type=int, metavar="N", help="as of trainer train")
    tune.add_argument(
        "--out", type=Path, default=Path("tuned.yaml"), metavar="FILE", help="(default: tuned.yaml)"
    )
    tune.add_argument(
        "--check",
        action="store_true",
        help="only tell whether the recipe's own micro-batch fits, in one probe; writes nothing",
    )
    tune.add_argument("--tuned", type=Path, metavar="FILE", help="for --check: as of trainer train")
    tune.add_argument(
        "--seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="after so long no larger one is tried (default: 600)",
    )
    tune.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from trainer.config.recipe_file import provisional
    from trainer.runs.trust import check_recipe
    from trainer.train.start.tune.tuned import with_tuned

    recipe, _ = provisional(
        options.recipe, with_tuned(options.tuned, options.set)
    )  # before torch is imported
    check_recipe(options.recipe, recipe, options.set)
    from trainer.commands.tune.tune import tune

    return tune(options)
