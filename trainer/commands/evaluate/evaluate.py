"""`trainer evaluate`: checks the options, measures in this process or in ranks that it starts, and prints."""

import argparse
import json
import math
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.commands.evaluate.rank import RESULT, asked, measure_run
from trainer.config.training import MAIN_SET
from trainer.data.left_out import LeftOut, left_out_line as line_of
from trainer.distributed.parallel import World
from trainer.errors import EXIT_DONE, BadInputError
from trainer.host.files import write_whole
from trainer.host.latest import EVALUATION, MANIFEST
from trainer.launch.launcher import launch
from trainer.observe.console import warn
from trainer.observe.text import table, without_controls
from trainer.tasks.coco_results import check_results, write_results
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
            or --coco can't be made or written.
    """
    request = _request(options)
    opened = asked(request)
    check_results(options.coco, opened.task)
    local = plan_local_ranks(opened.recipe, options.gpus, options.nproc_per_node)
    if local.ranks == 1:
        # In this process: the RANK and the like that it inherited may be another job's.
        os.environ.update(local.variables())
        device = torch.device("cuda", 0) if device_kind(opened.recipe) == "cuda" else torch.device("cpu")
        result = measure_run(opened, World(0, 1, 0, device, None), options.coco is not None)
    else:
        del opened
        with tempfile.TemporaryDirectory(prefix="trainer-evaluate-", ignore_cleanup_errors=True) as folder:
            request["result"] = str(Path(folder) / RESULT)
            code, _ = launch(_RANK_MODULE, request, local, grace_seconds=_GRACE_SECONDS)
            if code != EXIT_DONE:
                return code
            result = json.loads(Path(request["result"]).read_text())
    found = result.pop("results", [])
    if options.weights is None:
        _keep(result, Path(request["what"]))
    result.pop("mistakes", None)
    lines = without_controls("\n".join(evaluation_lines(result)))
    print(evaluation_json(result) if options.json else lines)
    if options.coco is not None:
        if result["replaced"]:
            raise BadInputError(
                f"--coco {options.coco}: {result['replaced']:,} images can't be decoded, and others stood in "
                "for them; mend or remove them"
            )
        write_results(options.coco, found)
    return EXIT_DONE


def _keep(result: dict[str, Any], folder: Path) -> None:
    """Writes the result into the run folder, for the report."""
    try:
        write_whole(folder / EVALUATION, evaluation_json(result))
    except OSError as error:
        warn(f"{folder / EVALUATION}: can't be written ({error}); the report won't show this evaluation")


def _request(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the request to the ranks: a run and which of its weights, or a recipe and a file of weights."""
    what = options.what
    request = {"what": what, "file": options.weights, "settings": list(options.set), "on": options.on}
    request["results"] = options.coco is not None
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


_IN_TABLE = 40  # in a table; the JSON has all of them


def evaluation_json(result: dict[str, Any]) -> str:
    """Formats the whole result as JSON; values that aren't finite are null, as in a run's metrics."""
    metrics = {name: value if math.isfinite(value) else None for name, value in result["metrics"].items()}
    more = {"per_class": per_class(result["confusion"], result["classes"])} if "confusion" in result else {}
    return json.dumps({**result, "metrics": metrics, **more}, indent=1)


def evaluation_lines(result: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of the table: metrics, then the details."""
    of = "" if result["set"] == MAIN_SET else f" of {result['set']}"
    yield f"{result['run']}: {result['weights']} on {result['samples']:,} samples{of}"
    yield "  " + "  ".join(f"{name} {value:.4f}" for name, value in result["metrics"].items())
    if result.get("left_out"):
        yield f"  {line_of([LeftOut(**one) for one in result['left_out']])}"
    if result.get("replaced"):
        yield f"  replaced: {result['replaced']:,} samples, which can't be decoded"
    if "coco" in result:
        yield table(("figure", "value"), [(name, _figure(value)) for name, value in result["coco"].items()])
    if "confusion" in result:
        rows = per_class(result["confusion"], result["classes"])
        names = ("class", "samples", "precision", "recall", "f1", "most often taken for")
        yield table(
            names,
            [
                (
                    row["class"],
                    f"{row['samples']:,}",
                    *(_figure(row[name]) for name in ("precision", "recall", "f1")),
                    row["confused_with"] or "",
                )
                for row in rows[:_IN_TABLE]
            ],
            left=(0, 5),
        )
        if len(rows) > _IN_TABLE:
            yield f"{len(rows) - _IN_TABLE} more classes: --json has all of them"


def per_class(confusion: Iterable[Sequence[int]], classes: Sequence[str]) -> list[dict[str, Any]]:
    """Returns precision, recall, F1 and the most frequent mistake of each class; None where a divisor is 0.

    Args:
        confusion: [true class, predicted class, samples] of each cell of the matrix that isn't empty.
        classes: Names of the classes.
    """
    predicted = Counter[int]()
    cells: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for true, taken_for, count in confusion:
        predicted[taken_for] += count
        cells[true][taken_for] = count
    rows = []
    for number, name in enumerate(classes):
        row = cells[number]
        right, samples = row.get(number, 0), sum(row.values())
        precision = right / predicted[number] if predicted[number] else None
        recall = right / samples if samples else None
        wrong = [(count, -other) for other, count in row.items() if other != number]
        rows.append(
            {
                "class": name,
                "samples": samples,
                "precision": precision,
                "recall": recall,
                "f1": 2 * right / (predicted[number] + samples) if predicted[number] + samples else None,
                "confused_with": classes[-max(wrong)[1]] if wrong else None,
            }
        )
    return rows


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
