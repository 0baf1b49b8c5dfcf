"""Cuts debug information and symbol tables, which no loader reads, out of shared libraries.

Of what `strip` of binutils takes away this takes whole pages, and moves nothing within one: whichever
binutils a base brings, the same library gives the same bytes. Names by which libraries find each other
(.dynsym) stay.
The format: System V ABI, chapters 4 (object files) and 5 (program loading).
"""

import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SEGMENT, SECTION = struct.Struct("<IIQQQQQQ"), struct.Struct("<IIQQQQIIQQ")
ELF64_LITTLE = b"\x7fELF\x02\x01"
UNUSED, SYMTAB, RELA, NOBITS, REL = 0, 2, 4, 8, 9  # types of sections
ALLOC = 2  # the flag of a section that is loaded
PAGE = 4096

Range = tuple[int, int]  # bytes of a file, the end not among them


class Segment(NamedTuple):
    """A line of the program header: what the loader maps."""

    type: int
    flags: int
    offset: int
    address: int
    physical: int
    size: int
    memory: int
    align: int


class Section(NamedTuple):
    """A line of the section table."""

    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry: int


class Library(NamedTuple):
    """The tables of a shared library."""

    header: tuple[bytes | int, ...]
    segments_at: int
    sections_at: int
    segments: list[Segment]
    sections: list[Section]
    names: bytes  # the content of the section that names the others
    names_in: int  # its number


def read(source: BinaryIO) -> Library | None:
    """The tables; None for a file that isn't whole ELF for 64 bits, little-endian, with sections."""
    start = source.read(HEADER.size)
    if len(start) < HEADER.size or not start.startswith(ELF64_LITTLE):
        return None
    header = HEADER.unpack(start)
    segments_at, sections_at = header[5:7]
    segment_size, segments, section_size, sections, names_in = header[9:14]
    if (segment_size, section_size) != (SEGMENT.size, SECTION.size) or names_in >= sections:
        return None
    source.seek(segments_at)
    lines = source.read(segments * SEGMENT.size)
    source.seek(sections_at)
    more = source.read(sections * SECTION.size)
    if len(lines) + len(more) < segments * SEGMENT.size + sections * SECTION.size:  # cut short
        return None
    maps = [Segment(*line) for line in SEGMENT.iter_unpack(lines)]
    table = [Section(*line) for line in SECTION.iter_unpack(more)]
    source.seek(table[names_in].offset)
    names = source.read(table[names_in].size)
    return Library(header, segments_at, sections_at, maps, table, names, names_in)


def unneeded(library: Library) -> set[int]:
    """Numbers of the sections that no loader reads: debug information, the symbol table and its names.

    Empty if a section that stays speaks of one of them, or one isn't there.
    """
    found = set()
    for number, section in enumerate(library.sections):
        name = library.names[section.name : library.names.find(b"\0", section.name)]
        if section.type == SYMTAB:
            found |= {number, section.link}
        elif name.startswith(b".debug_") and section.type != NOBITS and not section.flags & ALLOC:
            found.add(number)
    if max(found, default=0) >= len(library.sections):
        return set()
    staying = [section for number, section in enumerate(library.sections) if number not in found]
    spoken_of = {one.link for one in staying} | {one.info for one in staying if one.type in (REL, RELA)}
    return set() if found & (spoken_of | {library.names_in}) else found


def holes(library: Library, gone: set[int], size: int) -> list[Range]:
    """Whole pages that only the sections `gone` lie in, in their order; none if anything else does, too.

    Nor are there any in a file, of `size` bytes, that isn't well formed.
    """
    found: list[Range] = []
    for section in sorted(map(library.sections.__getitem__, gone), key=offset):
        start, end = section.offset, section.offset + section.size
        if found and start < found[-1][1] + max(section.align, 1):  # nothing between them but what aligns it
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    kept = [
        (0, HEADER.size),
        (library.segments_at, library.segments_at + len(library.segments) * SEGMENT.size),
        (library.sections_at, library.sections_at + len(library.sections) * SECTION.size),
        *((one.offset, one.offset + one.size) for one in library.segments if one.size),
        *(
            (one.offset, one.offset + one.size)
            for number, one in enumerate(library.sections)
            if number not in gone and one.size and one.type not in (UNUSED, NOBITS)
        ),
    ]
    aligned = [one.align for one in library.segments] + [one.align for one in library.sections]
    if any(start < kept_end and kept_start < end for start, end in found for kept_start, kept_end in kept):
        return []
    if any(end > size for _, end in found) or any(align & (align - 1) for align in aligned):
        return []
    # What follows keeps its place in a page, as the loader asks for.
    page = max(PAGE, *aligned)
    whole = [(-(-start // page) * page, end // page * page) for start, end in found]
    return [(start, end) for start, end in whole if start < end]


def offset(section: Section) -> int:
    """Where it lies, to sort by."""
    return section.offset


def strip(path: Path, new: Path, least: int) -> int:
    """Writes a shared library without what it doesn't need.

    Args:
        path: The library; anything else is passed over.
        new: The file to write.
        least: Bytes to save below which nothing is written.

    Returns:
        Bytes saved; 0 if nothing was written.
    """
    with path.open("rb") as source:
        library = read(source)
        gone = unneeded(library) if library else set()
        size = path.stat().st_size
        cut = holes(library, gone, size) if library else []
        saved = sum(end - start for start, end in cut)
        if library is None or saved < least:
            return 0
        with new.open("wb") as target:
            position = 0
            for start, end in [*cut, (size, 0)]:
                source.seek(position)
                while position < start:
                    position += target.write(source.read(min(start - position, 1 << 24)))
                position = end
            for place, content in tables(library, gone, cut):
                target.seek(place)
                target.write(content)
    return saved


def tables(library: Library, gone: set[int], cut: list[Range]) -> list[tuple[int, bytes]]:
    """The header and both tables as they are without what was cut, and where each lies then.

    A section that is gone keeps its line, as one of no type: the others' numbers, which symbols bear, hold.
    """

    def moved(place: int) -> int:
        return place - sum(end - start for start, end in cut if end <= place)

    segments_at, sections_at = moved(library.segments_at), moved(library.sections_at)
    header = HEADER.pack(*library.header[:5], segments_at, sections_at, *library.header[7:])
    segments = [one._replace(offset=moved(one.offset)) for one in library.segments]
    sections = [
        Section(*[0] * 10) if number in gone else one._replace(offset=moved(one.offset))
        for number, one in enumerate(library.sections)
    ]
    return [
        (0, header),
        (segments_at, b"".join(SEGMENT.pack(*one) for one in segments)),
        (sections_at, b"".join(SECTION.pack(*one) for one in sections)),
    ]
