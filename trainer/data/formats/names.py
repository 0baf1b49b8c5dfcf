"""Hints for a name that leads to no file, from the names that exist."""

import os
from collections.abc import Sequence
from urllib.parse import unquote

from trainer.data.formats.labels import folded, quoted

_FARTHEST = 3  # parts of a name, from its end, that are looked for by themselves


def hint(root: bytes, name: bytes) -> str:
    """Returns a hint, such as "; there is 'a/x.jpg': write it so"; "" if no existing name is close.

    Found are names that differ in Unicode form, case, spaces, the kind of slash, percent signs or folders.

    Args:
        root: The folder that the name is relative to.
        name: As it is written down.
    """
    if os.path.lexists(os.path.join(root, name)):  # noqa: PTH118  (bytes)
        return ""
    text = os.fsdecode(name)
    url = "; this is a URL: fetch the files, and write their names" if "://" in text else ""
    parts = [part for part in text.replace("\\", "/").split("/") if part.strip(". ")]
    for first in dict.fromkeys((0, *range(max(0, len(parts) - _FARTHEST), len(parts)))):
        if found := _found(root, parts[first:]):
            return f"{url}; there is {quoted(found)}: write it so"
    return url


def seen(name: str) -> str:
    """Returns a key that is equal for names that differ in Unicode form, case, spaces or percent signs."""
    return folded(unquote(name)).casefold()


def _found(root: bytes, parts: Sequence[str]) -> str:
    """A path below a folder that looks like these parts; "" if there is none."""
    path = ""
    for part in parts:
        try:
            here = os.listdir(os.path.join(root, os.fsencode(path)))  # noqa: PTH118, PTH208  (bytes)
        except OSError:
            return ""
        names = sorted(map(os.fsdecode, here))
        wanted = part if part in names else next((each for each in names if seen(each) == seen(part)), "")
        if not wanted:
            return ""
        path = os.path.join(path, wanted)  # noqa: PTH118
    return path
