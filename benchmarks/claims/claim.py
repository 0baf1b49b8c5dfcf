"""Claims, and the criterion by which a measurement confirms one. Measures nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from benchmarks.paired import median_interval

Verdict = Literal["holds", "doesn't hold", "undecided", "not measured"]

# A claim without a figure ("is faster") is taken to mean 2 %: less can't be told from chance, nor missed.
NOTICED = 0.98
# So many pairs are needed for their least and greatest to enclose the true median with 95 % probability.
FEWEST_ROUNDS = 6


class Source(NamedTuple):
    """Source of a claim."""

    title: str
    address: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim: the ratio of a quantity with the recommended setting (`tried`) and without it (`base`).

    Attributes:
        name: On the command line.
        text: What is claimed, in words.
        source: Who does.
        ablation: What is measured; its name.
        base: The side that it is compared with.
        tried: The side with the setting.
        most: Largest ratio of the quantity, tried / base, that bears the claim out.
        quantity: What is compared; less is better. A key of what the ablation measures.
        needs: What a machine must have, see `benchmarks.claims.needs`.
    """

    name: str
    text: str
    source: Source
    ablation: str
    base: str
    tried: str
    most: float = NOTICED
    quantity: str = "time"
    needs: tuple[str, ...] = ()


class Series(NamedTuple):
    """A quantity of some sides.

    Attributes:
        values: Of each side, one for each round.
        unit: For people.
        counted: True where it is counted (bytes) and not timed: then one value says all.
    """

    values: Mapping[str, Sequence[float]]
    unit: str
    counted: bool = False


class Measured(NamedTuple):
    """Measurements of a claim's two sides.

    Attributes:
        base: Median.
        tried: Median.
        ratio: Median of tried / base, of each round.
        low: Lower end of its 95 % interval.
        high: Upper end.
        rounds: How many pairs.
        unit: Of base and tried.
        counted: See `Series`.
    """

    base: float
    tried: float
    ratio: float
    low: float
    high: float
    rounds: int
    unit: str
    counted: bool


@dataclass(frozen=True)
class Row:
    """A claim and its verdict.

    Attributes:
        claim: The claim.
        conditions: What the ablation was, in words: the same for both sides.
        measured: None if it wasn't.
        reason: Why it wasn't.
    """

    claim: Claim
    conditions: str = ""
    measured: Measured | None = None
    reason: str = ""

    @property
    def verdict(self) -> Verdict:
        """See `judge`."""
        return judge(self.measured, self.claim.most)


def compare(series: Series, base: str, tried: str) -> Measured:
    """The two sides of a claim, pair by pair."""
    first, second = series.values[base], series.values[tried]
    pairs = [(b, t) for b, t in zip(first, second, strict=True)]
    ratio, low, high = median_interval([t / b if b else 1.0 for b, t in pairs])
    return Measured(
        median_interval(list(first))[0],
        median_interval(list(second))[0],
        ratio,
        low,
        high,
        len(pairs),
        series.unit,
        series.counted,
    )


def judge(measured: Measured | None, most: float) -> Verdict:
    """Whether the whole interval lies within what was claimed, or outside of it.

    Args:
        measured: None: not measured.
        most: Largest ratio that bears the claim out.
    """
    if measured is None:
        return "not measured"
    if measured.rounds < FEWEST_ROUNDS and not measured.counted:
        return "undecided"
    if measured.high <= most:
        return "holds"
    return "doesn't hold" if measured.low > most else "undecided"
