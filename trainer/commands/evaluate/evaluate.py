"""What `trainer evaluate` was asked for, and the ranks that do it."""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from trainer.commands.evaluate.rank import RESULT, measure
from trainer.commands.evaluate.show import MOST_DRAWN, as_json, chart, lines
from trainer.distributed.parallel import World
from trainer.errors import EXIT_DONE, BadInputError
from trainer.launch.launcher import launch
from trainer.train.local_ranks import plan_local_ranks
from trainer.train.model_of_run import open_run
from trainer.train.run import device_kind

_RANK = "trainer.commands.evaluate.rank"
_GRACE_SECONDS = 5.0


def evaluate_run(options: argparse.Namespace) -> int:
    """Measures with as many ranks as asked for, and prints.

    The metrics are those that training measures, to the last bit on the same device with the same threads,
    whatever the number of ranks.

    Args:
        options: As the command line has them.

    Returns:
        Exit code: 0, or that of the ranks.

    Raises:
        BadInputError: If there is no such run, checkpoint or data, or the data has other classes.
    """
    if options.plot is not None and options.plot.suffix != ".svg":
        raise BadInputError(f"--plot {options.plot}: give a file name that ends in .svg")
    folder, weights = _folder_of(options.run_or_weights)
    opened = open_run(folder, options.set, options.checkpoint, weights, options.on, options.trust)
    if options.plot is not None and opened.recipe.task not in ("classification", "audio"):
        raise BadInputError(f"--plot: task={opened.recipe.task} has no confusion matrix")
    if options.plot is not None and len(opened.task.describe()["classes"]) > MOST_DRAWN:
        raise BadInputError(f"--plot: at most {MOST_DRAWN} classes can be drawn; --json has the matrix")
    request = {
        "folder": str(folder),
        "settings": list(options.set),
        "checkpoint": options.checkpoint,
        "weights": weights,
        "on": options.on,
    }
    local = plan_local_ranks(opened.recipe, options.gpus, options.nproc_per_node)
    if local.ranks == 1:
        # Here: RANK and its like in the environment are somebody else's.
        os.environ.update(local.variables())
        device = torch.device("cuda", 0) if device_kind(opened.recipe) == "cuda" else torch.device("cpu")
        told = measure(opened, World(0, 1, 0, device, None))
    else:
        del opened
        with tempfile.TemporaryDirectory(prefix="trainer-evaluate-", ignore_cleanup_errors=True) as beside:
            request["result"] = str(Path(beside) / RESULT)
            code = launch(_RANK, request, local, grace_seconds=_GRACE_SECONDS)
            if code != EXIT_DONE:
                return code
            told = json.loads(Path(request["result"]).read_text())
    _print(told, options)
    return EXIT_DONE


def _folder_of(path: Path) -> tuple[Path, str | None]:
    """The run folder, and which of its files with weights was named."""
    if path.suffix != ".safetensors":
        return path, None
    if not (path.parent / "manifest.json").is_file():
        raise BadInputError(
            f"{path}: isn't in a run folder, whose manifest.json says which model and data it is of; "
            "give a run folder"
        )
    return path.parent, path.name


def _print(told: dict[str, Any], options: argparse.Namespace) -> None:
    if options.plot is not None:
        try:
            options.plot.write_text(chart(told["confusion"], told["classes"]))
        except OSError as error:
            raise BadInputError(f"--plot {options.plot}: can't be written ({error.strerror})") from error
    print(as_json(told) if options.json else "\n".join(lines(told)))
    if options.plot is not None and not options.json:
        print(f"confusion matrix: {options.plot}")
