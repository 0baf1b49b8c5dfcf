"""End of the samples of a wav or flac file, and the bytes behind it."""

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
_CHUNKS = 64  # most chunks of a wav file before its samples, or behind them
_UNKNOWN_SIZES = (0, 0x7FFFFFFF, 0x7FFFFFFE, 0xFFFFFFFE, 0xFFFFFFFF)  # sizes in files written to a pipe
_UNKNOWN_LONG = (0, (1 << 63) - 1, (1 << 64) - 1)
_CHUNK_NAME = re.compile(rb"(?!RIFF|RIFX|RF64|BW64|data|fLaC|OggS|FORM)\w[\w ]{3}", re.ASCII)
_BLOCK = 1 << 20
_HEAD = 4096  # bytes by which the kind of a file is recognized
# The first bytes of a flac, wav or ogg file.
_RECORDING = re.compile(
    rb"fLaC[\x00\x80]\x00\x00\x22|(?:RIFF|RIFX|RF64|BW64).{4}WAVE|OggS\x00\x02\x00{8}", re.DOTALL
)


class Span(NamedTuple):
    """Range of a file's samples in bytes; if the file is truncated, `end` is beyond its size."""

    begin: int
    end: int


def samples_of_wav(file: int, size: int) -> Span | None:
    """Returns the range of a wav file's samples; None for other files.

    Args:
        file: Descriptor of an open file.
        size: Size of the file in bytes.
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
        if chunk[:4] == b"ds64":  # in files above 4 GB
            long = int.from_bytes(read_at(file, begin + 8, 8), "little")
        if chunk[:4] == b"data":
            if length == 0xFFFFFFFF and long not in _UNKNOWN_LONG:
                return Span(begin, begin + long)
            return Span(begin, size if length in _UNKNOWN_SIZES else begin + length)
        position = begin + length + length % 2
    return None


def behind(file: int, size: int) -> str:
    """Describes bytes behind a recording, such as "9 bytes at byte 244: …"; "" if there are none.

    Tags, zeros and complete wav chunks are ignored. Behind a flac file only a second recording is found.
    """
    begin = _past_tags(file, 0, size)
    if read_at(file, begin, 4) == b"fLaC":
        end = _end_of_flac(file, begin, size)
    elif span := samples_of_wav(file, size):
        order = _ORDERS[read_at(file, 0, 4)]
        # Samples of an odd size are followed by a padding byte, which some writers omit.
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
    """Returns the position after an ID3 tag (version 2), or `position` if there is none."""
    header = read_at(file, position, 10)
    if header[:3] != b"ID3" or len(header) < 10:
        return position
    # Four bytes of seven bits; a footer repeats the header.
    length = sum(digit << shift for digit, shift in zip(header[6:10], (21, 14, 7, 0), strict=True))
    return position + 10 + length + 10 * bool(header[5] & 0x10)


def _past_tags(file: int, position: int, size: int) -> int:
    """Returns the position after zeros and tags (ID3, APE)."""
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
    """Returns the position of a second recording after the metadata blocks of a flac file; `size` if none.

    A flac file doesn't state where its last frame ends, so other bytes may be part of it.
    """
    position, last = begin + 4, False
    while not last and len(header := read_at(file, position, 4)) == 4:
        last, position = header[0] >= 0x80, position + 4 + int.from_bytes(header[1:], "big")
    for at in range(position, size, _BLOCK):
        if match := _RECORDING.search(read_at(file, at, _BLOCK + 16)):
            return at + match.start()
    return size
