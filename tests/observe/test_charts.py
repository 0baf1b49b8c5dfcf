"""Promise: a chart keeps extreme values, its axes have round ticks, and values are formatted for people."""

import math
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st

from trainer.runs.report.charts import Line, line_chart, make_axis
from trainer.runs.report.thin import Cell, ThinnedRows, thinned


@given(
    st.lists(st.one_of(st.none(), st.floats(-1e9, 1e9), st.integers(-9, 9)), min_size=1, max_size=300),
    st.integers(1, 20),
)
def test_thinned_rows_keep_the_least_the_largest_and_the_sum(values: list[float | None], most: int) -> None:
    rows = ThinnedRows(most, lambda name: name == "x")
    for n, value in enumerate(values):
        rows.add(n, {"x": value, "y": 1})
    points = rows.points()
    assert len(points) <= 2 * most + 1
    less = thinned(points, most + 1)
    assert len(less) <= most + 1 and less[-1] == points[-1]
    for found in (points, less):
        numbers = [value for value in values if value is not None]
        cells = [point.cells["x"] for point in found if point.cells["x"].rows]
        assert sum(cell.rows for cell in cells) == len(numbers)
        assert sum(point.rows for point in found) == len(values) and found[-1].step == len(values) - 1
        if numbers:
            assert min(cell.low for cell in cells) == min(numbers)
            assert max(cell.high for cell in cells) == max(numbers)
            assert math.fsum(cell.total for cell in cells) == pytest.approx(math.fsum(numbers), abs=1e-3)


def test_a_figure_that_was_not_finite_is_a_gap() -> None:
    cells = [(n, Cell(1.0, 1.0, 1.0, int(n != 3), 1.0, 1.0)) for n in range(1, 6)]
    drawn = line_chart("Loss", [Line("loss", cells)], last=5)
    assert len(re.findall(r'<path d="M[^"]*"/>', drawn)) == 2
    assert line_chart("Loss", [Line("loss", [(1, Cell(0, 0, 0, 0, 0, 0))])], last=5) == ""
    assert line_chart("Loss", [Line("limit", cells, -1)], last=5) == ""


KINDS = st.sampled_from(["number", "count", "share", "bytes"])


@given(st.floats(-1e150, 1e150), st.floats(0, 1e150), KINDS, st.booleans(), st.booleans())
def test_axes_have_a_few_round_ticks_between_their_ends(
    low: float, span: float, kind: Any, zero: bool, may_log: bool
) -> None:
    axis = make_axis(low, low + span, kind, zero, may_log)
    places = [axis.at(value) for value, _ in axis.ticks]
    assert axis.low < axis.high
    nothing = 1e-8 * (axis.high - axis.low)
    assert axis.low <= low + nothing and low + span <= axis.high + nothing
    assert 2 <= len(places) <= 12 or axis.log
    assert all(0 <= one < other <= 1 for one, other in pairwise(places))
    assert len({text for _, text in axis.ticks}) == len(axis.ticks)
