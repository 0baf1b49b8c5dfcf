"""Common parts of the scoreboard's benches: extent of the measurements, and the rivals."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from benchmarks.against import installed, offering, titled
from benchmarks.scoreboard.figures import Absent, Row


class Extent(NamedTuple):
    """Extent of the measurements.

    Attributes:
        rounds: Interleaved, of overhead.
        steps: Of a round.
        epochs: Interleaved, of loader.
        images: Of an epoch.
        cuts: After which updates a run is cut.
        token_rounds: Interleaved, of tokens.
        batches: Of tokens, in a round.
        megabytes: Of tokens.
    """

    rounds: int
    steps: int
    epochs: int
    images: int
    cuts: tuple[int, ...]
    token_rounds: int
    batches: int
    megabytes: int


def libraries_for(function: str) -> tuple[dict[str, Callable[..., Any]], list[Row]]:
    """Returns the installed libraries, and a row for each missing one."""
    there = {name: measure for name, measure in offering(function).items() if installed(name)}
    return there, [Absent(name, "not installed") for name in offering(function) if name not in there]


def failed_rows(failed: Mapping[str, str]) -> list[Row]:
    """A row for each library that failed, by name with the reason."""
    return [Absent(titled(name), f"failed: {why}", failed=True) for name, why in failed.items()]
