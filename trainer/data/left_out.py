"""Files of a data set that aren't read: counted by reason, with the first of each, and printed."""

import os
from collections.abc import Iterable, Mapping, Sequence

from pydantic import BaseModel, ConfigDict, Field

_SHOWN = 12  # reasons, on a line
_REASONS = 256  # that are told apart: a suffix of each file's own is none
_ENDINGS = {"{s}": ("", "s"), "{es}": ("", "es"), "{y}": ("y", "ies")}


class LeftOut(BaseModel):
    """Things that were left out for one reason.

    Attributes:
        reason: What they are; "{s}", "{es}" and "{y}" stand where a plural ends otherwise.
        count: How many.
        first: Where the first one lies.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    reason: str
    count: int = Field(ge=1)
    first: str

    def __str__(self) -> str:
        """Such as "3 samples without a label (0.tar: 'a')"."""
        reason = self.reason
        for mark, endings in _ENDINGS.items():
            reason = reason.replace(mark, endings[self.count > 1])
        return f"{self.count:,} {reason} ({self.first})"


def one(reason: str, first: str | bytes) -> LeftOut:
    """Returns one file that is left out; neither text need be printable."""
    return LeftOut(reason=_on_one_line(reason), count=1, first=_on_one_line(first))


def by_suffix(name: str) -> str:
    """The reason by which a file is left out that nothing reads: hidden, or its suffix."""
    if name.startswith("."):
        return "hidden file{s}"
    suffix = os.path.splitext(name)[1]  # noqa: PTH122  (a name, which may have no end)
    return suffix.lower() if len(suffix) > 1 else "file{s} without a suffix"


def tally(found: Iterable[LeftOut]) -> tuple[LeftOut, ...]:
    """Adds up what has the same reason; the first name of each, in the order of first appearance."""
    sums = dict[str, LeftOut]()
    for one in found:
        reason = one.reason if one.reason in sums or len(sums) < _REASONS else "file{s} of other kinds"
        before = sums.get(reason)
        count = one.count + (before.count if before else 0)
        sums[reason] = (before or one).model_copy(update={"reason": reason, "count": count})
    return tuple(sums.values())


def told(found: Sequence[LeftOut]) -> str:
    """Returns one line, such as "left out: 12 .heic (a/1.heic)"; "" if nothing is left out."""
    if not found:
        return ""
    shown = found if len(found) <= _SHOWN else sorted(found, key=lambda one: -one.count)[:_SHOWN]
    rest = sum(one.count for one in found) - sum(one.count for one in shown)
    more = f" and {rest:,} of {len(found) - _SHOWN:,} other kinds" if rest else ""
    return f"left out: {', '.join(map(str, shown))}{more}"


def told_of_sets(sets: Mapping[str, Sequence[LeftOut]]) -> list[str]:
    """A line for each data set of which something is left out, by its name."""
    return [f"{name}: {told(found)}" for name, found in sets.items() if found]


def _on_one_line(text: str | bytes) -> str:
    shown = os.fsencode(text).decode("utf-8", "backslashreplace")
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in shown)
