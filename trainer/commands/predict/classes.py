"""Classes with their probabilities, as a table."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.config.redact import redact_text
from trainer.data.batch import Batch
from trainer.data.corrupt import Corrupt
from trainer.data.dataset import spread
from trainer.data.formats.records import LABEL
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, BadInputError
from trainer.observe.text import plain
from trainer.train.components.task import device_kind
from trainer.train.model_of_run import OpenedRun, inputs_of, read_samples

Item = TypeVar("Item")
Reader = Callable[[Path, OpenedRun], Any]  # returns an array or a tensor

_TOGETHER = 64
_LOOKED_AT = 1000  # samples of the evaluation data, of which some are shown
_WIDTH = 160  # of a table that goes to a file or a pipe


class Guess(NamedTuple):
    """Prediction for one sample.

    Attributes:
        name: Name of the file or the sample.
        classes: Classes, the likeliest first.
        probabilities: Probabilities of these classes.
        truth: The true class, where it is known.
    """

    name: str
    classes: list[str]
    probabilities: list[float]
    truth: str | None = None

    @property
    def mistaken(self) -> bool:
        """Returns True if the true class is known and isn't the first."""
        return self.truth is not None and self.truth != self.classes[0]


def probabilities(run: OpenedRun, fields: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Computes the probabilities of every class, float32 (n, classes), on the GPU if there is one.

    Args:
        run: A run whose model returns logits.
        fields: Fields of its data set, (n, ...) each, on the CPU.
    """
    device = torch.device(device_kind(run.recipe))
    model = run.model.to(device)
    count, several = len(next(iter(fields.values()))), bool(run.task.describe().get("several"))
    parts = list[torch.Tensor]()
    with torch.no_grad():
        for start in range(0, count, _TOGETHER):
            part = {name: field[start : start + _TOGETHER].to(device) for name, field in fields.items()}
            batch = Batch(part, None, None, min(_TOGETHER, count - start))
            logits = model(*inputs_of(run, batch)).float()
            parts.append((logits.sigmoid() if several else logits.softmax(1)).cpu())
    return torch.cat(parts)


def guesses(
    names: Sequence[str],
    found: torch.Tensor,
    classes: Sequence[str],
    top: int,
    truth: Sequence[int] | None = None,
) -> list[Guess]:
    """Returns the likeliest classes of each sample.

    Args:
        names: Names of the samples.
        found: Probabilities (n, classes).
        classes: Names of the classes.
        top: Number of classes to name, at most.
        truth: The true classes, where they are known.
    """
    values, order = found.topk(min(top, len(classes)), dim=1)
    right = [None] * len(names) if truth is None else [classes[number] for number in truth]
    return [
        Guess(name, [classes[number] for number in numbers], shares, known)
        for name, numbers, shares, known in zip(names, order.tolist(), values.tolist(), right, strict=True)
    ]


def show_files(run: OpenedRun, options: argparse.Namespace, field: str, read: Reader) -> int:
    """Prints predictions for files, or for evaluation data without any; returns the exit code.

    Args:
        run: The run.
        options: Options of the command line.
        field: Field of the data set that holds the samples.
        read: Reads a file as evaluation would; raises Corrupt or BadInputError.
    """
    if not options.files:
        of_evaluation(run, options)
        return EXIT_DONE
    items = read_each(options.files, lambda path: read(path, run))
    if items:
        names, samples = zip(*items, strict=True)
        label = torch.zeros(len(samples), dtype=torch.int64)
        fields = {field: torch.stack([torch.as_tensor(one) for one in samples]), LABEL: label}
        classes = run.task.describe()["classes"]
        show_table("file", guesses(names, probabilities(run, fields), classes, options.top))
    return code_for(items, options.files)


def of_evaluation(run: OpenedRun, options: argparse.Namespace) -> None:
    """Prints predictions for evaluation samples, confident mistakes first."""
    dataset, classes = run.task.evaluation_data, run.task.describe()["classes"]
    samples = spread(len(dataset), max(_LOOKED_AT, options.samples))
    fields: Mapping[str, torch.Tensor] = read_samples(dataset, samples).fields
    names = [f"sample {number}" for number in samples.tolist()]
    found = probabilities(run, fields)
    if fields[LABEL].ndim == 2:  # several classes of each, none of which is the right one
        shown = spread(len(names), options.samples).tolist()
        show_table("evaluation data", guesses([names[n] for n in shown], found[shown], classes, options.top))
        return
    all_guesses = guesses(names, found, classes, options.top, fields[LABEL].tolist())
    order = sorted(all_guesses, key=lambda guess: (not guess.mistaken, -guess.probabilities[0]))
    wrong = sum(guess.mistaken for guess in all_guesses)
    # After the mistakes those from all over, not the surest alone.
    rest, room = order[wrong:], max(0, options.samples - wrong)
    shown = [*order[:wrong][: options.samples], *(rest[n] for n in spread(len(rest), room).tolist())]
    show_table("evaluation data", shown)
    count = len(all_guesses)
    print(f"{count - wrong:,} of {count:,} samples looked at are right ({1 - wrong / count:.2%})")


def read_each(paths: Sequence[Path], read: Callable[[Path], Item]) -> list[tuple[str, Item]]:
    """Reads files and returns their contents by name; prints an error line for each that can't be read."""
    items = list[tuple[str, Item]]()
    for path in paths:
        try:
            items.append((str(path), read(path)))
        except (BadInputError, Corrupt) as error:
            named = str(error) if str(error).startswith(f"{path}:") else f"{path}: {error}"
            line = " ".join(redact_text(named).split())
            print(f"trainer: {plain(line, 400)}", file=sys.stderr)
    return items


def code_for(items: Sequence[object], paths: Sequence[Path]) -> int:
    """Returns the exit code: 0 if all files could be read, 1 if some, 2 if none."""
    if not items:
        return EXIT_BAD_INPUT
    return EXIT_FAILED if len(items) < len(paths) else EXIT_DONE


def show_table(what: str, found: Sequence[Guess]) -> None:
    """Prints a row for each sample: its class, probability, true class if known, and the runners-up."""
    known = any(guess.truth is not None for guess in found)
    table = Table(box=None, header_style="dim", pad_edge=False)
    for title in (what, "class", "probability", *(["truth"] if known else []), "then"):
        table.add_column(title, justify="right" if title == "probability" else "left", overflow="fold")
    for guess in found:
        others = zip(guess.classes[1:], guess.probabilities[1:], strict=True)
        then = ", ".join(f"{name} {share:.1%}" for name, share in others)
        right = [_text(guess.truth or "", guess.mistaken)] if known else []
        likeliest = _text(guess.classes[0], guess.mistaken)
        table.add_row(_text(guess.name), likeliest, f"{guess.probabilities[0]:.1%}", *right, _text(then))
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)


def show_rows(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table of plain text."""
    table = Table(*titles, box=None, header_style="dim", pad_edge=False)
    for row in rows:
        table.add_row(*(_text(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)


def _text(words: str, bad: bool = False) -> Text:
    # Not a string: rich would take [brackets] in a file's name for its markup.
    return Text(plain(words.replace("\n", "\\n"), 200), style="red" if bad else "")
