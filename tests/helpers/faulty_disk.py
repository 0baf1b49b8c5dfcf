"""A disk that dies at a chosen operation, or refuses it: takes the place of `os` in checkpoint.files."""

import os
import random
import time
from pathlib import Path
from typing import Any

COUNTED = ("open", "mkdir", "write", "fsync", "close", "rename", "unlink", "rmdir")


class Killed(BaseException):
    """kill -9: nothing is cleaned up after it."""


class Disk:
    """Passes everything on to `os`, but for the faults; syncs take no time, and are only remembered.

    The counted operation `at` (from 0; -1: none) gives an `error`, or kills if that is None: then every later
    one finds a dead process. Each write takes `slow` seconds longer.
    """

    def __init__(self, at: int = -1, error: int | None = None, slow: float = 0.0) -> None:
        self.at, self.error, self.slow = at, error, slow
        self.done = 0
        self.dead = False
        self._open: set[int] = set()
        self._unsynced: set[int] = set()
        # New names, each with the folder it is in: a folder that is moved takes them along.
        self._made: list[tuple[int, str]] = []
        self._renames: list[tuple[Path, Path]] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return (lambda *args, **kwargs: self._call(name, real, *args, **kwargs)) if name in COUNTED else real

    def _call(self, name: str, real: Any, *args: Any, **kwargs: Any) -> Any:
        number, self.done = self.done, self.done + 1
        if self.dead or (number == self.at and self.error is None):
            self.dead = True
            raise Killed
        if number == self.at:
            assert self.error is not None
            raise OSError(self.error, os.strerror(self.error))
        if name == "fsync":
            self._synced(*args)
            return None
        if name == "write":
            time.sleep(self.slow)
        gone = Path(args[0]).stat().st_ino if name == "rmdir" else None  # its number may be given to another
        result = real(*args, **kwargs)
        self._made = [(inode, made) for inode, made in self._made if inode != gone]
        if name == "open":
            self._open.add(result)
            if args[1] & os.O_CREAT:
                self._unsynced.add(os.fstat(result).st_ino)
                self._made.append((Path(args[0]).parent.stat().st_ino, Path(args[0]).name))
        elif name == "close":
            self._open.discard(*args)
        elif name == "rename":
            self._renames.append((Path(args[0]), Path(args[1])))
        return result

    def _synced(self, file: int) -> None:
        inode = os.fstat(file).st_ino
        self._unsynced.discard(inode)
        self._made = [(folder, name) for folder, name in self._made if folder != inode]
        self._renames = [(was, now) for was, now in self._renames if now.parent.stat().st_ino != inode]

    def cut_power(self, folder: Path, random: random.Random) -> None:
        """Loses what nobody synced: some renames and new files, and the ends of files."""
        for file in self._open:
            os.close(file)
        folders = {path.stat().st_ino: path for path in (folder, *folder.rglob("*")) if path.is_dir()}
        for inode, name in self._made:
            if inode in folders and random.random() < 0.5:
                (folders[inode] / name).unlink(missing_ok=True)
        for was, now in reversed(self._renames):
            if now.exists() and not was.exists() and random.random() < 0.5:
                now.rename(was)
        for path in folder.rglob("*"):
            facts = path.lstat()
            if path.is_file() and facts.st_ino in self._unsynced:
                os.truncate(path, random.randint(0, facts.st_size))
