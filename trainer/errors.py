"""Errors that the user can mend, and the exit codes that say how a run ended."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_NOT_MEASURED = 3
EXIT_REQUEUE = 75
EXIT_HANG = 76


class DivergedError(Exception):
    """A run whose numbers went bad, so that it can't go on: one line, exit code 1, no traceback."""


class StopRun(Exception):  # noqa: N818  (a wish, not an error)
    """A hook raises it to end the run: one line, exit code 1, status "stopped"; `fit` raises it on.

    The newest checkpoint stays. A class may be derived from it and from what a caller waits for, such as
    `class Pruned(optuna.TrialPruned, StopRun)`.
    """


class Finish(Exception):  # noqa: N818  (a wish, not an error)
    """A hook raises it to end the run as finished: after this step it is evaluated and its weights are left.

    On several ranks they agree on the step, about a second later.
    """


class OutOfMemory(Exception):  # noqa: N818  (torch's own has that name)
    """Memory ran out: a paragraph that says who holds it and what to do, exit code 1, no traceback."""


class LostPeerError(Exception):
    """A rank's loss of another rank: one line.

    Attributes:
        code: Exit code that the other rank left; None: it left no word.
        saved: True if this attempt has written a checkpoint.
    """

    def __init__(self, line: str, code: int | None = None) -> None:
        """With the line."""
        super().__init__(line)
        self.code, self.saved = code, False


class RefusedElsewhereError(LostPeerError):
    """The end of a rank because another one, which says so, refused the run: the same code and line."""


class BadInputError(Exception):
    """Input that the user can mend: shown as one line (what, where, how to fix it), exit code 2.

    Attributes:
        late: True if steps were trained before: the exit code is 1, as of every run that ends without a
            checkpoint of its last step.
    """

    late = False


class OwnCodeError(BadInputError):
    """Error of a user's own code for a sample: one line. In a training rank with its traceback, and code 1.

    Attributes:
        trace: The traceback within that code.
    """

    def __init__(self, line: str, trace: str) -> None:
        """With the line."""
        super().__init__(line)
        self.trace = trace


class UnnamedCodeError(BadInputError):
    """Code that a run's recipe names, and the command doesn't.

    Attributes:
        words: Words that the command lacks.
    """

    def __init__(self, message: str, words: list[str]) -> None:
        """With the words."""
        super().__init__(message)
        self.words = words


@contextmanager
def writing(what: str, remedy: str = "give another") -> Iterator[None]:
    """Context manager in which a path that the user named is written; an error of that is one line.

    Args:
        what: The path, with its flag, for the message.
        remedy: What to do.

    Raises:
        BadInputError: If it can't be written.
    """
    try:
        yield
    except OSError as error:
        raise BadInputError(f"{what}: can't be written ({error.strerror or error}); {remedy}") from error


_FULL = {errno.ENOSPC: "no room is left", errno.EDQUOT: "the quota is used up", errno.EFBIG: "file too large"}
_OF_A_PATH = {
    errno.ENAMETOOLONG: "the name of a file is too long",
    errno.EACCES: "permission denied: give another, or run this as a user who may",
    errno.EPERM: "not permitted",
    errno.EROFS: "is on a read-only file system",
    errno.ENOTDIR: "isn't a folder",
    errno.EISDIR: "is a folder",
    errno.ELOOP: "is a link that leads to itself",
}


def mendable(error: OSError) -> str:
    """Returns a line for an error that only the user can mend, wherever a path is first used; "" else."""
    if error.filename is None:
        return (
            f"a file or standard output can't be written: {_FULL[error.errno]}"
            if error.errno in _FULL
            else ""
        )
    reason = {**_FULL, **_OF_A_PATH}.get(error.errno or 0, "")
    path = str(error.filename) if isinstance(error.filename, int) else os.fsdecode(error.filename)
    path = f"{path:.60}…" if error.errno == errno.ENAMETOOLONG else path
    return f"{path}: {reason}" if reason else ""


@contextmanager
def paths_explained() -> Iterator[None]:
    """Context manager in which an error of the file system or loader that only the user can mend is one line.

    Raises:
        BadInputError: In place of such an error.
    """
    try:
        yield
    except OSError as error:
        if line := mendable(error):
            raise BadInputError(line) from error
        raise
    except ImportError as error:
        if "failed to map segment" not in str(error):
            raise
        why = "raise the limit of address space (ulimit -v), or mount its disk without noexec"
        raise BadInputError(f"{error}; {why}") from error


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or its type; without addresses of objects."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", line)


@contextmanager
def reading(what: object, remedy: str = "") -> Iterator[None]:
    """A context in which an OSError becomes one line: what can't be read, why, and the remedy.

    Raises:
        BadInputError: In place of an OSError.
    """
    try:
        yield
    except OSError as error:
        more = f"; {remedy}" if remedy else ""
        raise BadInputError(f"{what}: can't be read ({error.strerror or first_line(error)}){more}") from error
