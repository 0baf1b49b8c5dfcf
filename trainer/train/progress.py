"""How far a run has come, besides its tensors: what a checkpoint keeps as JSON."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError


@dataclass
class Progress:
    """Where a run is.

    Attributes:
        step: Steps done.
        row: Steps at the last row of metrics.
        losses: Of each rank, the sum of losses since then.
        seconds: Time of the steps that were timed.
        samples: Samples in them.
        metrics: The last evaluation.
        best: The best evaluation's metric, and its step.
        history: Losses of the steps before, for a guard that knows leaps.
    """

    step: int = 0
    row: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    samples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    best: tuple[float, int] | None = None
    history: list[float] = field(default_factory=list)


class _State(BaseModel):
    """The same in a checkpoint; other keys are for people."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    row: int = Field(ge=0)
    # JSON has no word for what isn't finite, and a sum of losses must come back as it was.
    losses: list[float | Literal["nan", "inf", "-inf"]] = Field(min_length=1)
    seconds: float = Field(ge=0)
    samples: int = Field(ge=0, lt=1 << 63)
    metrics: dict[str, float | None]
    best: Annotated[tuple[float, int], Field(strict=False)] | None
    history: list[float] = []


def to_state(progress: Progress) -> dict[str, Any]:
    """For a checkpoint's JSON."""
    return {
        "row": progress.row,
        "losses": [loss if math.isfinite(loss) else str(loss) for loss in progress.losses],
        "seconds": progress.seconds,
        "samples": progress.samples,
        "metrics": finite(progress.metrics),
        "best": list(progress.best) if progress.best else None,
        "history": progress.history,
    }


def from_state(step: int, state: Mapping[str, Any]) -> Progress:
    """From a checkpoint's JSON.

    Raises:
        ValueError: With the first thing that is wrong with it.
    """
    try:
        known = _State.model_validate(dict(state))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ValueError(f"state.json: {where}: {problem['msg']}") from error
    if known.row > step or (known.best and not 0 <= known.best[1] <= step):
        raise ValueError(f"state.json: it is of step {step} and speaks of later ones")
    metrics = {name: math.nan if metric is None else metric for name, metric in known.metrics.items()}
    losses = [float(loss) for loss in known.losses]
    return Progress(step, known.row, losses, known.seconds, known.samples, metrics, known.best, known.history)


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """What JSON can hold of metrics."""
    return {name: metric if math.isfinite(metric) else None for name, metric in metrics.items()}
