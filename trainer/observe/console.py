"""What a person sees: a progress bar on a terminal, now and then a plain line elsewhere."""

import contextlib
import os
import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trainer.config.redact import redact_text
from trainer.observe.log import Row

_BAR_SECONDS = 0.25
_LINE_SECONDS = 2.0


class ProgressBar:
    """Progress of a run.

    The bar is drawn by the loop, a few times a second, and not by a thread, which would take the
    interpreter from the loop at bad moments.
    """

    def __init__(self, steps: int) -> None:
        """Chooses the bar if standard output is a terminal."""
        console = Console()
        self._steps = steps
        self._figures = ""
        self._step = 0
        self._shown = time.monotonic()
        self._started = self._shown
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[metrics]}"),
                console=console,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._bar.add_task("training", total=steps, metrics="")
            self._bar.start()

    def step_done(self, step: int) -> None:
        """Moves the bar; cheap enough for every step."""
        self._step = step
        if self._bar is not None and time.monotonic() - self._shown > _BAR_SECONDS:
            self._shown = time.monotonic()
            self._bar.update(self._task, completed=step, metrics=self._figures)
            self._bar.refresh()

    def __call__(self, row: Row) -> None:
        """A sink: keeps the metrics for the bar, or prints a line."""
        if row["kind"] in ("end", "memory"):  # told by the summary, and by the report
            return
        if row["kind"] == "verdict":
            if not row["final"]:  # that one is told by the summary
                self.say(f"  {row['text']}")
            return
        self._figures = " ".join(_figures(row))
        if row["kind"] == "evaluation":
            self.say(f"  epoch {row['epoch']:>6.2f}  {self._figures}")
        elif self._bar is None and time.monotonic() - self._shown > _LINE_SECONDS:
            self._shown = time.monotonic()
            step = int(row["step"])
            left = (self._shown - self._started) / step * (self._steps - step)
            self.say(f"  step {step}/{self._steps}  {self._figures}  {left:.0f} s left")

    def say(self, line: str) -> None:
        """Prints a line, above the bar if there is one."""
        line = redact_text(line)
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)
            return
        try:
            print(line, flush=True)
        except OSError:  # the reader is gone (`| head`): that is no reason to end the training
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def close(self) -> None:
        """Leaves the bar as far as the run came."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self._step, metrics=self._figures)
            self._bar.refresh()
            self._bar.stop()
            self._bar = None


def _figures(row: Mapping[str, float | int | str]) -> list[str]:
    shown = {"samples_per_s": "{:,.0f} samples/s", "loss": "loss {:.4f}", "accuracy": "accuracy {:.4f}"}
    told = [text.format(row[name]) for name, text in shown.items() if name in row]
    if row["kind"] == "evaluation":  # whatever else a task measures
        known = {"kind", "step", "epoch", *shown}
        told += [f"{name} {value:.4f}" for name, value in row.items() if name not in known]
    return told


def warn(line: str) -> None:
    """One line on standard error, if somebody reads it and its disk isn't full."""
    with contextlib.suppress(OSError):
        print(f"trainer: {redact_text(line)}", file=sys.stderr, flush=True)
