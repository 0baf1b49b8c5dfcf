"""What the scoreboard is made of, and who wins. Measures nothing."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.bench.claims.claim import FEWEST_ROUNDS
from trainer.bench.overhead import median_interval

Outcome = Literal["trainer wins", "trainer loses", "equal", "undecided"]
QUIET = 0.9


@dataclass(frozen=True)
class Timed:
    """What the trainer costs beside another one; less is better.

    Attributes:
        ours: Which of the trainer's ways.
        against: The other one.
        our_cost: Median.
        their_cost: Median, in the same unit.
        ratio: Median of ours / theirs, of each round.
        low: Lower end of its 95 % interval.
        high: Upper end.
        rounds: How many pairs.
    """

    ours: str
    against: str
    our_cost: float
    their_cost: float
    ratio: float
    low: float
    high: float
    rounds: int

    @property
    def outcome(self) -> Outcome:
        """Decided only if the whole interval lies on one side of 1."""
        if self.rounds < FEWEST_ROUNDS or self.low <= 1 <= self.high:
            return "undecided"
        return "trainer wins" if self.high < 1 else "trainer loses"


@dataclass(frozen=True)
class Counted:
    """How often something was right; more is better.

    Attributes:
        against: The other one, or one of the trainer's own ways.
        right: How often.
        of: Out of how many.
        ours: How often the trainer was, on the same ones; None: this is the trainer.
        note: What wasn't counted.
    """

    against: str
    right: int
    of: int
    ours: int | None = None
    note: str = ""

    @property
    def outcome(self) -> Outcome | None:
        """None for the trainer itself."""
        if self.ours is None:
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
    """What a bench came to.

    Attributes:
        name: The bench.
        rows: Its comparisons.
        conditions: How it was measured, in words.
        raw: All that was measured, as JSON takes it.
        failed: Why there is nothing.
        seconds: What it took.
    """

    name: str
    rows: Sequence[Row] = ()
    conditions: str = ""
    raw: dict[str, Any] = field(default_factory=dict)
    failed: str = ""
    seconds: float = 0.0

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
    """What the measurements were made on.

    Attributes:
        conditions: See `trainer.bench.conditions`.
        libraries: With their versions; those that aren't installed too.
        shares: What this process got of its CPUs when it wanted all, before and after.
    """

    conditions: str
    libraries: str
    shares: Sequence[float]

    @property
    def quiet(self) -> bool:
        """Whether nothing else computed, as far as one can tell from both ends."""
        return min(self.shares) >= QUIET


def timed(ours: str, against: str, our_costs: Iterable[float], their_costs: Iterable[float]) -> Timed:
    """Compares two series, round by round."""
    pairs = list(zip(our_costs, their_costs, strict=True))
    ratio, low, high = median_interval([our / their for our, their in pairs])
    our_cost, their_cost = (median_interval(list(series))[0] for series in zip(*pairs, strict=True))
    return Timed(ours, against, our_cost, their_cost, ratio, low, high, len(pairs))


def outcomes(parts: Sequence[Part], wanted: Outcome) -> list[tuple[Part, Timed | Counted]]:
    """The comparisons that ended so."""
    return [
        (part, row)
        for part in parts
        for row in part.rows
        if not isinstance(row, Absent) and row.outcome == wanted
    ]


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
