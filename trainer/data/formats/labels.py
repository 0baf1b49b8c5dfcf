"""Labels: a name, or a whole number from 0 on; alike in tables, shards and Arrow folders."""

import decimal
import functools
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

_MOST_GAPS = 100
_LARGEST_EXACT = 2.0**53  # of a float: beyond, two whole numbers are one
_SHOWN = 60
# What pandas and C write for a value that isn't there.
_MISSING = frozenset(
    (
        *("nan", "-nan", "NaN", "-NaN", "NAN", "-NAN", "nan(ind)", "-nan(ind)"),
        *("1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN", "inf", "-inf", "Infinity", "-Infinity"),
        *("NA", "N/A", "n/a", "#N/A", "#NA", "<NA>", "NULL", "null", "None", "NaT"),
    )
)
# With two digits of an exponent, as floats are written: 12e4 may be a name.
_NUMBER = re.compile(r"[+-]?(\d{1,400}\.?\d{0,400}|\.\d{1,400})([eE][+-]\d{2,4})?", re.ASCII)
_FLOAT = re.compile(r"[.eE]")
_WHOLE = re.compile(r"0|[1-9]\d{0,400}", re.ASCII)


class LabelError(ValueError):
    """Labels that can't be meant.

    Attributes:
        at: The place of the first among those that were given.
    """

    def __init__(self, line: str, at: int = 0) -> None:
        """With the line."""
        super().__init__(line)
        self.at = at


def label_of(value: object) -> str:
    """The text of a label, however it is stored.

    Raises:
        LabelError: If it is neither a name nor a whole number from 0 on.
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
    """A number of a class, which may be written as a float.

    Raises:
        LabelError: If it isn't a whole number from 0 on.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | decimal.Decimal | np.number):
        raise LabelError(f"label {quoted(value)} isn't a number")
    if not math.isfinite(value):
        raise LabelError(f"label {value} stands for a missing value")
    if value != int(value):
        raise LabelError(f"label {value} isn't a whole number")
    if value < 0:
        raise LabelError(f"label {value} is negative, as if there were none")
    if isinstance(value, float | np.floating) and value >= _LARGEST_EXACT:
        raise LabelError(f"label {value} is too large a float to be told from the next one")
    return int(value)


def labels_in(column: Any) -> list[Any]:
    """The values of an Arrow column, if its type can hold labels.

    Raises:
        LabelError: If it can't: lists, structs, bytes, times.
    """
    from pyarrow import types

    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    texts = ("string", "large_string", "string_view", "null")
    numbers = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    if numbers or types.is_boolean(kind):
        values: list[Any] = column.to_pylist()
        return values
    if str(kind) in texts:
        # Each name once, however many rows have it: a dictionary makes gigabytes of a file of kilobytes.
        encoded = column.dictionary_encode()
        chunks = encoded.chunks if hasattr(encoded, "chunks") else [encoded]
        return [value for chunk in chunks for value in _values(chunk)]
    kind = str(column.type).partition("<")[0]
    first = f" {quoted(column[0].as_py())}" if len(column) and not types.is_temporal(column.type) else ""
    raise LabelError(f"label{first} is of type {kind}, neither a name nor a number")


def _values(chunk: Any) -> Iterator[Any]:
    """The values of an Arrow dictionary's rows: the same object wherever the value is the same."""
    values = [*chunk.dictionary.to_pylist(), None]
    return (values[-1 if place is None else place] for place in chunk.indices.to_pylist())


def numbered(labels: Sequence[str]) -> tuple[list[int], list[str]]:
    """Labels as numbers, and the classes: in the order of their names, or 0 to the largest number.

    Args:
        labels: From `label_of`; 5 and 5.0 are the same number.

    Raises:
        LabelError: If two of them look alike and aren't the same.
    """
    names = set(labels)
    numbers = {name: number for name in names if (number := _whole_text(name)) is not None}
    if len(numbers) == len(names):
        largest = max(numbers.values())
        # Else they are no numbers of classes but dates, say.
        if largest < _MOST_GAPS * len(set(numbers.values())) + 1000:
            return [numbers[label] for label in labels], [str(number) for number in range(largest + 1)]
        order = sorted(set(numbers.values()))
        place = {number: index for index, number in enumerate(order)}
        return [place[numbers[label]] for label in labels], [str(number) for number in order]
    if pair := alike(names):
        at = sorted(map(labels.index, pair))
        first, second = (quoted(labels[place]) for place in at)
        raise LabelError(f"label {second} can hardly be told from {first}", at[1])
    classes = in_order(list(names))
    number_of = {name: number for number, name in enumerate(classes)}
    return [number_of[label] for label in labels], classes


def in_order(names: Sequence[str]) -> list[str]:
    """Classes by their numbers where all are numbers, else by name."""
    if all(_is_number(name) for name in names):
        return sorted(names, key=int)
    return sorted(names)


def alike(names: Iterable[str]) -> tuple[str, str] | None:
    """Two names that look the same: they differ in spaces, Unicode form, or signs without a width."""
    seen = dict[str, str]()
    for name in sorted(names):
        other = seen.setdefault(folded(name), name)
        if other != name:
            return other, name
    return None


def folded(name: str) -> str:
    """Returns the visible part of a name; a number without leading zeros."""
    if (number := _whole_text(name.strip().lstrip("+0") or "0")) is not None:
        return str(number)
    seen = "".join(letter for letter in name if unicodedata.category(letter) != "Cf")
    return " ".join(unicodedata.normalize("NFC", seen).split())


def quoted(value: object) -> str:
    """A value on one line, in ASCII: what looks alike can be told apart."""
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def printable(text: str) -> str:
    """Text without halves of surrogate pairs, which neither JSON nor a terminal takes."""
    return text.encode("utf-8", "backslashreplace").decode()


@functools.lru_cache(maxsize=1 << 16)
def _checked(text: str) -> str:
    bare = text.strip().strip("\ufeff").strip()
    if not bare:
        raise LabelError("label is empty")
    if "\0" in text:
        raise LabelError(f"label {quoted(text)} holds a zero byte, as UTF-16 has")
    if bare in _MISSING:
        raise LabelError(f"label {quoted(bare)} stands for a missing value")
    if _NUMBER.fullmatch(bare):
        as_integer(float(bare) if _FLOAT.search(bare) else int(bare))
    return printable(text)


def _whole_text(text: str) -> int | None:
    """The number that a text is, 5 as well as 5.0 and 5.0e+00; None for 007, which is a name."""
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
