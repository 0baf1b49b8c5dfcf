"""Samples that can't be decoded: refused, or replaced by the same others on every rank and after a resume."""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from trainer.config.data import OnCorrupt
from trainer.config.redact import redact
from trainer.errors import BadInputError
from trainer.host import strict_json
from trainer.host.files import open_own
from trainer.rng import Ints, Purpose, key

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
        samples: int64 (micro_batch_size,).
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

    With a file the count is that of all ranks and attempts; without one, this rank's in this attempt.

    Args:
        what: Which data set: "training" or "evaluation".
        budget: How many different samples may be corrupt.
        file: Where they are written, one JSON object per line, or None.

    Raises:
        BadInputError: If an earlier attempt found too many, or the file can't be read.
    """

    def __init__(self, what: str, budget: int, file: Path | None = None) -> None:
        """Starts with none, or with what is in the file."""
        self._what, self._budget, self._file = what, budget, file
        self.samples = set[int]()
        if file is not None and os.path.lexists(file):
            self._exchange(file, {})
            self._check(f"{file} names them")

    def add(self, found: Sequence[Bad]) -> None:
        """Takes note of corrupt samples.

        Raises:
            BadInputError: If there are more than the budget allows, or the file can't be written.
        """
        new = {bad.sample: bad for bad in found if bad.sample not in self.samples}
        if new and self._file is not None:
            self._exchange(self._file, new)
        self.samples.update(new)
        if found:
            self._check(f"the last is {found[-1].name} ({found[-1].reason})")

    def _check(self, which: str) -> None:
        if len(self.samples) > self._budget:
            raise BadInputError(
                f"{len(self.samples)} {self._what} samples are corrupt, and data.corrupt_budget allows "
                f"{self._budget}: {which}; mend the data or raise the budget"
            )

    def _exchange(self, path: Path, new: Mapping[int, Bad]) -> None:
        """Reads what all ranks have found, and adds what none of them has."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(open_own(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                text = file.read()
                self.samples.update(_samples_in(text, self._what))
                lines = [
                    json.dumps(redact({"data": self._what, **bad._asdict()})) + "\n"
                    for bad in new.values()
                    if bad.sample not in self.samples
                ]
                # What a kill cut off stays a line of its own.
                start = "\n" if lines and text and not text.endswith(b"\n") else ""
                file.write((start + "".join(lines)).encode())
        except OSError as error:
            raise BadInputError(f"{path}: can't be written ({error.strerror})") from error


def _samples_in(text: bytes, what: str) -> Iterator[int]:
    for line in text.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # cut off by a kill
            entry = strict_json.parse(line)
            if entry["data"] == what:
                yield int(entry["sample"])
