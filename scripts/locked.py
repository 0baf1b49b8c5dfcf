"""Reads a stack's locks, for the walk over its image and its bill of materials."""

from pathlib import Path
from typing import NamedTuple

from conda_lock import read_toml
from explicit_lock import LockError, Package, parse_lock
from wheels import Wheel, read_lock


class Locked(NamedTuple):
    """The conda packages and wheels of a stack."""

    conda: list[Package]
    wheels: list[Wheel]


def read_locks(folder: Path) -> Locked:
    """Reads `wheels.lock` and every `conda*.lock` of a stack's folder.

    Raises:
        LockError: there is no such stack, or a lock is wrong.
    """
    if not (folder / "stack.toml").is_file():
        there = ", ".join(sorted(path.parent.name for path in folder.parent.glob("*/stack.toml")))
        raise LockError(f"no stack {folder.name}: there are {there or 'none'}")
    md5_only = read_toml(folder / "stack.toml").get("conda", {}).get("md5_only", [])
    conda: list[Package] = []
    for file in sorted(folder.glob("conda*.lock")):
        text = file.read_text()
        try:
            conda += parse_lock(text, frozenset(one.rsplit("-", 2)[0] for one in md5_only if one in text))
        except LockError as error:
            raise LockError(f"{file}: {error}") from None
    wheels = folder / "wheels.lock"
    return Locked(conda, read_lock(wheels.read_text()) if wheels.is_file() else [])
