"""Nearest name, for messages about a name that doesn't exist."""

from collections.abc import Iterable

_FARTHEST = 2  # letters that a slip changes: one in three, and one of two


def distance(a: str, b: str) -> int:
    """Letters to insert, remove, replace or swap with the next one, to make `b` of `a`."""
    before, row = list[int](), list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        last, before, row = before, row, [i]
        for j, right in enumerate(b, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (left != right)))
            if i > 1 and j > 1 and left == b[j - 2] and right == a[i - 2]:
                row[-1] = min(row[-1], last[j - 2] + 1)
    return row[-1]


def slip_of(name: str, known: Iterable[str]) -> str:
    """Returns the name that was probably meant: at a small distance, or the only one it begins; else ""."""
    names = list(known)
    letters = len(name.lstrip("-"))
    most = min(_FARTHEST, max(letters // 3, letters > 1))
    close = sorted((distance(name, one), one) for one in names if abs(len(one) - len(name)) <= most)
    begun = [one for one in names if one.startswith((f"{name}_", f"{name}-"))]
    if close and close[0][0] <= most:
        return close[0][1]
    return begun[0] if len(begun) == 1 else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'x'?", or ""."""
    found = slip_of(name, known)
    return f"; did you mean '{found}'?" if found else ""
