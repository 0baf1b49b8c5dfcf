"""What a run folder says of its run, for those who want to prove it: how it was trained, what came out."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from trainer.checkpoint import strict_json
from trainer.errors import BadInputError
from trainer.observe.trace import Traced, read_trace
from trainer.redact import redact_text
from trainer.resume import Attempt, Stored


class Manifest(Stored):
    """Of a run's manifest, what its replay needs; `differences_here` reads the rest as it is."""

    config_hash: str
    attempts: list[Attempt] = Field(min_length=1)
    windows: int = Field(ge=1)
    weights: dict[str, str]


@dataclass(frozen=True)
class Recorded:
    """What a run folder says of its run.

    Attributes:
        folder: The run folder.
        manifest: What is needed of it.
        facts: All of it.
        rows: What was recorded.
        unreadable: Lines of it that can't be read.
    """

    folder: Path
    manifest: Manifest
    facts: Mapping[str, Any]
    rows: list[Traced]
    unreadable: int


@dataclass(frozen=True)
class Part:
    """Windows that were trained in the same way: up to `until`, with a row of figures each `every`."""

    until: int
    ranks: int
    threads: int
    every: int


def read_run(folder: Path, rows_needed: bool = True) -> Recorded:
    """Reads what a run recorded; with rows of figures, if they are needed.

    Raises:
        BadInputError: If it is no run, or recorded nothing that could be compared.
    """
    path = folder / "manifest.json"
    try:
        facts = strict_json.parse(path.read_bytes())
        manifest = Manifest.model_validate(facts)
        rows, _, unreadable = read_trace(folder / "trace.jsonl")
    except OSError as error:
        raise BadInputError(f"{path}: can't be read ({error.strerror}); give a run folder") from error
    except ValueError as error:  # pydantic's, too
        raise BadInputError(
            f"{path}: lacks what verify needs; it isn't a manifest, or an older trainer wrote it"
        ) from error
    if rows_needed and not rows:
        raise BadInputError(
            f"{folder}: nothing was recorded to compare with (trace.jsonl); its first row comes after "
            "log.every windows, with log.fingerprints=true"
        )
    return Recorded(folder, manifest, facts, rows, unreadable)


def last_window(run: Recorded, steps: int | None) -> int:
    """The last window to replay: that of the last row, within the steps that were asked for.

    Raises:
        BadInputError: If there is no row within them, or fewer windows.
    """
    rows = sorted(row.window for row in run.rows)
    if steps is None:
        return rows[-1]
    if not rows[0] <= steps <= rows[-1]:
        raise BadInputError(
            f"--steps {steps}: windows were recorded from {rows[0]} to {rows[-1]}; give a number between them"
        )
    return max(row for row in rows if row <= steps)


def parts_of(folder: Path, manifest: Manifest, until: int, ranks: int | None) -> list[Part]:
    """Who trained which windows: a run that was gone on with on other ranks is replayed on the same ones.

    Args:
        folder: The run folder, for the message.
        manifest: The run's.
        until: The last window to replay.
        ranks: How many to use instead, or None.

    Raises:
        BadInputError: If the configuration was changed on the way.
    """
    if ranks is not None:
        return [Part(until, ranks, manifest.threads, manifest.attempts[-1].log_every)]
    kept = list[Attempt]()
    for attempt in manifest.attempts:  # what was trained beyond its start is lost, but not what was changed
        lost = [change for earlier in kept if earlier.window >= attempt.window for change in earlier.changed]
        attempt = attempt.model_copy(update={"changed": [*lost, *attempt.changed]})  # noqa: PLW2901
        kept = [*(earlier for earlier in kept if earlier.window < attempt.window), attempt]
    for attempt in kept:
        if attempt.window and attempt.changed:
            raise BadInputError(
                f"{folder}: its configuration was changed after window {attempt.window} "
                f"({redact_text(attempt.changed[0])}), and the one before isn't kept: it can't be replayed"
            )
    starts = [attempt for attempt in kept if attempt.window < until]
    ends = [*(attempt.window for attempt in starts[1:]), until]
    parts = list[Part]()
    for attempt, end in zip(starts, ends, strict=True):
        part = Part(end, attempt.ranks, attempt.threads, attempt.log_every)
        if parts and replace(parts[-1], until=end) == part:
            parts.pop()
        parts.append(part)
    return parts
