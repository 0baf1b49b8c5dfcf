"""`trainer evaluate`: checks the options, measures in this process or in ranks that it starts, and prints."""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from trainer.commands.evaluate.rank import RESULT, asked, measure_run
from trainer.commands.evaluate.show import MOST_DRAWN, chart, evaluation_json, evaluation_lines
from trainer.distributed.parallel import World
from trainer.errors import EXIT_DONE, BadInputError, writing
from trainer.host.files import check_replaceable, write_whole
from trainer.host.latest import MANIFEST
from trainer.launch.launcher import launch
from trainer.observe.text import without_controls
from trainer.train.components.task import device_kind
from trainer.train.start.local_ranks import plan_local_ranks

_RANK_MODULE = "trainer.commands.evaluate.rank"
_GRACE_SECONDS = 5.0


def evaluate_and_print(options: argparse.Namespace) -> int:
    """Evaluates a run or a file of weights with as many ranks as requested, and prints the metrics.

    The metrics are those that the evaluation during training gives: to the last bit on the same device with
    the same number of CPU threads, whatever the number of ranks.

    Args:
        options: Options of the command line.

    Returns:
        Exit code: 0, or the ranks' exit code.

    Raises:
        BadInputError: If there is no such run, checkpoint or data, the data has other classes than the model,
            or --plot can't be drawn or written.
    """
    if options.plot is not None:
        if options.plot.suffix != ".svg":
            raise BadInputError(f"--plot {options.plot}: give a file name that ends in .svg")
        with writing(f"--plot {options.plot}"):
            check_replaceable(options.plot)
    request = _request(options)
    opened = asked(request, options.trust)
    if options.plot is not None and opened.recipe.task not in ("classification", "audio"):
        raise BadInputError(f"--plot: task={opened.recipe.task} has no confusion matrix")
    if options.plot is not None and len(opened.task.describe()["classes"]) > MOST_DRAWN:
        raise BadInputError(f"--plot: at most {MOST_DRAWN} classes can be drawn; --json has the matrix")
    local = plan_local_ranks(opened.recipe, options.gpus, options.nproc_per_node)
    if local.ranks == 1:
        # In this process: the RANK and the like that it inherited may be another job's.
        os.environ.update(local.variables())
        device = torch.device("cuda", 0) if device_kind(opened.recipe) == "cuda" else torch.device("cpu")
        result = measure_run(opened, World(0, 1, 0, device, None))
    else:
        del opened
        with tempfile.TemporaryDirectory(prefix="trainer-evaluate-", ignore_cleanup_errors=True) as folder:
            request["result"] = str(Path(folder) / RESULT)
            code = launch(_RANK_MODULE, request, local, grace_seconds=_GRACE_SECONDS)
            if code != EXIT_DONE:
                return code
            result = json.loads(Path(request["result"]).read_text())
    _print(result, options)
    return EXIT_DONE


def _request(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the request to the ranks: a run and which of its weights, or a recipe and a file of weights."""
    what = options.what
    request = {"what": what, "file": options.weights, "settings": list(options.set), "on": options.on}
    if options.weights is not None:
        if options.checkpoint is not None:
            raise BadInputError(
                f"--weights {options.weights} and --checkpoint {options.checkpoint}: give one of them; a "
                "checkpoint is a run's own"
            )
        return request
    folder, name = Path(what), None
    if folder.suffix == ".safetensors":
        folder, name = folder.parent, folder.name
        if not (folder / MANIFEST).is_file():
            raise BadInputError(
                f"{what}: isn't in a run folder, whose manifest.json names the model and the data; "
                f"give a run folder, or a recipe: trainer evaluate --weights {what} RECIPE"
            )
    return request | {"what": str(folder), "checkpoint": options.checkpoint, "weights": name}


def _print(result: dict[str, Any], options: argparse.Namespace) -> None:
    lines = "\n".join(evaluation_lines(result))
    print(evaluation_json(result) if options.json else without_controls(lines))
    if options.plot is not None:
        with writing(f"--plot {options.plot}"):
            write_whole(options.plot, chart(result["confusion"], result["classes"]))
        if not options.json:
            print(f"confusion matrix: {options.plot}")
