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
from trainer.errors import EXIT_DONE, BadInputError, writing
from trainer.host.files import check_replaceable, write_whole
from trainer.host.latest import MANIFEST
from trainer.launch.launcher import launch
from trainer.observe.text import escaped, table, without_controls
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
            or --plot or --coco can't be made or written.
    """
    if options.plot is not None:
        if options.plot.suffix != ".svg":
            raise BadInputError(f"--plot {options.plot}: give a file name that ends in .svg")
        with writing(f"--plot {options.plot}"):
            check_replaceable(options.plot)
    request = _request(options)
    opened = asked(request)
    if options.plot is not None and (
        opened.recipe.task not in ("classification", "audio") or opened.task.describe().get("several")
    ):
        raise BadInputError(
            f"--plot: task={opened.recipe.task} has no confusion matrix, nor have images of several classes"
        )
    if options.plot is not None and len(opened.task.describe()["classes"]) > MOST_DRAWN:
        raise BadInputError(f"--plot: at most {MOST_DRAWN} classes can be drawn; --json has the matrix")
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
    _print(result, options)
    if options.coco is not None:
        if result["replaced"]:
            raise BadInputError(
                f"--coco {options.coco}: {result['replaced']:,} images can't be decoded, and others stood in "
                "for them; mend or remove them"
            )
        write_results(options.coco, found)
    return EXIT_DONE


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


def _print(result: dict[str, Any], options: argparse.Namespace) -> None:
    lines = "\n".join(evaluation_lines(result))
    print(evaluation_json(result) if options.json else without_controls(lines))
    if options.plot is not None:
        with writing(f"--plot {options.plot}"):
            write_whole(options.plot, chart(result["confusion"], result["classes"]))
        if not options.json:
            print(f"confusion matrix: {options.plot}")


_MOST_CLASSES = 40  # in a table; the JSON has all of them
MOST_DRAWN = 200  # classes in a picture, which is 6 MB then
_CELL, _LETTER, _MOST_LETTERS = 18, 6, 20  # pixels of the picture; letters of a class's name


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
                for row in rows[:_MOST_CLASSES]
            ],
            left=(0, 5),
        )
        if len(rows) > _MOST_CLASSES:
            yield f"{len(rows) - _MOST_CLASSES} more classes: --json has all of them"


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


def chart(confusion: Iterable[Sequence[int]], classes: Sequence[str]) -> str:
    """Draws the confusion matrix as SVG: a row for each true class, darker for larger fractions of it."""
    matrix = [[0] * len(classes) for _ in classes]
    for true, taken_for, count in confusion:
        matrix[true][taken_for] = count
    names = [name if len(name) <= _MOST_LETTERS else f"{name[: _MOST_LETTERS - 1]}…" for name in classes]
    margin = 30 + _LETTER * max(map(len, names))
    size = max(margin + _CELL * len(classes) + 10, 220)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" width="{size}" height="{size}" '
        'font-family="sans-serif" font-size="10">',
        f'<rect width="{size}" height="{size}" fill="#ffffff"/>',
        '<text x="4" y="12" fill="#555555">predicted (across), true (down)</text>',
    ]
    for row, (name, counts) in enumerate(zip(names, matrix, strict=True)):
        middle = margin + row * _CELL + _CELL / 2
        label = escaped(name)
        parts.append(f'<text x="{margin - 4}" y="{middle + 3:g}" text-anchor="end">{label}</text>')
        parts.append(f'<text transform="translate({middle + 3:g} {margin - 4}) rotate(-90)">{label}</text>')
        for column, count in enumerate(counts):
            share = count / max(1, sum(counts))
            x, y = margin + column * _CELL, margin + row * _CELL
            fill = f"hsl(231 60% {97 - 60 * share:.0f}%)"
            parts.append(
                f'<rect x="{x}" y="{y}" width="{_CELL - 1}" height="{_CELL - 1}" fill="{fill}">'
                f"<title>{label} as {escaped(classes[column])}: {count}</title></rect>"
            )
            if count and len(classes) <= 20:
                ink = "#ffffff" if share > 0.5 else "#222222"
                parts.append(
                    f'<text x="{x + _CELL / 2 - 0.5:g}" y="{y + _CELL / 2 + 3:g}" text-anchor="middle" '
                    f'font-size="7" fill="{ink}">{count}</text>'
                )
    return "\n".join([*parts, "</svg>\n"])


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
