"""Rounds in which loops take turns, so that whatever else the machine does falls on all; and judging them."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from rich.progress import track

from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_NOT_MEASURED


@contextmanager
def one_thread() -> Iterator[None]:
    """Lets torch compute on one thread, and as before afterwards."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def judged(low: float, high: float, most: float) -> tuple[str, int]:
    """Judges an interval by the largest value that is wanted.

    Returns:
        Verdict and exit code: met if the whole interval is at most that, missed if all of it is above.
    """
    if high <= most:
        return "met", EXIT_DONE
    return ("MISSED", EXIT_FAILED) if low > most else ("undecided: more --rounds", EXIT_NOT_MEASURED)


def interleaved(loops: Sequence[Callable[[], float]], rounds: int, shown: bool = True) -> list[list[float]]:
    """Times loops in turn, each round starting with another one; a round before them is warm-up.

    Args:
        loops: Each returns its seconds.
        rounds: That count.
        shown: Whether a bar shows how far it is.

    Returns:
        For each loop its seconds, round by round.
    """
    times: list[list[float]] = [[] for _ in loops]
    numbers = range(rounds + 1)
    # The bar has a thread, beside which nothing can be forked.
    for number in track(numbers, "measuring", transient=True) if shown else numbers:
        for offset in range(len(loops)):
            which = (number + offset) % len(loops)
            times[which].append(loops[which]())
    return [series[1:] for series in times]


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Median, and the two values that enclose the true one with a probability of at least 95 %.

    They are the innermost pair of order statistics of which that holds by the binomial distribution, whatever
    the values' own is (Conover 1999). Below 6 values none does: then it is the smallest and the largest,
    which enclose it with 1 - 2^(1 - n), 93.75 % at 5.
    """
    ordered = sorted(values)
    outer = values_outside(len(ordered))
    return float(np.median(ordered)), ordered[outer], ordered[-1 - outer]


def values_outside(count: int) -> int:
    """Returns the number of values that `median_interval` leaves out at each end.

    With k left out, the true median lies outside if at most k values lie below it, or at most k above:
    2 (C(n, 0) + … + C(n, k)) / 2^n, in whole numbers.
    """
    outer, tail = 0, 1
    while 40 * (tail := tail + math.comb(count, outer + 1)) <= 1 << count:
        outer += 1
    return outer
