"""Records of a run, and the attempt that trained each step."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.config.redact import REDACTED
from trainer.errors import BadInputError, reading
from trainer.observe.checksums import ChecksumRow, read_checksums
from trainer.runs.differences import flat
from trainer.runs.manifest import Attempt, Manifest, RunFolder, read_run


@dataclass(frozen=True)
class Recorded(RunFolder):
    """A run folder with its checksum records.

    Attributes:
        rows: Records of checksums.jsonl.
        unreadable: Number of lines that can't be read.
    """

    rows: list[ChecksumRow]
    unreadable: int


@dataclass(frozen=True)
class Segment:
    """Steps trained in the same way: up to `until`, with a metrics record every `every` steps.

    `settings` undo the changes that later attempts made to the configuration.
    """

    until: int
    ranks: int
    threads: int
    every: int
    settings: tuple[str, ...] = ()


def read_recorded(folder: Path) -> Recorded:
    """Reads the records of a run.

    Raises:
        BadInputError: If it is no run, or has no records to compare.
    """
    run = read_run(folder)
    with reading(folder / "checksums.jsonl", "mend that"):
        rows, _, unreadable = read_checksums(folder / "checksums.jsonl")
    if not rows:
        raise BadInputError(
            f"{folder}: nothing was recorded to compare with (checksums.jsonl); its first row comes after "
            "log.every steps, with log.fingerprints=true"
        )
    return Recorded(run.path, run.manifest, rows, unreadable)


def last_step(run: Recorded, steps: int | None) -> int:
    """Returns the last step to replay: that of the last record within the requested steps.

    Raises:
        BadInputError: If there is no record within them, or fewer steps.
    """
    rows = sorted(row.step for row in run.rows)
    if steps is None:
        return min(rows[-1], run.manifest.last_step)
    if not rows[0] <= steps <= rows[-1]:
        recorded = (
            f"only step {rows[0]} was recorded; leave --steps out"
            if rows[0] == rows[-1]
            else f"steps were recorded from {rows[0]} to {rows[-1]}; give a number between them"
        )
        raise BadInputError(f"--steps {steps}: {recorded}")
    return max(row for row in rows if row <= steps)


def kept_attempts(manifest: Manifest) -> list[Attempt]:
    """Returns the attempts of which steps are left; changes of dropped ones count as changes of the next."""
    kept = list[Attempt]()
    for attempt in manifest.attempts:
        lost = [change for earlier in kept if earlier.step >= attempt.step for change in earlier.changed]
        one = attempt.model_copy(update={"changed": [*lost, *attempt.changed]})
        kept = [*(earlier for earlier in kept if earlier.step < attempt.step), one]
    return kept


def had_checksums(run: Recorded, step: int) -> bool:
    """Returns True if checksums.jsonl should have that step: log.fingerprints may change on resume."""
    kept = kept_attempts(run.manifest)
    return next((one for one in reversed(kept) if one.step < step), kept[0]).checksums


def parts_of(run: Recorded, until: int, ranks: int | None) -> list[Segment]:
    """Splits the run into segments: one resumed on other ranks is replayed on the same ones.

    Raises:
        BadInputError: If an attempt changed something that can't be restored, such as its data.
    """
    kept = kept_attempts(run.manifest)
    ends = [*(attempt.step for attempt in kept[1:]), until]
    before = dict[str, str]()  # what was changed after a part, from the last one back
    parts = list[Segment]()
    for attempt, end in zip(reversed(kept), reversed(ends), strict=True):
        if attempt.step < until:
            settings = tuple(f"{name}={value}" for name, value in before.items())
            part = Segment(
                min(end, until), ranks or attempt.ranks, attempt.threads, attempt.log_every, settings
            )
            if not parts or replace(part, until=parts[0].until) != parts[0]:  # the one after it
                parts.insert(0, part)
        if attempt.step:
            for change in reversed(attempt.changed):
                before |= _before(run, attempt.step, change)
    return parts


def _before(run: Recorded, step: int, change: str) -> dict[str, str]:
    """Returns the setting that undoes a change "key: before, now after", see `trainer.runs.differences`."""
    name, _, values = change.partition(": ")
    try:
        value, _ = json.JSONDecoder().raw_decode(values)
    except ValueError:  # of a file or of data it is a hash
        value = REDACTED
    if name == "task" or name not in flat(run.manifest.config) or REDACTED in str(value):
        raise BadInputError(
            f"{run.path}: it was changed after step {step} ({change}), and what was before "
            "isn't kept: it can't be replayed"
        )
    return {name: json.dumps(value)}
