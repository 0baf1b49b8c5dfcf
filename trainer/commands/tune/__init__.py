"""`trainer tune RECIPE`: what micro-batch, workers and prefetch suit this box; see `trainer.train.tune`."""

import argparse
from pathlib import Path
from typing import Any

from trainer.errors import BadInputError


def add_parser(commands: Any) -> None:
    """Adds `tune` to the commands."""
    tune = commands.add_parser(
        "tune",
        help="find the largest micro-batch that fits, keeping the global batch, and the fastest loading; "
        "exit code 1 (--check): the recipe's own micro-batch doesn't fit",
        allow_abbrev=False,
    )
    tune.add_argument("recipe", metavar="RECIPE", help="name of a recipe, or path of a YAML file")
    tune.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key; repeatable"
    )
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
    tune.add_argument(
        "--lr",
        action="store_true",
        help="a learning-rate range test instead: the loss while optim.lr rises, and a suggestion; writes "
        "nothing; exit code 1: the loss never fell",
    )
    tune.add_argument("--lr-low", type=float, metavar="LR", help="where it begins (default: 1e-6)")
    tune.add_argument("--lr-high", type=float, metavar="LR", help="where it ends (default: 10)")
    tune.add_argument("--lr-steps", type=int, metavar="N", help="steps between them (default: 100)")
    tune.add_argument("--plot", type=Path, metavar="FILE", help="for --lr: write the curve (.svg)")
    tune.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from trainer.config.recipe_file import provisional
    from trainer.train.trust import check_recipe
    from trainer.train.tune.tuned import with_tuned

    recipe, _ = provisional(
        options.recipe, with_tuned(options.tuned, options.set)
    )  # before torch is imported
    check_recipe(options.recipe, recipe, options.set)
    if options.lr:
        from trainer.commands.tune.lr import tune_lr

        return tune_lr(options)
    for flag in ("plot", "lr_low", "lr_high", "lr_steps"):
        if getattr(options, flag) is not None:
            raise BadInputError(
                f"--{flag.replace('_', '-')} is for --lr, the learning-rate range test: give that, too"
            )
    from trainer.commands.tune.tune import tune

    return tune(options)
