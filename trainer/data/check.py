"""Check of a data set before ranks start: missing files, and with data.check=full every sample decoded."""

import errno
import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from trainer.config.data import Check
from trainer.data.corrupt import Bad
from trainer.data.dataset import Dataset, spread
from trainer.errors import BadInputError
from trainer.host.limits import read_limits
from trainer.observe.console import warn

_THREADS = 16  # concurrent round trips to a network file system
_FEW = 4  # names in a folder up to which single stat calls are cheaper than listing the folder
_STEP = 1000
_ASKED = 10_000  # files whose permissions are looked up


class Wrong(NamedTuple):
    """A file that can't be read as a sample.

    Attributes:
        number: Index of the file in the list that was checked.
        reason: Reason, for people.
    """

    number: int
    reason: str


class CheckedData(NamedTuple):
    """Data set to be checked, and the number of its samples that may be corrupt."""

    what: str
    dataset: Dataset
    budget: int


def check_data(how: Check, remote: bool, parts: Sequence[CheckedData]) -> None:
    """Checks the files of data sets, and with data.check=full all samples.

    Args:
        how: data.check.
        remote: True for data behind a URL, whose shards are checked when they are fetched.
        parts: Training and evaluation sets.

    Raises:
        BadInputError: If files are missing (their number and the first one), or samples can't be used.
    """
    if how == "none" or remote:
        return
    for part in parts:
        records = getattr(part.dataset, "records", None)
        if records is not None and (line := records.absent()):
            raise BadInputError(line)
    for part in parts:
        remarks = getattr(getattr(part.dataset, "pictures", part.dataset), "remarks", None)
        if remarks is not None and (line := remarks(how == "full")):
            warn(f"{part.what} data: {line}")
    for part in parts:
        if how == "full" and part.dataset.arrays is None and not part.dataset.in_process:
            _decode_all(part)


def unreadable(root: bytes, names: Sequence[bytes]) -> list[Wrong]:
    """Returns the files that don't exist or aren't regular, and those of 10,000 that may not be read.

    Each folder is listed once. A stat call per file is needed only for links, names that the listing doesn't
    have, and folders with few names; permissions, too, take a call per file.

    Args:
        root: Folder that the names are relative to.
        names: Paths of the files.
    """
    folders: dict[bytes, list[int]] = {}
    for number, name in enumerate(names):
        head, slash, _ = name.rpartition(b"/")
        folders.setdefault(head or slash, []).append(number)

    def unsettled(folder: bytes) -> list[int]:
        named = folders[folder]
        try:
            if len(named) <= _FEW:
                return named
            with os.scandir(os.path.join(root, folder)) as entries:  # noqa: PTH118  (bytes)
                regular = {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
        except OSError:
            return named
        return [number for number in named if names[number].rpartition(b"/")[2] not in regular]

    def looked_up(some: Sequence[int]) -> list[Wrong]:
        reasons = ((number, _wrong(os.path.join(root, names[number]))) for number in some)  # noqa: PTH118
        return [Wrong(number, reason) for number, reason in reasons if reason]

    with ThreadPoolExecutor(_THREADS) as pool:
        asked = spread(len(names), _ASKED).tolist()
        left = sorted({*asked, *chain.from_iterable(pool.map(unsettled, folders))})
        steps = [left[at : at + _STEP] for at in range(0, len(left), _STEP)]
        return list(chain.from_iterable(pool.map(looked_up, steps)))


def _wrong(path: bytes) -> str:
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116
    except OSError as error:
        reason = error.strerror or str(error)
        return f"a link that leads nowhere: {reason}" if os.path.islink(path) else reason  # noqa: PTH114
    if stat.S_ISREG(mode):
        return "" if os.access(path, os.R_OK, effective_ids=True) else os.strerror(errno.EACCES)
    return "is a folder" if stat.S_ISDIR(mode) else "is no regular file"


def unreadable_line(
    wrong: Sequence[Wrong], total: int, what: str, name: Callable[[int], str], remedy: str
) -> str:
    """Returns one line with the number of files that can't be read, and the first; "" if there are none.

    Args:
        wrong: Files that can't be read.
        total: Number of files that were checked.
        what: Description of the files, such as "files named in train.csv".
        name: Returns the name of a file from its number.
        remedy: How to fix it.
    """
    if not wrong:
        return ""
    number, reason = wrong[0]
    first = "" if len(wrong) == 1 else "the first: "
    return f"{len(wrong):,} of {total:,} {what} can't be read; {first}{name(number)} ({reason}); {remedy}"


def _decode_all(part: CheckedData) -> None:
    """Reads each sample once, as training would.

    Raises:
        BadInputError: If a sample can't be used, or more are corrupt than the budget allows.
    """
    what, data, budget = part
    random = np.full((1, data.uniforms), 0.5, np.float32) if data.uniforms else None
    total, shown = len(data), 0
    refused, corrupt = list[str](), dict[int, Bad]()

    def read(sample: int) -> tuple[str, Sequence[Bad]]:
        out = {name: np.empty((1, *field.shape), field.dtype) for name, field in data.fields.items()}
        try:
            return "", data.read(np.array([sample]), random, out) or ()
        except BadInputError as error:
            return str(error), ()

    threads = torch.get_num_threads()
    # Otherwise torch starts a thread pool here, and a process that is forked later waits forever for it.
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(max(1, int(read_limits().cpus))) as pool:
            for at in range(0, total, _STEP):  # in steps, so that an interrupt has little to wait for
                for line, bad in pool.map(read, range(at, min(at + _STEP, total))):
                    refused += [line] if line else []
                    corrupt |= {each.sample: each for each in bad}
                if (done := min(at + _STEP, total)) * 10 // total > shown:
                    shown = done * 10 // total
                    warn(f"data.check=full: {done * 100 // total} % of the {what} samples are decoded")
    finally:
        torch.set_num_threads(threads)
    if refused:
        first = "" if len(refused) == 1 else "the first: "
        raise BadInputError(
            f"{len(refused):,} of {total:,} {what} samples can't be used; {first}{refused[0]}"
        )
    if corrupt:
        worst = corrupt[min(corrupt)]
        line = (
            f"{len(corrupt):,} of {total:,} {what} samples are corrupt, and data.corrupt_budget allows "
            f"{budget:,}; the first: {worst.name} ({worst.reason})"
        )
        if len(corrupt) > budget:
            raise BadInputError(f"{line}; mend the data or raise the budget")
        warn(line)
