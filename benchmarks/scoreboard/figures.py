"""Figures of the scoreboard, and the winner of each. Measures nothing."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from benchmarks.claims.claim import FEWEST_ROUNDS
from benchmarks.paired import median_interval

Outcome = Literal["trainer wins", "trainer loses", "equal", "undecided"]
QUIET = 0.9
NOT_BEST = "another way of it is as good or better: doesn't count"
BUSY = "undecided: other work ran beside it"


@dataclass(frozen=True)
class Timed:
    """Time or cost of the trainer and of a rival; less is better.

    Attributes:
        ours: Which of the trainer's ways.
        against: The other one.
        our_cost: Median.
        their_cost: Median, in the same unit.
        ratio: Median of ours / theirs, of each round.
        low: Lower end of its 95 % interval.
        high: Upper end.
        rounds: How many pairs.
        rival: Whose way the other one is; empty: its own.
        apart: Why this isn't like with like, and so has no outcome; empty: it is.
        busy: Whether other work ran just before or just after, so that nothing is decided.
    """

    ours: str
    against: str
    our_cost: float
    their_cost: float
    ratio: float
    low: float
    high: float
    rounds: int
    rival: str = ""
    apart: str = ""
    busy: bool = False

    @property
    def outcome(self) -> Outcome | None:
        """Decided only if the whole interval lies on one side of 1; None if it isn't like with like."""
        if self.apart:
            return None
        if self.busy or self.rounds < FEWEST_ROUNDS or self.low <= 1 <= self.high:
            return "undecided"
        return "trainer wins" if self.high < 1 else "trainer loses"


@dataclass(frozen=True)
class Counted:
    """Number of correct results; more is better.

    Attributes:
        against: The other one, or one of the trainer's own ways.
        right: How often.
        of: Out of how many.
        ours: How often the trainer was, on the same ones; None: this is the trainer.
        note: What wasn't counted.
        rival: Whose way the other one is; empty: its own.
    """

    against: str
    right: int
    of: int
    ours: int | None = None
    note: str = ""
    rival: str = ""

    @property
    def outcome(self) -> Outcome | None:
        """None for the trainer itself, or if there was nothing to count."""
        if self.ours is None or not self.of:
            return None
        if self.ours == self.right:
            return "equal"
        return "trainer wins" if self.ours > self.right else "trainer loses"

    @property
    def broken(self) -> bool:
        """Whether the trainer isn't right everywhere, which it promises."""
        return self.ours is None and self.right < self.of


@dataclass(frozen=True)
class Absent:
    """Another one without figures.

    Attributes:
        against: The other one.
        why: "not installed", "not measured: …" or "failed: …".
        failed: Whether that is an error.
    """

    against: str
    why: str
    failed: bool = False


Row = Timed | Counted | Absent


@dataclass(frozen=True)
class Part:
    """Result of a bench.

    Attributes:
        name: The bench.
        rows: Its comparisons.
        conditions: How it was measured, in words.
        raw: All that was measured, as JSON takes it.
        failed: What went wrong, so that there is nothing.
        lacking: Why nothing could be measured here, which is nobody's fault.
        seconds: What it took.
        shares: What this process got of its CPUs when it wanted all, just before and just after; empty:
            nothing was timed.
    """

    name: str
    rows: Sequence[Row] = ()
    conditions: str = ""
    raw: dict[str, Any] = field(default_factory=dict)
    failed: str = ""
    lacking: str = ""
    seconds: float = 0.0
    shares: Sequence[float] = ()

    @property
    def quiet(self) -> bool:
        """Whether nothing else computed just before and just after; what ran in between isn't seen."""
        return min(self.shares, default=1.0) >= QUIET

    @property
    def measured(self) -> bool:
        """Whether there is a figure at all."""
        return any(isinstance(row, Timed) or (isinstance(row, Counted) and row.of) for row in self.rows)

    @property
    def failures(self) -> bool:
        """Whether it failed, or a library in it, or the trainer by its own count."""
        absent = (row for row in self.rows if isinstance(row, Absent))
        counted = (row for row in self.rows if isinstance(row, Counted))
        return bool(self.failed) or any(r.failed for r in absent) or any(r.broken for r in counted)


@dataclass(frozen=True)
class Machine:
    """Machine of the measurements.

    Attributes:
        conditions: See `benchmarks.conditions`.
        libraries: With their versions; those that aren't installed too.
    """

    conditions: str
    libraries: str


def timed(
    ours: str,
    against: str,
    our_costs: Iterable[float],
    their_costs: Iterable[float],
    rival: str = "",
    apart: str = "",
) -> Timed:
    """Compares two series, round by round; `rival` and `apart` as in `Timed`."""
    pairs = list(zip(our_costs, their_costs, strict=True))
    ratio, low, high = median_interval([our / their for our, their in pairs])
    our_cost, their_cost = (median_interval(list(series))[0] for series in zip(*pairs, strict=True))
    return Timed(ours, against, our_cost, their_cost, ratio, low, high, len(pairs), rival, apart)


def between(part: Part, before: float, after: float) -> Part:
    """A part with its shares before and after; the times of a busy machine decide nothing."""
    part = replace(part, shares=(before, after))
    rows = [replace(row, busy=not part.quiet) if isinstance(row, Timed) else row for row in part.rows]
    return replace(part, rows=rows)


def best_rows(part: Part) -> list[Timed | Counted]:
    """Returns the best row of each rival, the first of equal ones."""
    best: dict[str, Timed | Counted] = {}
    for row in part.rows:
        if isinstance(row, Absent) or row.outcome is None:
            continue
        rival = row.rival or row.against
        if rival not in best or _merit(row) > _merit(best[rival]):
            best[rival] = row
    return list(best.values())


def _merit(row: Timed | Counted) -> tuple[float, float]:
    """Returns the merit of a rival's way: larger is better for it."""
    if isinstance(row, Timed):
        return (row.ratio, 0)
    return (row.right - (row.ours or 0), row.right)


def outcomes(parts: Sequence[Part], wanted: Outcome) -> list[tuple[Part, Timed | Counted]]:
    """The comparisons that ended so, one for each rival and bench."""
    return [(part, row) for part in parts for row in best_rows(part) if row.outcome == wanted]


def verdict(part: Part, row: Timed | Counted) -> tuple[Outcome | None, str]:
    """Returns the verdict on a row, None if it doesn't count, and its wording."""
    if row.outcome is None:
        return None, row.apart if isinstance(row, Timed) else ""
    if any(row is one for one in best_rows(part)):
        return row.outcome, BUSY if isinstance(row, Timed) and row.busy else row.outcome
    return None, NOT_BEST


def without_the_failing(
    measure: Callable[[list[str]], Any], libraries: Iterable[str], failure: type[Exception]
) -> tuple[Any, dict[str, str]]:
    """Measures; when a library fails, again without it.

    Args:
        measure: Given the names that are left; raises `failure(name, why)` if one of them fails.
        libraries: Their names.
        failure: With these two as arguments.

    Returns:
        What `measure` returned, and why each library that failed did.
    """
    left, failed = list(libraries), dict[str, str]()
    while True:
        try:
            return measure(left), failed
        except failure as error:
            name, why = error.args
            if name not in left:  # the trainer's own
                raise
            left.remove(name)
            failed[name] = why
