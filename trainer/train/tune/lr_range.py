"""A learning-rate range test (Smith, 2015, arXiv:1506.01186): the loss while the rate rises, step by step.

A copy of the training: its model, data and order, from its beginning, with an exponential ramp in place of
its schedule. Nothing is written. The same recipe gives the same curve.
"""

import contextlib
import io
import json
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.recipe import Recipe
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, BadInputError
from trainer.launch.launcher import LocalRanks, launch
from trainer.launch.signals import SignalReceiver
from trainer.train.tune.job import Interrupted

MODULE = "trainer.train.tune.lr_rank"
RESULT = "losses.json"
_KEPT = 0.9  # of the smoothed loss, at each step
_DIVERGED = 4.0  # times the least smoothed loss so far
_GRACE_SECONDS = 5.0


class Step(NamedTuple):
    """A step of the test: the learning rate of its update, and the loss before it."""

    lr: float
    loss: float


@dataclass(frozen=True)
class Curve:
    """What a test showed.

    Attributes:
        steps: In their order.
        smoothed: The loss at each, as an exponential mean without its bias.
        lowest: The step with the least smoothed loss.
        steepest: The step until there at which it falls fastest over the rate's logarithm; None: nowhere.
        diverged: Whether the loss left all bounds, which ended the test.
    """

    steps: list[Step]
    smoothed: list[float]
    lowest: int
    steepest: int | None
    diverged: bool

    @property
    def suggestion(self) -> float | None:
        """A tenth of the rate at which the loss was lowest; None where it never fell."""
        return None if self.steepest is None else self.steps[self.lowest].lr / 10


def ramp(low: float, high: float, steps: int) -> list[float]:
    """Learning rates from one to the other, each the same factor above the one before."""
    return [low * (high / low) ** (step / (steps - 1)) for step in range(steps)]


def smooth(losses: Sequence[float]) -> list[float]:
    """The exponential mean of the losses so far, at each."""
    found, mean = list[float](), 0.0
    for number, loss in enumerate(losses, 1):
        mean = _KEPT * mean + (1 - _KEPT) * loss
        found.append(mean / (1 - _KEPT**number))
    return found


def has_diverged(losses: Sequence[float]) -> bool:
    """Whether there is nothing more to be seen: the loss isn't finite, or its mean is far above the least."""
    if not math.isfinite(losses[-1]):
        return True
    smoothed = smooth(losses)
    return smoothed[-1] > _DIVERGED * min(smoothed) > 0


def judge(steps: Sequence[Step]) -> Curve:
    """Finds where the loss was lowest, and where it fell fastest.

    Raises:
        BadInputError: If there is no loss to be judged.
    """
    known = [step for step in steps if math.isfinite(step.loss)]
    if not known:
        raise BadInputError("--lr: the loss of the first step, with the lowest rate, isn't finite already")
    losses = [step.loss for step in known]
    diverged = len(known) < len(steps) or has_diverged(losses)
    smoothed = smooth(losses)
    lowest = min(range(len(known)), key=smoothed.__getitem__)
    slopes = {
        n: (smoothed[n + 1] - smoothed[n - 1]) / math.log(known[n + 1].lr / known[n - 1].lr)
        for n in range(1, min(lowest + 1, len(known) - 1))
    }
    steepest = min(slopes, key=slopes.__getitem__, default=None)
    if steepest is not None and slopes[steepest] >= 0:
        steepest = None
    return Curve(known, smoothed, lowest, steepest, diverged)


def ramp_recipe(recipe: Recipe, steps: int) -> dict[str, Any]:
    """Values of a recipe that has so many steps, and whose samples come in the same order."""
    values = recipe.model_dump(mode="json")
    return values | {"epochs": 10**9, "max_steps": steps, "evaluation": {"every": "end"}}


def range_test(recipe: Recipe, local: LocalRanks, rates: Sequence[float]) -> Curve:
    """Trains with these rates, a step each, until the loss diverges.

    Raises:
        BadInputError: If the recipe can't be trained here.
        Interrupted: After a signal.
    """
    with tempfile.TemporaryDirectory(prefix="trainer-tune-", ignore_cleanup_errors=True) as folder:
        request = {
            "recipe": ramp_recipe(recipe, len(rates)),
            "rates": list(rates),
            "threads": local.threads,
            "folder": folder,
        }
        nowhere, said = os.open(os.devnull, os.O_WRONLY), io.StringIO()
        with SignalReceiver() as receiver:
            try:
                with contextlib.redirect_stderr(said):
                    code = launch(
                        MODULE,
                        request,
                        local,
                        grace_seconds=_GRACE_SECONDS,
                        output=nowhere,
                        receiver=receiver,
                    )
            finally:
                os.close(nowhere)
            if receiver.received:
                raise Interrupted(receiver.received[0].name)
        text = said.getvalue().strip().removeprefix("trainer: ").removeprefix("error: ")
        if code != EXIT_DONE:
            raise BadInputError(
                text if code == EXIT_BAD_INPUT else f"--lr: the training failed: {text[-500:]}"
            )
        told = json.loads(Path(folder, RESULT).read_text())
    return judge([Step(lr, float(loss)) for lr, loss in told])
