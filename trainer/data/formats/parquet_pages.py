"""Sizes of a Parquet file's pages by their headers; the footer may state others.

Headers are Thrift's compact protocol (github.com/apache/thrift, doc/specs/thrift-compact-protocol.md) with
the fields of PageHeader (github.com/apache/parquet-format).
"""

from trainer.host.files import read_at

_FIRST_READ, _LARGEST_HEADER = 1 << 9, 1 << 20
_DEEPEST = 16
_UNCOMPRESSED, _COMPRESSED = 2, 3
_BOOLEANS, _BYTE, _NUMBERS, _DOUBLE, _BINARY, _LISTS, _STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, (9, 10), 12


def inflated_size(file: int, start: int, size: int) -> int:
    """Returns the uncompressed bytes of a column chunk's pages.

    Args:
        file: Descriptor of the file.
        start: Offset of the chunk.
        size: Bytes of the chunk.

    Raises:
        ValueError: If a page header can't be read.
    """
    at, total = start, 0
    while at < start + size:
        inflated, page = _page(file, at)
        total, at = total + inflated, at + page
    return total


def _page(file: int, at: int) -> tuple[int, int]:
    """Returns the uncompressed bytes of a page, and its stored bytes with the header."""
    window = _FIRST_READ
    while True:
        data = read_at(file, at, window)
        try:
            sizes, header = _struct(data, 0, 0)
            break
        except IndexError:
            if len(data) < window or window >= _LARGEST_HEADER:
                raise ValueError(f"no header of a page at byte {at:,}") from None
            window *= 8
    inflated, compressed = sizes.get(_UNCOMPRESSED, -1), sizes.get(_COMPRESSED, -1)
    if inflated < 0 or compressed < 0:
        raise ValueError(f"no sizes of the page at byte {at:,}")
    return inflated, header + compressed


def _struct(data: bytes, at: int, depth: int) -> tuple[dict[int, int], int]:
    """Returns the integer fields of a struct by number, and the offset of its end."""
    if depth > _DEEPEST:
        raise ValueError("a header of a page is nested too deeply")
    field, numbers = 0, dict[int, int]()
    while kind := data[at]:
        at += 1
        if step := kind >> 4:
            field += step
        else:
            field, at = _number(data, at)
        if (kind := kind & 15) in _NUMBERS:
            numbers[field], at = _number(data, at)
        elif kind not in _BOOLEANS:  # a boolean's value is its kind
            at = _value_end(data, at, kind, depth)
    return numbers, at + 1


def _value_end(data: bytes, at: int, kind: int, depth: int) -> int:
    """Returns the offset of the end of a value in a list or struct."""
    if kind == _STRUCT:
        return _struct(data, at, depth + 1)[1]
    if kind in _NUMBERS:
        return _number(data, at)[1]
    if kind == _BINARY:
        size, at = _varint(data, at)
        return at + size
    if kind in _LISTS:
        count, of = data[at] >> 4, data[at] & 15
        count, at = _varint(data, at + 1) if count == 15 else (count, at + 1)
        for _ in range(count):
            at = _value_end(data, at, of, depth + 1)
            data[at - 1]  # IndexError beyond the bytes that were read
        return at
    if kind in (*_BOOLEANS, _BYTE, _DOUBLE):
        return at + (8 if kind == _DOUBLE else 1)
    raise ValueError("a header of a page holds a field of a kind that none has")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at
    raise ValueError("a header of a page holds a number of more than 64 bits")


def _number(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return value >> 1 ^ -(value & 1), at
