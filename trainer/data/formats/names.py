"""Hints for a file name that doesn't exist, from similar names that do."""

import os
from collections.abc import Sequence
from urllib.parse import unquote

from trainer.data.formats.labels import folded, quoted

_FARTHEST = 3  # components at the end of a path that are searched for by themselves


def hint(root: bytes, name: bytes) -> str:
    """Returns a hint such as "; there is 'a/x.jpg': write it so"; "" if no existing name is similar.

    Similar names differ in Unicode form, case, spaces, slashes, percent-encoding or folders.

    Args:
        root: Folder that the name is relative to.
        name: The name that doesn't exist.
    """
    if os.path.lexists(os.path.join(root, name)):  # noqa: PTH118  (bytes)
        return ""
    text = os.fsdecode(name)
    url = "; this is a URL: fetch the files, and write their names" if "://" in text else ""
    parts = [part for part in text.replace("\\", "/").split("/") if part.strip(". ")]
    for first in dict.fromkeys((0, *range(max(0, len(parts) - _FARTHEST), len(parts)))):
        if similar := _similar(root, parts[first:]):
            return f"{url}; there is {quoted(similar)}: write it so"
    return url


def seen(name: str) -> str:
    """Returns a key that is equal for names that differ in Unicode form, case, spaces or percent-encoding."""
    return folded(unquote(name)).casefold()


def _similar(root: bytes, parts: Sequence[str]) -> str:
    """Returns a path below a folder that is similar to these components; "" if there is none."""
    path = ""
    for part in parts:
        try:
            entries = os.listdir(os.path.join(root, os.fsencode(path)))  # noqa: PTH118, PTH208  (bytes)
        except OSError:
            return ""
        names = sorted(map(os.fsdecode, entries))
        wanted = part if part in names else next((each for each in names if seen(each) == seen(part)), "")
        if not wanted:
            return ""
        path = os.path.join(path, wanted)  # noqa: PTH118
    return path
