"""Samples that can't be decoded: refused, or replaced by the same others on every rank and after a resume."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from trainer.errors import BadInputError
from trainer.keyed_rng import Ints, Purpose, key

OnCorrupt = Literal["fail", "skip", "quarantine"]

_TRIES = 32


class Corrupt(Exception):  # noqa: N818  (a finding about a file, not a mistake of the caller)
    """A sample whose content can't be decoded; the message is the reason.

    Never raised for an error of reading: that may pass, and the next run would train on other samples.
    """


class Bad(NamedTuple):
    """A sample that was replaced.

    Attributes:
        sample: Its number.
        name: Where it lies.
        reason: Why it couldn't be decoded.
    """

    sample: int
    name: str
    reason: str


def fill_rows(
    samples: Ints,
    fill: Callable[[int, int], None],
    name: Callable[[int], str],
    on_corrupt: OnCorrupt,
    of: int,
) -> list[Bad]:
    """Fills the rows of a batch, and those of corrupt samples with others.

    Which sample stands in is looked up by the number of the corrupt one, and so is the same in each epoch.

    Args:
        samples: int64 (micro_batch,).
        fill: Writes a sample into a row, given both; raises Corrupt if it can't be decoded.
        name: Where a sample lies, for people.
        on_corrupt: Whether to replace.
        of: Number of samples in the data set.

    Returns:
        What was replaced, also what would have stood in and was corrupt too.

    Raises:
        BadInputError: If a sample is corrupt and nothing may, or can, stand in for it.
    """
    bad = list[Bad]()
    for row, first in enumerate(samples.tolist()):
        sample = first
        for attempt in range(_TRIES + 1):
            try:
                fill(row, sample)
                break
            except Corrupt as error:
                bad.append(Bad(sample, name(sample), str(error)))
                if on_corrupt == "fail":
                    raise BadInputError(
                        f"{name(sample)}: {error}; mend or remove it, or set data.on_corrupt=quarantine"
                    ) from error
                sample = key(Purpose.REPLACEMENT, first, attempt) % of
        else:
            raise BadInputError(
                f"{name(first)} and {_TRIES} samples that might stand in for it can't be decoded "
                f"({bad[0].reason}); mend the data"
            )
    return bad


class Quarantine:
    """Counts the corrupt samples of a run against its budget, and writes them down.

    Args:
        what: Which data set: "training" or "evaluation".
        budget: How many different samples may be corrupt, as this rank sees them.
        file: Where they are written, one JSON object per line, or None.
    """

    def __init__(self, what: str, budget: int, file: Path | None = None) -> None:
        """Starts with none, or with what an earlier attempt wrote."""
        self._what, self._budget, self._file = what, budget, file
        self.samples = set[int]()
        if file is not None:
            self._read(file)

    def _read(self, file: Path) -> None:
        try:
            lines = file.read_bytes().splitlines()
        except FileNotFoundError:
            return
        for line in lines:
            try:
                entry = json.loads(line)
                if entry["data"] == self._what:
                    self.samples.add(int(entry["sample"]))
            except (ValueError, KeyError, TypeError):  # cut off by a kill
                continue

    def add(self, found: Sequence[Bad]) -> None:
        """Takes note of corrupt samples.

        Raises:
            BadInputError: If there are more than the budget allows.
        """
        new = {bad.sample: bad for bad in found if bad.sample not in self.samples}
        if not new:
            return
        self.samples.update(new)
        if self._file is not None:
            lines = [json.dumps({"data": self._what, **bad._asdict()}) + "\n" for bad in new.values()]
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # One write in append mode: the lines of several ranks don't mix.
            file = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(file, "".join(lines).encode())
            finally:
                os.close(file)
        if len(self.samples) > self._budget:
            last = list(new.values())[-1]
            raise BadInputError(
                f"{len(self.samples)} {self._what} samples are corrupt, and data.corrupt_budget allows "
                f"{self._budget}: the last is {last.name} ({last.reason}); mend the data or raise the budget"
            )
