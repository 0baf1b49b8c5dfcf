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
        "evaluate", help="Evaluate a run, or a file of weights.", allow_abbrev=False
    )
    add = evaluate.add_argument
    add(
        "what",
        metavar="RUN|WEIGHTS|RECIPE",
        help="run folder, latest, or model.safetensors or ema.safetensors of a run; with --weights a recipe",
    )
    add(
        "--weights",
        metavar="FILE",
        help="weights to measure on the data of a recipe: a safetensors file, "
        "hub:ORG/NAME@REVISION or torchvision:WEIGHTS (as model.pretrained)",
    )
    add(
        "--checkpoint",
        metavar="best|last|STEP",
        help="checkpoint with the weights (default: the final weights, or the newest checkpoint)",
    )
    add_settings(evaluate, "other data, such as data.path; with --weights any key of the recipe")
    add("--on", default="data", metavar="SET", help="name of an evaluation set (default: data, the main one)")
    add("--json", action="store_true", help="print JSON")
    add_coco(evaluate)
    add("--gpus", metavar="N|LIST", help="number of GPUs or their indices (default: all)")
    add("--nproc-per-node", type=int, metavar="N", help="number of CPU processes (default: 1)")
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
