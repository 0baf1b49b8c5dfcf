"""Promise: the interval of a median holds the true one in 95 % of all cases."""

import numpy as np
from hypothesis import given, strategies as st

from benchmarks.paired import median_interval


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
