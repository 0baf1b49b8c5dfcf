"""Counts of files and samples that aren't read, by reason and with the first of each."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence

from pydantic import BaseModel, ConfigDict, Field

_SHOWN = 12  # reasons on a line
_REASONS = 256  # distinct reasons; further ones are counted together
_BETWEEN, _HELD = re.compile(r"[\W\d_]+"), {"validation", "val", "valid", "dev", "test", "eval"}
_ENDINGS = {"{s}": ("", "s"), "{es}": ("", "es"), "{y}": ("y", "ies")}


class LeftOut(BaseModel):
    """Files or samples that were left out for one reason.

    Attributes:
        reason: Noun phrase with "{s}", "{es}" or "{y}" for the ending of a plural.
        count: Number of files or samples.
        first: Location of the first one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    reason: str
    count: int = Field(ge=1)
    first: str

    def __str__(self) -> str:
        """Text such as "3 samples without a label (0.tar: 'a')"."""
        reason = self.reason
        for mark, endings in _ENDINGS.items():
            reason = reason.replace(mark, endings[self.count > 1])
        return f"{self.count:,} {reason} ({self.first})"


def one(reason: str, first: str | bytes) -> LeftOut:
    """Returns the entry for one file; both texts may hold unprintable characters."""
    return LeftOut(reason=_on_one_line(reason), count=1, first=_on_one_line(first))


def by_suffix(name: str) -> str:
    """Returns the reason for leaving out a file that no format reads: hidden, or its suffix."""
    if name.startswith("."):
        return "hidden file{s}"
    suffix = os.path.splitext(name)[1]  # noqa: PTH122  (a name, which may have no end)
    return suffix.lower() if len(suffix) > 1 else "file{s} without a suffix"


def tally(entries: Iterable[LeftOut]) -> tuple[LeftOut, ...]:
    """Sums entries by reason, in the order of first appearance."""
    sums = dict[str, LeftOut]()
    for one in entries:
        reason = one.reason if one.reason in sums or len(sums) < _REASONS else "file{s} of other kinds"
        before = sums.get(reason)
        count = one.count + (before.count if before else 0)
        sums[reason] = (before or one).model_copy(update={"reason": reason, "count": count})
    return tuple(sums.values())


def held_out(names: Iterable[str]) -> str:
    """Returns the first name that says evaluation data, as my_val.jsonl does; "" if none or each does."""
    every = sorted(names)
    held = [name for name in every if {*_BETWEEN.split(os.path.splitext(name)[0].lower())} & _HELD]  # noqa: PTH122
    return held[0] if 0 < len(held) < len(every) else ""


def left_out_line(entries: Sequence[LeftOut]) -> str:
    """Returns one line, such as "left out: 12 .heic (a/1.heic)"; "" if nothing is left out."""
    if not entries:
        return ""
    shown = entries if len(entries) <= _SHOWN else sorted(entries, key=lambda one: -one.count)[:_SHOWN]
    rest = sum(one.count for one in entries) - sum(one.count for one in shown)
    more = f" and {rest:,} of {len(entries) - _SHOWN:,} other kinds" if rest else ""
    return f"left out: {', '.join(map(str, shown))}{more}"


def left_out_lines(sets: Mapping[str, Sequence[LeftOut]]) -> list[str]:
    """Returns a line for each named data set of which something is left out."""
    return [f"{name}: {left_out_line(entries)}" for name, entries in sets.items() if entries]


def _on_one_line(text: str | bytes) -> str:
    shown = os.fsencode(text).decode("utf-8", "backslashreplace")
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in shown)
