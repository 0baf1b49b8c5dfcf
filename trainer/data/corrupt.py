"""Samples that can't be decoded: an error, or replaced by others that depend on the sample number alone."""

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


class Corrupt(Exception):  # noqa: N818  (a finding about a file, not an error of the caller)
    """Raised for a sample that can't be decoded; the message is the reason.

    Not raised for read errors, which may be temporary: a replay would then train on other samples.
    """


class Bad(NamedTuple):
    """A corrupt sample, which was replaced.

    Attributes:
        sample: Number of the sample.
        name: Path, for people.
        reason: Reason, for people.
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
    """Fills the rows of a batch; corrupt samples are replaced by others.

    The replacement is a function of the corrupt sample's number, so it is the same in each epoch and on each
    rank.

    Args:
        samples: int64 (micro_batch_size,).
        fill: Writes into a row (first argument) a sample (second); raises Corrupt if it can't be decoded.
        name: Returns the path of a sample, for people.
        on_corrupt: data.on_corrupt; "fail" raises.
        of: Number of samples in the data set.

    Returns:
        Corrupt samples, including corrupt candidates for a replacement.

    Raises:
        BadInputError: If a sample is corrupt and `on_corrupt` is "fail" or no replacement can be decoded.
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
    """Counts the corrupt samples of a run against data.corrupt_budget, and lists them in a file.

    With a file, all ranks and attempts are counted; without one, this rank in this attempt.

    Args:
        what: "training" or "evaluation".
        budget: Number of distinct samples that may be corrupt.
        file: File with one JSON object per line, or None.

    Raises:
        BadInputError: If an earlier attempt found too many, or the file can't be read.
    """

    def __init__(self, what: str, budget: int, file: Path | None = None) -> None:
        """Reads the corrupt samples of earlier attempts from the file, if there is one."""
        self._what, self._budget, self._file = what, budget, file
        self.samples = set[int]()
        if file is not None and os.path.lexists(file):
            self._exchange(file, {})
            self._check(f"{file} names them")

    def add(self, corrupt: Sequence[Bad]) -> None:
        """Counts corrupt samples.

        Raises:
            BadInputError: If there are more than the budget allows, or the file can't be written.
        """
        new = {bad.sample: bad for bad in corrupt if bad.sample not in self.samples}
        if new and self._file is not None:
            self._exchange(self._file, new)
        self.samples.update(new)
        if corrupt:
            self._check(f"the last is {corrupt[-1].name} ({corrupt[-1].reason})")

    def _check(self, which: str) -> None:
        if len(self.samples) > self._budget:
            raise BadInputError(
                f"{len(self.samples)} {self._what} samples are corrupt, and data.corrupt_budget allows "
                f"{self._budget}: {which}; mend the data or raise the budget"
            )

    def _exchange(self, path: Path, new: Mapping[int, Bad]) -> None:
        """Reads the samples that all ranks have listed, and appends those that none has."""
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
                # A line that a kill cut off stays a line of its own.
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
