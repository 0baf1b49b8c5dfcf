"""One run at a time in a run folder: a lock that ends with the process, however that ends."""

import contextlib
import errno
import fcntl
import os
import platform
from pathlib import Path

from trainer.errors import BadInputError
from trainer.observe.console import warn

LOCK = ".lock"


def lock(folder: Path) -> int:
    """Locks a run folder for this process, until the process ends or closes the file that is returned.

    A record lock (fcntl) and not flock: it belongs to the process alone. What the process forked, a loader
    worker say, doesn't keep it a moment longer; and it works across hosts on NFS.

    Raises:
        BadInputError: If another process has it, or the folder can't be written.
    """
    try:
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise BadInputError(
            f"--out {folder}: can't be written ({error.strerror}); give another folder"
        ) from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            warn(f"{folder} can't be locked ({error.strerror}): make sure that no other run writes there")
            return file
        who = os.pread(file, 200, 0).decode(errors="replace").strip() or "unknown"
        os.close(file)
        raise BadInputError(
            f"--out {folder}: a run is going on there ({who}); wait for it, stop it, or give another --out"
        ) from error
    with contextlib.suppress(OSError):  # a full disk: only the message of another run is the poorer
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
    return file
