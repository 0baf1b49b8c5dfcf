"""Section of the last `trainer evaluate` of a run: its metrics, its confusion matrix and its mistakes."""

import re
from typing import Annotated

from markupsafe import Markup
from pydantic import BaseModel, Field, ValidationError

from trainer.host.files import read_inside
from trainer.host.latest import EVALUATION
from trainer.observe.charts.confusion import confusion_chart
from trainer.runs.report.parts import html
from trainer.runs.report.read import RecordedRun

_BYTES = 8 << 20  # a matrix of 1,000 classes has at most 1,000,000 cells: larger files are left out
_MOST_CLASSES = 40  # of a matrix on the page
_BASE64 = re.compile(r"[A-Za-z0-9+/]+=*")
_Number = Annotated[int, Field(ge=0)]


class _Mistake(BaseModel):
    sample: _Number
    label: _Number
    predicted: _Number
    sure: Annotated[float, Field(ge=0, le=1)]
    png: str = ""


class _Evaluation(BaseModel):
    weights: str
    set: str
    samples: _Number
    metrics: dict[str, float | None]
    classes: list[str]
    confusion: list[tuple[_Number, _Number, _Number]] = []
    mistakes: list[_Mistake] = []


def evaluation(run: RecordedRun) -> Markup:
    """Shows what `trainer evaluate` found last; nothing if there is no such file, or an odd one."""
    try:
        found = _Evaluation.model_validate_json(read_inside(run.folder / EVALUATION, _BYTES))
        names = dict(enumerate(found.classes))
        matrix = None
        if found.confusion and len(names) <= _MOST_CLASSES:
            matrix = Markup(confusion_chart(found.confusion, found.classes))
        mistakes = [
            (one, names[one.label], names[one.predicted])
            for one in found.mistakes
            if _BASE64.fullmatch(one.png)
        ]
    except (OSError, ValidationError, LookupError):
        return Markup()
    return html("sections.evaluation", found, matrix, mistakes)
