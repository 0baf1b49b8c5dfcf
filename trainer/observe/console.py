"""The one console: what a person sees, without secrets; a bar on a terminal, now and then a line elsewhere.

Results go to standard output, warnings and the progress of other commands to standard error. Of the ranks
only the first one logs its run. Imports no torch, and rich only for a bar.

With `--log-format json` each line is an object with time, level, rank (null: the launcher) and message, and
there are no bars. `--quiet` leaves warnings and errors only, `--verbose` adds what a start does, and when.
"""

import contextlib
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from trainer.config.redact import redact_text
from trainer.observe.text import duration, seconds_left, without_controls

if TYPE_CHECKING:
    from rich.progress import Progress

_BAR_SECONDS = 0.25
_LINE_SECONDS = 2.0
_COUNT_SECONDS = 30.0  # at most between two lines of `progress_bar`, while something moves


Level = Literal["info", "warning", "error"]
Verbosity = Literal["quiet", "normal", "verbose"]
_BEGAN = time.monotonic()


class _Log:
    """Form of this process's lines: text or JSON, and the rank."""

    as_json = False
    rank: int | None = None
    verbosity: Verbosity = "normal"
    bars = True


def log_as_json(rank: int | None = None) -> None:
    """Writes lines as JSON from now on, in this process and its forks; `rank` is its rank, or None."""
    _Log.as_json, _Log.rank = True, rank


def set_verbosity(verbosity: Verbosity) -> None:
    """Sets how much this process and its forks print."""
    _Log.verbosity = verbosity


def without_bars() -> None:
    """Replaces progress bars by lines from now on, in this process and its forks."""
    _Log.bars = False


class Told(NamedTuple):
    """Form of the lines of all processes of a launch.

    Attributes:
        as_json: Whether their lines are JSON.
        verbosity: How much the first rank prints.
        bars: Whether it draws a bar on a terminal.
    """

    as_json: bool = False
    verbosity: Verbosity = "normal"
    bars: bool = True


def told_here() -> Told:
    """Returns the form of this process's lines."""
    return Told(_Log.as_json, _Log.verbosity, _Log.bars)


def tell_as(log: Told, rank: int) -> None:
    """Sets up a rank's output like its launcher's; --verbose details come from the first rank alone."""
    set_verbosity("normal" if rank and log.verbosity == "verbose" else log.verbosity)
    _Log.bars = log.bars
    if log.as_json:
        log_as_json(rank)


def as_line(text: str, level: Level) -> str:
    """Returns the line to write for a text, without secrets: the text, or a JSON object."""
    text = without_controls(redact_text(text))
    if not _Log.as_json:
        return text
    now = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
    message = text.strip().removeprefix("trainer: ").removeprefix("error: ")
    return json.dumps({"time": now, "level": level, "rank": _Log.rank, "message": message})


def say(line: str) -> None:
    """A line on standard output; of several lines, as JSON, each that isn't blank is one."""
    if _Log.verbosity == "quiet":
        return
    lines = [one for one in line.splitlines() if one.strip()] if _Log.as_json else [line]
    try:
        for one in lines:
            print(as_line(one, "info"), flush=True)
    except OSError:  # the reader is gone (`| head`): that is no reason to end what goes on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def detail(line: str) -> None:
    """A line for --verbose, after the seconds since this process began."""
    if _Log.verbosity == "verbose":
        say(f"  {time.monotonic() - _BEGAN:7.2f} s  {line}")


def warn(line: str) -> None:
    """A line on standard error, after the program's name."""
    tell(f"trainer: {line}", "warning")


def tell(text: str, level: Level = "info") -> None:
    """A text on standard error: a line, or a line with a traceback below it."""
    with contextlib.suppress(OSError):  # nobody reads it, or its disk is full
        print(as_line(text.removesuffix("\n"), level), file=sys.stderr, flush=True)


class ProgressBar:
    """Progress of a run.

    The bar is drawn by the loop, a few times a second, and not by a thread, which would take the
    interpreter from the loop at bad moments.
    """

    def __init__(self, steps: int, done: int = 0) -> None:
        """Chooses the bar if standard output is a terminal; `done` steps are an earlier attempt's."""
        self._steps, self._first = steps, done
        self._figures = ""
        self._step = done
        self._shown = self._started = time.monotonic()
        self._bar: Progress | None = None
        if not _Log.as_json and _Log.verbosity != "quiet":
            self._begin(steps, done)

    def _begin(self, steps: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console()
        if console.is_terminal and _Log.bars:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[metrics]}", markup=False),
                console=console,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._bar.add_task("training", total=steps, completed=done, metrics="")
            self._bar.start()

    def step_done(self, step: int) -> None:
        """Moves the bar; cheap enough for every step."""
        self._step = step
        if self._bar is not None and time.monotonic() - self._shown > _BAR_SECONDS:
            self._shown = time.monotonic()
            self._draw(self._bar)

    def _draw(self, bar: "Progress") -> None:
        bar.update(self._task, completed=self._step, metrics=self._figures)
        bar.refresh()

    def __call__(self, row: Mapping[str, float | int | str]) -> None:
        """A sink: keeps the metrics for the bar, or prints a line."""
        if row["kind"] == "verdict" and not row["final"]:  # the last one is told by the summary
            self.say(f"  {row['text']}")
        if row["kind"] not in ("train", "eval"):  # told by the summary, and by the report
            return
        self._figures = " ".join(_figures(row))
        if row["kind"] == "eval":
            self.say(f"  epoch {row['epoch']:>6.2f}  {self._figures}")
        elif self._bar is None and time.monotonic() - self._shown > _LINE_SECONDS:
            self._shown = time.monotonic()
            step = int(row["step"])
            seconds = seconds_left(self._steps, step, self._first, self._shown - self._started)
            left = duration(round(seconds)).replace("\u00a0", " ")
            self.say(f"  step {step}/{self._steps}  {self._figures}  {left} left")

    def say(self, line: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._bar is None:
            say(line)
        else:
            self._bar.console.print(redact_text(line), highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leaves the bar as far as the run came."""
        if self._bar is not None:
            self._draw(self._bar)
            self._bar.stop()
            self._bar = None


def _figures(row: Mapping[str, float | int | str]) -> list[str]:
    shown = {"loss": "loss {:.4f}", "accuracy": "accuracy {:.4f}"}
    if row["kind"] == "train":
        shown = {
            "epoch": "epoch {:.2f} ",
            **shown,
            "lr": "lr {:.3g}",
            "grad_norm": "grad norm {:.3g} ",
            "samples_per_s": "{:,.0f} samples/s",
        }
    texts = [text.format(row[name]) for name, text in shown.items() if name in row]
    if row["kind"] == "eval":  # whatever else a task measures
        known = {"kind", "step", "epoch", *shown}
        others = ((name, value) for name, value in row.items() if name not in known)
        texts += [f"{name.removeprefix('eval/')} {value:.4f}" for name, value in others]
    return texts


@contextlib.contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[int], object]]:
    """Yields a function that takes work done: draws a bar, or prints a line every tenth and half minute."""
    if sys.stderr.isatty() and _Log.bars and not _Log.as_json:
        from rich.console import Console
        from rich.progress import Progress, TextColumn

        # A path in the label may hold [brackets], or :words: that rich makes pictures of.
        columns = (TextColumn("{task.description}", markup=False), *Progress.get_default_columns()[1:])
        with Progress(*columns, console=Console(stderr=True), redirect_stdout=False) as bar:
            task = bar.add_task(without_controls(label), total=total)
            yield lambda by: bar.advance(task, by)
        return
    done, tenths, printed_at = 0, 0, float("-inf")

    def advance(by: int) -> None:
        nonlocal done, tenths, printed_at
        done += by
        if (
            not by
            or not total
            or (done * 10 // total == tenths and time.monotonic() - printed_at < _COUNT_SECONDS)
        ):
            return
        tenths, printed_at = done * 10 // total, time.monotonic()
        tell(f"{label}: {done * 100 // total} %")

    yield advance
