"""Where the samples of a wav or flac file end, and what lies behind them."""

import mmap
import re
from typing import Literal, NamedTuple

from trainer.data.formats.signatures import what_it_is
from trainer.host.files import read_at

_ORDERS: dict[bytes, Literal["little", "big"]] = {
    b"RIFF": "little",
    b"RIFX": "big",
    b"RF64": "little",
    b"BW64": "little",
}
_CHUNKS = 64  # of a wav file that may come before its samples, or behind them
_UNKNOWN_SIZES = (0, 0x7FFFFFFF, 0x7FFFFFFE, 0xFFFFFFFE, 0xFFFFFFFF)  # of who wrote to a pipe
_UNKNOWN_LONG = (0, (1 << 63) - 1, (1 << 64) - 1)
_CHUNK_NAME = re.compile(rb"(?!RIFF|RIFX|RF64|BW64|data|fLaC|OggS|FORM)\w[\w ]{3}", re.ASCII)
_BLOCK = 1 << 20
_HEAD = 4096  # bytes that tell what it is
_SYNC = re.compile(rb"\xff[\xf8\xf9]", re.DOTALL)
_FRAME_HEADER, _LARGEST_FRAME = 16, 1 << 20


class Span(NamedTuple):
    """Bytes of a file's samples; an end behind that of the file says that it is cut short."""

    begin: int
    end: int


def samples_of_wav(file: int, size: int) -> Span | None:
    """Where the samples of a wav file lie; None if it isn't one.

    Args:
        file: An open file.
        size: Its bytes.
    """
    header = read_at(file, 0, 12)
    order = _ORDERS.get(header[:4])
    if order is None or header[8:12] != b"WAVE":
        return None
    position, long = 12, 0
    for _ in range(_CHUNKS):
        chunk = read_at(file, position, 8)
        if len(chunk) < 8:
            return Span(position, size + 1)
        length, begin = int.from_bytes(chunk[4:], order), position + 8
        if chunk[:4] == b"ds64":  # of files beyond 4 GB
            long = int.from_bytes(read_at(file, begin + 8, 8), "little")
        if chunk[:4] == b"data":
            if length == 0xFFFFFFFF and long not in _UNKNOWN_LONG:
                return Span(begin, begin + long)
            return Span(begin, size if length in _UNKNOWN_SIZES else begin + length)
        position = begin + length + length % 2
    return None


def behind(file: int, size: int) -> str:
    """What lies behind the end of a recording, such as "9 bytes at byte 244: …"; "" for what belongs there.

    Tags, zeros and whole chunks of a wav file belong there; a second recording doesn't.
    """
    begin = _past_tags(file, 0, size)
    if read_at(file, begin, 4) == b"fLaC":
        end = _end_of_flac(file, begin, size)
    elif span := samples_of_wav(file, size):
        order = _ORDERS[read_at(file, 0, 4)]
        # Odd samples are followed by a byte, which some leave out.
        end = max(_past_chunks(file, span.end + odd, size, order) for odd in {0, (span.end - span.begin) % 2})
    else:
        return ""
    if (end := _past_tags(file, end, size)) >= size:
        return ""
    what = what_it_is(read_at(file, end, _HEAD))
    return f"{size - end:,} bytes at byte {end:,}{': ' if what else ''}{what}"


def _past_chunks(file: int, position: int, size: int, order: Literal["little", "big"]) -> int:
    for _ in range(_CHUNKS):
        chunk = read_at(file, position, 8)
        length = int.from_bytes(chunk[4:], order)
        if not _CHUNK_NAME.fullmatch(chunk[:4]) or position + 8 + length > size:
            break
        position += 8 + length + length % 2
    return position


def past_id3(file: int, position: int) -> int:
    """The place behind an ID3 tag (version 2) that begins at another; that one if none does."""
    header = read_at(file, position, 10)
    if header[:3] != b"ID3" or len(header) < 10:
        return position
    # Four digits of seven bits; a footer repeats the header.
    length = sum(digit << shift for digit, shift in zip(header[6:10], (21, 14, 7, 0), strict=True))
    return position + 10 + length + 10 * bool(header[5] & 0x10)


def _past_tags(file: int, position: int, size: int) -> int:
    """The place behind zeros and tags (ID3, APE) that begin at another."""
    before = -1
    while before < position < size:
        before = position
        while (piece := read_at(file, position, _BLOCK)) and not piece.strip(b"\0"):
            position += len(piece)
        position += len(piece) - len(piece.lstrip(b"\0"))
        position = past_id3(file, position)
        header = read_at(file, position, 32)
        if header[:3] == b"TAG" and position + 128 <= size:
            position += 128
        elif header[:8] == b"APETAGEX":
            position += 32 + int.from_bytes(header[12:16], "little")
    return position


def _end_of_flac(file: int, begin: int, size: int) -> int:
    """The place behind the last frame of a flac file, `size` where none can be found.

    Nothing in the file says where it lies. Its header says which samples it holds, and its bytes have a
    checksum of zero with the two at their end.
    """
    info = read_at(file, begin + 8, 18)
    nominal, largest = int.from_bytes(info[:2], "big"), int.from_bytes(info[7:10], "big")
    total = int.from_bytes(info[13:18], "big") & ((1 << 36) - 1)
    with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as data:
        for found in _SYNC.finditer(data, begin):
            at = found.start()
            if total and _frame_end(data[at : at + _FRAME_HEADER], nominal) == total:
                break
        else:
            return size
        frame = data[at : at + (largest or _LARGEST_FRAME)]
    ends = [at + length for length in _whole(frame)]
    # By chance one of 65,536 shorter ones has that checksum, too.
    known = (end for end in ends if (rest := _past_tags(file, end, size)) >= size or _begins(file, rest))
    return next(known, ends[0] if ends else size)


def _begins(file: int, position: int) -> bool:
    return read_at(file, position, 4) in (b"fLaC", b"OggS", *_ORDERS)


def _frame_end(header: bytes, nominal: int) -> int:
    """The number of the sample behind a frame; -1 if this is no header of one."""
    if len(header) < _FRAME_HEADER:
        header += bytes(_FRAME_HEADER)
    code, ones = header[2] >> 4, f"{header[4]:08b}".index("0") if header[4] < 0xFF else 8
    if ones in (1, 8):
        return -1
    number = header[4] & (0x7F >> ones)
    after = 4 + max(1, ones)
    for digit in header[5:after]:
        number = number << 6 | digit & 0x3F
    extra = {6: 1, 7: 2}.get(code, 0)
    told = int.from_bytes(header[after : after + extra], "big") + 1
    after += extra + {12: 1, 13: 2, 14: 2}.get(header[2] & 15, 0)
    if _checksum(header[:after], 0x107) != header[after]:
        return -1
    if code < 2:
        block = 192
    elif code < 6:
        block = 576 << (code - 2)
    else:
        block = told if extra else 256 << (code - 8)
    # The number of a frame, or, where their lengths vary, of its first sample.
    return (number if header[1] & 1 else number * nominal) + block


def _checksum(data: bytes, polynomial: int) -> int:
    value = 0
    for byte in data:
        value = _TABLES[polynomial][value ^ byte]
    return value


def _whole(frame: bytes) -> list[int]:
    """Lengths of a beginning of some bytes whose checksum of 16 bits is zero."""
    value, found, table = 0, list[int](), _TABLES[0x18005]
    for length, byte in enumerate(frame, 1):
        value = (value << 8 & 0xFFFF) ^ table[value >> 8 ^ byte]
        if not value and length > 8:
            found.append(length)
    return found


def _table(polynomial: int) -> list[int]:
    bits = polynomial.bit_length() - 1
    values = []
    for byte in range(256):
        value = byte << (bits - 8)
        for _ in range(8):
            value <<= 1
            value ^= polynomial * (value >> bits)
        values.append(value)
    return values


_TABLES = {polynomial: _table(polynomial) for polynomial in (0x107, 0x18005)}
