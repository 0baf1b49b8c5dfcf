"""Fits bandwidth and latency to the times of all-reduces of several sizes."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trainer.config.sizes import KIB, MIB
from trainer.errors import BadInputError

_UNITS = {"": 1, "b": 1, "k": KIB, "kib": KIB, "m": MIB, "mib": MIB, "g": MIB * KIB, "gib": MIB * KIB}
_LARGEST_ON_CPU = 64 * MIB
SIZES = tuple(4 * KIB * 4**n for n in range(9))  # 4 KiB to 256 MiB


class Timed(NamedTuple):
    """An all-reduce of one size.

    Attributes:
        bytes: Of the message, on each rank.
        seconds: Median over the rounds of what one took on the slowest rank.
        low: Lower end of the median's 95 % interval, in seconds.
        high: Its upper end.
    """

    bytes: int
    seconds: float
    low: float
    high: float

    @property
    def algorithm(self) -> float:
        """Bytes of the message per second."""
        return self.bytes / self.seconds


class Fit(NamedTuple):
    """t = alpha_s + bytes / bytes_per_s.

    Attributes:
        alpha_s: Seconds that an all-reduce of nothing would take.
        bytes_per_s: Bytes of the message per second, beyond that.
        median_error: Of the sizes' errors of the line, as shares of the measured times.
        worst_error: The largest of them.
        worst_bytes: The size at which it is.
    """

    alpha_s: float
    bytes_per_s: float
    median_error: float
    worst_error: float
    worst_bytes: int

    def seconds(self, size: float) -> float:
        """Returns the predicted seconds of a message of so many bytes."""
        return self.alpha_s + size / self.bytes_per_s


def bus_factor(ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth of an all-reduce: 2 (n - 1) / n.

    Each of n ranks has to send and to receive at least that many times the message, whatever the algorithm,
    unless the network adds. So a bus bandwidth can be held against the speed of a link in one direction, for
    any number of ranks. See "AllReduce" in doc/PERFORMANCE.md of NVIDIA's nccl-tests.
    """
    return 2 * (ranks - 1) / ranks


class CommResult(NamedTuple):
    """Measurements and fit.

    Attributes:
        ranks: How many.
        hosts: That they are on.
        backend: That was used.
        conditions: Versions, processor, date.
        timed: Of each dtype its sizes, in order.
        fit: Of the first dtype.
        limit: The link's limit in bytes per second, as given; None without one.
    """

    ranks: int
    hosts: int
    backend: str
    conditions: str
    timed: Mapping[str, Sequence[Timed]]
    fit: Fit | None
    limit: float | None

    @property
    def best(self) -> float:
        """The largest bus bandwidth, in bytes per second."""
        return bus_factor(self.ranks) * max(one.algorithm for series in self.timed.values() for one in series)

    @property
    def latency(self) -> Timed:
        """The smallest size."""
        return next(iter(self.timed.values()))[0]


def parsed_sizes(text: str, cpu: bool) -> list[int]:
    """The sizes of --sizes, in bytes and in order; by default 4 KiB to 256 MiB, on a CPU to 64 MiB.

    Raises:
        BadInputError: For what is no size.
    """
    if not text:
        return [size for size in SIZES if not cpu or size <= _LARGEST_ON_CPU]
    sizes = set[int]()
    for word in text.split(","):
        match = re.fullmatch(r"(\d{1,12})\s*([a-z]*)", word.strip().lower())
        if not match or match[2] not in _UNITS:
            raise BadInputError(f"--sizes {word.strip()}: give sizes such as 4K,1M,64M, separated by commas")
        size = int(match[1]) * _UNITS[match[2]]
        if size < 4 or size % 4 or size > 1 << 34:
            raise BadInputError(f"--sizes {word.strip()}: give multiples of 4 bytes, at most 16G")
        sizes.add(size)
    return sorted(sizes)


def fitted(timed: Sequence[Timed]) -> Fit | None:
    """Alpha and beta of several sizes by least squares of relative errors; None if no line fits them.

    Relative, because a plan asks for small messages as well as for large ones: of plain squares the largest
    size alone would decide. Neither can be below 0: where the line would begin below, it begins at 0.
    """
    if len({one.bytes for one in timed}) < 2:
        return None
    sizes = np.array([one.bytes for one in timed], dtype=np.float64)
    seconds = np.array([one.seconds for one in timed])
    beta, alpha = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    if alpha < 0:
        speeds = sizes / seconds
        alpha, beta = 0.0, speeds.sum() / (speeds * speeds).sum()
    if beta <= 0:  # no size takes longer than a smaller one: there is no bandwidth to tell
        return None
    errors = np.abs(alpha + beta * sizes - seconds) / seconds
    worst = int(errors.argmax())
    median, most = float(np.median(errors)), float(errors[worst])
    return Fit(float(alpha), float(1 / beta), median, most, timed[worst].bytes)
