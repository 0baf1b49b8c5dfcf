"""JSON that comes back as it was written, and JSON from anywhere read without surprises."""

import json
import math
from typing import Any

LARGEST = 16 << 20
_DIGITS = 100


def dump(value: Any) -> bytes:
    """Writes JSON.

    Raises:
        ValueError: If `parse` would not give the same value back (a tuple, a key that is a number, NaN),
            or it takes more than 16 MiB.
    """
    try:
        data = json.dumps(value, allow_nan=False).encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if parse(data) != value:
        raise ValueError("JSON keeps lists, not tuples, and only keys that are strings")
    return data


def parse(data: bytes) -> Any:
    """Reads JSON.

    Raises:
        ValueError: With the reason: not JSON, larger than 16 MiB, nested too deeply, a key twice, a number
            that isn't finite or is absurdly long.
    """
    if len(data) > LARGEST:
        raise ValueError(f"larger than {LARGEST >> 20} MiB")
    try:
        return json.loads(
            data.decode(),
            object_pairs_hook=_object,
            parse_constant=_no_constant,
            parse_int=_int,
            parse_float=_float,
        )
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except UnicodeDecodeError as error:
        raise ValueError("not JSON (not UTF-8)") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON (line {error.lineno}, column {error.colno})") from error


def parse_quickly(data: bytes | str, most: int = LARGEST, **hooks: Any) -> Any:
    """Reads JSON several times as quickly: for many records, and files of gigabytes.

    Of keys that stand there twice the last counts, and NaN is a number.

    Args:
        data: JSON in UTF-8.
        most: Bytes that it may have.
        hooks: Of `json.loads`.

    Raises:
        ValueError: With the reason: not JSON, too large, nested too deeply, a number of thousands of digits.
    """
    if len(data) > most:
        raise ValueError(f"larger than {most >> 20} MiB")
    try:
        return json.loads(data if isinstance(data, str) else data.decode(), **hooks)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a key stands there twice")
    return members


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no number in JSON")


def _int(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a number of more than {_DIGITS} digits")
    return int(text)


def _float(text: str) -> float:
    if len(text) > _DIGITS or not math.isfinite(number := float(text)):
        raise ValueError("a number that no float can hold")
    return number
