"""Labels of tables, tar shards and Arrow folders: names, or integers from 0."""

import decimal
import functools
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

_MOST_GAPS = 100
_LARGEST_EXACT = 2.0**53  # above, a float doesn't represent every integer
_SHOWN = 60
# Texts by which pandas and C write missing values.
_MISSING = frozenset(
    (
        *("nan", "-nan", "NaN", "-NaN", "NAN", "-NAN", "nan(ind)", "-nan(ind)"),
        *("1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN", "inf", "-inf", "Infinity", "-Infinity"),
        *("NA", "N/A", "n/a", "#N/A", "#NA", "<NA>", "NULL", "null", "None", "NaT"),
    )
)
# The exponent has at least two digits, as floats are written: 12e4 may be a name.
_NUMBER = re.compile(r"[+-]?(\d{1,400}\.?\d{0,400}|\.\d{1,400})([eE][+-]\d{2,4})?", re.ASCII)
_FLOAT = re.compile(r"[.eE]")
_WHOLE = re.compile(r"0|[1-9]\d{0,400}", re.ASCII)


class LabelError(ValueError):
    """Raised for invalid labels.

    Attributes:
        at: Index of the first invalid label.
    """

    def __init__(self, line: str, at: int = 0) -> None:
        """Takes the message and the index."""
        super().__init__(line)
        self.at = at


def label_of(value: object) -> str:
    """Returns the text of a label, whatever type it is stored as.

    Raises:
        LabelError: If it is neither a name nor an integer from 0.
    """
    match value:
        case bool():
            return str(value)
        case str():
            return _checked(value)
        case int() | float() | decimal.Decimal() | np.floating() | np.integer():
            return str(as_integer(value))
        case None:
            raise LabelError("label is empty")
        case _:
            raise LabelError(f"label {quoted(value)} is {_kind(value)}, neither a name nor a number")


def as_integer(value: object) -> int:
    """Converts a class number, which may be stored as a float.

    Raises:
        LabelError: If it isn't an integer from 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | decimal.Decimal | np.number):
        raise LabelError(f"label {quoted(value)} isn't a number")
    if not math.isfinite(value):
        raise LabelError(f"label {value} stands for a missing value")
    if value != int(value):
        raise LabelError(f"label {value} isn't a whole number")
    if value < 0:
        raise LabelError(f"label {value} is negative, as if there were none")
    if isinstance(value, float | np.floating) and float(value) >= _LARGEST_EXACT:
        raise LabelError(f"label {value} is too large a float to be told from the next one")
    return int(value)


def labels_in(column: Any) -> list[Any]:
    """Returns the values of an Arrow column of labels.

    Raises:
        LabelError: If its type can't hold labels: lists, structs, bytes, times.
    """
    from pyarrow import types

    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    numbers = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    if numbers or types.is_boolean(kind) or str(kind) in ("string", "large_string", "string_view", "null"):
        values: list[Any] = column.to_pylist()
        return values
    first = f" {quoted(column[0].as_py())}" if len(column) and not types.is_temporal(column.type) else ""
    raise LabelError(f"label{first} is of type {str(kind).partition('<')[0]}, neither a name nor a number")


def numbered(labels: Sequence[str]) -> tuple[list[int], list[str]]:
    """Returns labels as numbers, and the classes: sorted by name, or 0 to the largest number.

    Args:
        labels: Results of `label_of`; 5 and 5.0 are the same number.

    Raises:
        LabelError: If two different labels look alike.
    """
    names = set(labels)
    numbers = {name: number for name in names if (number := _whole_text(name)) is not None}
    if len(numbers) == len(names):
        largest = max(numbers.values())
        # Sparser numbers aren't class numbers (dates, for example).
        if largest < _MOST_GAPS * len(set(numbers.values())) + 1000:
            return [numbers[label] for label in labels], [str(number) for number in range(largest + 1)]
        order = sorted(set(numbers.values()))
        index_of = {number: index for index, number in enumerate(order)}
        return [index_of[numbers[label]] for label in labels], [str(number) for number in order]
    if pair := alike(names):
        at = sorted(map(labels.index, pair))
        first, second = (quoted(labels[index]) for index in at)
        raise LabelError(f"label {second} can hardly be told from {first}", at[1])
    classes = in_order(list(names))
    number_of = {name: number for number, name in enumerate(classes)}
    return [number_of[label] for label in labels], classes


def in_order(names: Sequence[str]) -> list[str]:
    """Sorts classes by number if all are numbers, else by name."""
    if all(_is_number(name) for name in names):
        return sorted(names, key=int)
    return sorted(names)


def alike(names: Iterable[str]) -> tuple[str, str] | None:
    """Returns two names that differ only in spaces, Unicode form or invisible characters, or None."""
    seen = dict[str, str]()
    for name in sorted(names):
        other = seen.setdefault(folded(name), name)
        if other != name:
            return other, name
    return None


def joined_classes(names: Sequence[str]) -> Iterator[str]:
    """Yields a note on classes that look like several of one image, if there are any."""
    if joined := [name for name in names if "|" in name.strip("|")]:
        yield (
            f"{len(joined):,} of {len(names):,} classes hold '|', as '{joined[0]}'; if an image has several "
            "classes there, train from a table of them with data.label_separator='|'"
        )


def folded(name: str) -> str:
    """Returns the visible form of a name; a number without leading zeros."""
    if (number := _whole_text(name.strip().lstrip("+0") or "0")) is not None:
        return str(number)
    seen = "".join(letter for letter in name if unicodedata.category(letter) != "Cf")
    return " ".join(unicodedata.normalize("NFC", seen).split())


def quoted(value: object) -> str:
    """Returns a value in ASCII on one line, so that similar characters are distinct."""
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def escaped_text(text: str) -> str:
    """Returns text with lone surrogates escaped, which JSON and terminals don't accept."""
    return text.encode("utf-8", "backslashreplace").decode()


@functools.lru_cache(maxsize=1 << 16)
def _checked(text: str) -> str:
    bare = text.strip().strip("\ufeff").strip()
    if not bare:
        raise LabelError("label is empty")
    if "\n" in bare or "\r" in bare:
        raise LabelError(f"label {quoted(bare)} holds a line break, as if a quote weren't closed")
    if "\0" in text:
        raise LabelError(f"label {quoted(text)} holds a zero byte, as UTF-16 has")
    if bare in _MISSING:
        raise LabelError(f"label {quoted(bare)} stands for a missing value")
    if _NUMBER.fullmatch(bare):
        as_integer(float(bare) if _FLOAT.search(bare) else int(bare))
    return escaped_text(text)


def _whole_text(text: str) -> int | None:
    """Returns the integer that a text denotes (5, 5.0, 5.0e+00); None for 007, which is a name."""
    bare = text.strip()
    if _is_number(bare):
        return int(bare)
    if not _NUMBER.fullmatch(bare) or not _FLOAT.search(bare) or re.match(r"[+-]?0\d", bare):
        return None
    number = float(bare)
    return int(number) if number.is_integer() and number < _LARGEST_EXACT else None


def _is_number(label: str) -> bool:
    return bool(_WHOLE.fullmatch(label))


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
