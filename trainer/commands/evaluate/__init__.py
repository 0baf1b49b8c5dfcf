"""`trainer evaluate RUN`: measures a run's model, or other weights, on its own or on other data.

- `evaluate`: checks the request, starts the ranks, prints tables and JSON
- `weights`: opens a recipe's model with the weights of a file
- `rank`: the program of a rank: model, data, metrics
- `details`: metrics beyond those of training: per class, the confusion matrix, COCO's twelve figures
"""

import argparse
from pathlib import Path
from typing import Any

from trainer.errors import BadInputError
from trainer.host.latest import run_path
from trainer.runs.flags import add_coco, add_settings, add_task


def add_parser(commands: Any) -> None:
    """Adds `evaluate` to the commands."""
    evaluate = commands.add_parser(
        "evaluate",
        help="Evaluate a run, or a file of weights.",
        allow_abbrev=False,
    )
    evaluate.add_argument(
        "what",
        metavar="RUN|WEIGHTS|RECIPE",
        help="run folder, or latest; or model.safetensors or ema.safetensors in one; with --weights a recipe",
    )
    evaluate.add_argument(
        "--weights",
        metavar="FILE",
        help="measure these on the data of a recipe, without training: a safetensors file, "
        "hub:ORG/NAME@REVISION or torchvision:WEIGHTS (as model.pretrained)",
    )
    evaluate.add_argument(
        "--checkpoint",
        metavar="best|last|STEP",
        help="weights of this checkpoint (default: the final ones, or of the newest checkpoint)",
    )
    add_settings(evaluate, "other data, such as data.path; with --weights any key of the recipe")
    evaluate.add_argument(
        "--on",
        default="data",
        metavar="SET",
        help="one of the evaluation.sets (default: data, the main one)",
    )
    evaluate.add_argument("--json", action="store_true", help="print JSON")
    add_coco(evaluate)
    evaluate.add_argument("--gpus", metavar="N|LIST", help="which GPUs (default: all)")
    evaluate.add_argument("--nproc-per-node", type=int, metavar="N", help="processes on CPUs (default: 1)")
    add_task(evaluate)
    evaluate.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.weights is None:
        options.what = str(_run_of(options.what))
    from trainer.commands.evaluate.evaluate import evaluate_and_print

    return evaluate_and_print(options)


def _run_of(word: str) -> Path:
    """Returns the folder of the named run; a name that is none is refused before torch is imported."""
    from trainer.config.recipe_file import recipe_names
    from trainer.runs.manifest import read_run

    try:
        run = run_path(word)
        if run.suffix != ".safetensors":
            read_run(run)
        return run
    except (BadInputError, argparse.ArgumentTypeError) as error:
        if word not in recipe_names() and Path(word).suffix not in (".yaml", ".yml", ".py"):
            raise BadInputError(str(error)) from error
        raise BadInputError(
            f"{word}: is a recipe, which has no weights: give a run folder, or --weights FILE"
        ) from error
