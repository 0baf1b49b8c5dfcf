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
        row: Steps at the last row of figures.
        losses: Of each rank, the sum of losses since then.
        seconds: Time of the steps that were timed.
        samples: Samples in them.
        figures: The last evaluation.
        best: The best evaluation's metric, and its step.
        history: Losses of the steps before, for a guard that knows leaps.
    """

    step: int = 0
    row: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    samples: int = 0
    figures: dict[str, float] = field(default_factory=dict)
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
    figures: dict[str, float | None]
    best: Annotated[tuple[float, int], Field(strict=False)] | None
    history: list[float] = []


def to_state(progress: Progress) -> dict[str, Any]:
    """For a checkpoint's JSON."""
    return {
        "row": progress.row,
        "losses": [loss if math.isfinite(loss) else str(loss) for loss in progress.losses],
        "seconds": progress.seconds,
        "samples": progress.samples,
        "figures": finite(progress.figures),
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
    figures = {name: math.nan if figure is None else figure for name, figure in known.figures.items()}
    losses = [float(loss) for loss in known.losses]
    return Progress(step, known.row, losses, known.seconds, known.samples, figures, known.best, known.history)


def finite(figures: Mapping[str, float]) -> dict[str, float | None]:
    """What JSON can hold of figures."""
    return {name: figure if math.isfinite(figure) else None for name, figure in figures.items()}
