"""Promise: the interval of a median holds the true one in 95 % of all cases, and decides only as a whole."""

import numpy as np
import pytest

from benchmarks.paired import judged, median_interval


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
