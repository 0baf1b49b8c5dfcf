"""Sizes: parsing, formatting, units of memory; and numbers of micro-batches."""

import re

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
_LETTERS = " kmgtp"


def parse_size(text: str) -> int:
    """Returns the bytes of a size such as "200GB" (powers of 1000) or "1.5TiB" (powers of 1024).

    Raises:
        ValueError: If it isn't a size above 0 with its unit.
    """
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(?:([kmgtp])(i?))?b\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError("give a number and a unit, such as 200GB or 1.5TiB")
    number, letter, binary = match.groups()
    size = int(float(number) * (1024 if binary else 1000) ** _LETTERS.index((letter or " ").lower()))
    if size < 1:
        raise ValueError("give a size above 0, such as 200GB")
    return size


def size_text(size: int) -> str:
    """Returns a size as text for `parse_size`, rounded up by less than 1 %."""
    for exponent in range(len(_LETTERS) - 1, 0, -1):
        if size >= 100 * 1000**exponent:
            letter = _LETTERS[exponent] if exponent == 1 else _LETTERS[exponent].upper()
            return f"{-(-size // 1000**exponent)}{letter}B"
    return f"{size}B"


def shares_a_tree(micro_batches: int, ranks: int) -> bool:
    """True if each rank computes a whole branch of the tree: one rank, or a power of two of micro-batches."""
    each = micro_batches // ranks
    return ranks == 1 or each & (each - 1) == 0
