"""Runs `trainer check`, for the command and for `trainer.check` in a notebook; its table."""

import argparse
import contextlib
import io
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.commands.check.exchange import launched
from trainer.commands.check.training import BATCH, SAMPLES, STEPS, Subject, open_subject
from trainer.commands.check.variants import BAD, NAMES, VariantLaunch, VariantRow
from trainer.commands.check.verdicts import check_all, draws
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import load_recipe, make_recipe
from trainer.config.suggest import nearest
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError
from trainer.observe.text import without_controls
from trainer.tasks import Task
from trainer.tasks.custom import CustomTask, object_of, recipe_of
from trainer.train.components.operations import random_state_kept
from trainer.train.components.task import check_request, make_task

_ELSEWHERE = (
    "needs another process, which can't see a class of a notebook: put it in a file, trainer check FILE"
)
_NOT_LOOKED_AT = (
    f"steps after the first {STEPS}, samples after the first {SAMPLES} (only `order` takes all)",
    "GPUs: their kernels, NCCL, and several hosts",
    "whether evaluations in bf16 and fp16 are autocast: metrics differ by less than such rounding",
    "several changed settings at once, such as fp16 on two ranks",
    "hooks, further evaluation sets, the choice of the best checkpoint, early stopping, anomaly.nonfinite",
    "what the trainer and the plain loop share: the task's methods, weights to start from and LoRA, the keys "
    "of random numbers, the assignment of samples to micro-batches, the rounding of the learning rate to "
    "float32",
)
_NARROWEST, _WIDEST = 60, 140  # columns of the table
_INDENT = 34
_OURS = "trainer: "  # begins the lines of `warn`


@dataclass(frozen=True)
class Report:
    """The result of a check.

    Attributes:
        name: The recipe or task.
        about: Device, precision and sizes, in a line.
        rows: One for each variant: name, what, verdict, detail, tensor, step.
        warnings: Warnings of the trainer about the task.
        not_looked_at: What no variant looks at.
    """

    name: str
    about: str
    rows: tuple[VariantRow, ...]
    warnings: tuple[str, ...] = ()
    not_looked_at: tuple[str, ...] = _NOT_LOOKED_AT

    @property
    def ok(self) -> bool:
        """True if no variant differs, other than as documented, and none crashed."""
        return not any(row.verdict in BAD for row in self.rows)

    def __str__(self) -> str:
        """The table."""
        return "\n".join(report_lines(self))


def check(
    task: str | Path | object, settings: Mapping[str, Any] | None = None, only: Collection[str] = ()
) -> Report:
    """Trains a few steps as the trainer does and as plain PyTorch would, and compares all tensors.

    Then it changes one setting at a time: micro-batches, ranks, loader workers, precision (docs/check.md).

    Args:
        task: As for `fit`: a recipe's name, a file, or an object (or class) with the methods of a task.
        settings: Configuration keys, `{"optim.lr": 0.1}`.
        only: Names of the variants to run, such as "plain" and "ema"; by default all.

    Returns:
        A table to print; `ok`: no variant differs, other than as documented, and none crashed; `rows`: the
        variants.

    Raises:
        BadInputError: If the task can't be trained, with the remedy.
    """
    # JSON is YAML, so this is what --set takes.
    words = [f"{key}={json.dumps(value, default=str)}" for key, value in (settings or {}).items()]
    if isinstance(task, str | Path):
        recipe = load_recipe(str(task), words)
        return _check(str(task), recipe, None, only)
    own = object_of(task, "check")
    name = type(own).__name__
    recipe = make_recipe(recipe_of(own), words, name)
    return _check(name, recipe, CustomTask(own, name), only)


def run_check(options: argparse.Namespace) -> int:
    """Runs `trainer check`.

    Returns:
    0 if no variant differs, other than as documented, and none crashed; else 1.
    """
    shown = sys.stderr.isatty() and not options.json
    tell = _show_progress if shown else str
    words = list(options.set)
    if not any(word.startswith("data.micro_batch_size=") for word in words):
        words += [f"data.global_batch_size={BATCH}", f"data.micro_batch_size={BATCH}"]  # or it may be `auto`
    recipe = load_recipe(options.recipe, words)
    report = _check(options.recipe, recipe, None, options.only, tell)
    print(report_json(report) if options.json else without_controls(str(report)))
    return EXIT_DONE if report.ok else EXIT_FAILED


@contextlib.contextmanager
def deterministic(tell: Callable[[str], object]) -> Iterator[None]:
    """Context with one thread and torch's random state and switches put back."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        torch.set_num_threads(1)
        with random_state_kept():
            yield
    finally:
        tell("")
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)


def _check(
    name: str,
    recipe: Recipe,
    task: Task | None,
    only: Collection[str],
    tell: Callable[[str], object] = str,  # nothing
) -> Report:
    for one in only:
        if one not in NAMES:
            raise BadInputError(
                f"--only {one}: no such comparison{nearest(one, NAMES)} (there are: {', '.join(NAMES)})"
            )
    here: dict[str, VariantLaunch | str] = {"ranks": launched(2), "fresh": launched(1)}
    if task is not None:
        here = dict.fromkeys(here, _ELSEWHERE)
    with deterministic(tell):
        opened = make_task(recipe) if task is None else task
        said = list[str]()
        with _warnings_taken(said):
            subject = open_subject(name, recipe, opened)
            check_request(subject.recipe, opened, 1)
        rows = tuple(check_all(subject, only, here, tell))
        about = check_conditions(subject, draws(subject))
        return Report(name, about, rows, tuple(dict.fromkeys(said)))


def _show_progress(what: str) -> None:
    """Overwrites the progress line with another one, which names the current variant."""
    print(f"\r\033[K{f'checking: {what}' if what else ''}", end="", file=sys.stderr, flush=True)


def check_conditions(subject: Subject, draws: bool) -> str:
    """Describes the precision and the sizes of the check."""
    kind = "float64" if subject.double else f"float32 (in float64 {subject.why})"
    drawn = (
        "random numbers of the loss by the run's keys in both"
        if draws
        else "the loss draws no random numbers"
    )
    return f"{STEPS} steps of {BATCH} samples, {kind}, on the CPU, one thread; {drawn}"


@contextlib.contextmanager
def _warnings_taken(said: list[str]) -> Iterator[None]:
    """Context that takes the trainer's warnings from standard error; other lines stay there."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stderr(text):
            yield
    finally:
        for line in text.getvalue().splitlines():
            if line.startswith(_OURS):
                said.append(line.removeprefix(_OURS))
            else:
                print(line, file=sys.stderr)


def report_lines(report: Report) -> Iterator[str]:
    """Yields the lines of the table, as wide as the terminal, and its summary."""
    columns = min(max(shutil.get_terminal_size((100, 24)).columns, _NARROWEST), _WIDEST)
    yield from textwrap.wrap(
        f"{report.name}: the trainer against plain PyTorch; {report.about}", columns, subsequent_indent="  "
    )
    for row in report.rows:
        yield from row_lines(row, columns)
    for title, lines in (("warning", report.warnings), ("not looked at", report.not_looked_at)):
        for line in lines:
            yield from textwrap.wrap(
                f"{title}: {line}", columns, initial_indent="  ", subsequent_indent="    "
            )
    counts = {
        v: sum(row.verdict == v for row in report.rows)
        for v in ("equal", "documented", "differs", "crashed", "not compared")
    }
    tally = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    yield f"  {tally}" + ("" if report.ok else "; what each verdict means: docs/check.md")


def row_lines(row: VariantRow, columns: int) -> list[str]:
    """Formats a row of the table, on as many lines as it needs."""
    return textwrap.wrap(
        f"{row.what}: {row.detail}",
        columns,
        initial_indent=f"  {row.name:<16} {row.verdict:<13} ",
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def report_json(report: Report) -> str:
    """Formats the whole report as JSON."""
    rows: Sequence[dict[str, object]] = [asdict(row) for row in report.rows]
    told = {"warnings": report.warnings, "not_looked_at": report.not_looked_at}
    return json.dumps(
        {"name": report.name, "about": report.about, "ok": report.ok, "rows": rows, **told}, indent=2
    )
