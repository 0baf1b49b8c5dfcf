"""Promise: the interval of a median holds the true one in 95 % of all cases, and decides only as a whole."""

import argparse
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, strategies as st

from benchmarks.__main__ import main
from benchmarks.options import at_least_one
from benchmarks.paired import judged, median_interval
from benchmarks.ranks import on_ranks
from tests.helpers.waiting import SECONDS
from trainer.errors import BadInputError


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=60))
def test_the_interval_encloses_the_median(values: list[float]) -> None:
    middle, low, high = median_interval(values)
    assert low <= middle <= high


def test_the_interval_holds_the_true_median_in_95_percent() -> None:
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        _, low, high = median_interval(random.standard_normal(30).tolist())
        hits += low <= 0 <= high
    assert 0.93 <= hits / 2000 <= 0.99


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(1, 2, ("met", 0)), (2.1, 3, ("MISSED", 1)), (1, 2.1, ("undecided", 3))]
)
def test_an_interval_decides_as_a_whole(low: float, high: float, verdict: tuple[str, int]) -> None:
    words, code = judged(low, high, 2.0)
    assert (words.partition(":")[0], code) == verdict


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "many", "²"])
def test_nothing_to_measure_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        at_least_one(text)
    with pytest.raises(SystemExit, match="2"):
        main(["tokens", f"--rounds={text}"])
    assert "--rounds" in capsys.readouterr().err
    assert at_least_one("7") == 7


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda: time.sleep(60), r"1 ranks over gloo gave nothing within 1 s"),
        (lambda: 1 / 0, "failed: see above"),
    ],
)
def test_ranks_that_hang_or_fail_are_ended(work: Callable[[], object], said: str) -> None:
    limit = 1.0 if "nothing" in said else SECONDS
    with pytest.raises(BadInputError, match=said):
        on_ranks(1, lambda _: work(), limit_s=limit)
