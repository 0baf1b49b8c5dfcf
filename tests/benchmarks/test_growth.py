"""Promise: work that grows faster than its data is found, and none here does."""

from pathlib import Path

import pytest

from benchmarks.growth import Growth, Point, bench_growth, in_a_fork, is_straight, measure
from trainer.errors import BadInputError


def line(power: float, seconds: float = 1e-4) -> Growth:
    amounts = (10, 100, 1_000, 10_000)
    return Growth("", "steps", [Point(n, 0.02 + seconds * n**power, 1 + n / 1024) for n in amounts])


def test_a_line_is_straight_and_a_parabola_bent() -> None:
    assert is_straight(line(1)) and is_straight(line(0.5)) and is_straight(line(1.05))
    assert not is_straight(line(2)) and not is_straight(line(1.5))
    assert line(1).us_each == pytest.approx(100)
    assert line(1).bytes_each == pytest.approx(1024)
    assert line(1).bend == pytest.approx(1)
    assert line(2, 1e-12).bend is None, "too quick to tell"


def test_everything_is_measured_where_there_is_little(tmp_path: Path) -> None:
    grown = measure(tmp_path, 1, [10, 200], [1, 2], [1, 20])
    assert [[point.amount for point in each.points] for each in grown] == [[10, 200]] * 3 + [
        [1, 2],
        [1, 20],
        [1, 20],
    ]
    assert all(point.seconds > 0 for each in grown for point in each.points)
    with pytest.raises(BadInputError, match="--rounds"):
        bench_growth(0, 10_000)


def test_what_fails_is_no_figure(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError("torn")

    with pytest.raises(RuntimeError, match="failed"):
        in_a_fork(fail)
    assert "ValueError: torn" in capfd.readouterr().err


def test_memory_that_lies_free_in_the_parent_is_counted_too() -> None:
    # A freed block of 24 MiB raises glibc's mmap threshold: those that follow lie in the heap, side by side,
    # and stay there when they are freed below one that is still held.
    _bytes_of(24)
    *held, above = [_bytes_of(24) for _ in range(6)]
    del held
    taken = in_a_fork(lambda: _bytes_of(64))[1]
    assert 60 < taken < 80 and above


def _bytes_of(mib: int) -> bytearray:
    return bytearray(b"x") * (mib << 20)
