"""What a library loses in the image: symbols and debug information, nothing that is loaded."""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from symbols import ELF64_LITTLE, HEADER, PAGE, SECTION, SEGMENT, SYMTAB, Section, Segment, read, strip

LEAST = 1 << 12
GCC = shutil.which("gcc")
LOADED = 1  # the type of a segment

pytestmark = pytest.mark.skipif(GCC is None, reason="no gcc here")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with 2,000 functions of which one is for others, with debug information."""
    return build(tmp_path_factory.mktemp("library"))


def build(folder: Path, *options: str) -> Path:
    source, made = folder / "numbers.c", folder / "libnumbers.so"
    inner = [
        f"static __attribute__((noinline)) int f{i}(int x) {{ return x * {i} + 1; }}\n" for i in range(2000)
    ]
    calls = " + ".join(f"f{i}(x)" for i in range(2000))
    source.write_text(f"{''.join(inner)}int total(int x) {{ return {calls}; }}\n")
    subprocess.run([str(GCC), "-g", "-shared", "-fPIC", "-o", made, *options, source], check=True)
    return made


def loaded(path: Path) -> list[tuple[int, int, int, str]]:
    """Of each segment its type, address, bytes in memory, and a hash of its content.

    The first holds the header and this table as well, which say where things lie in the file: not compared.
    """
    with path.open("rb") as file:
        library = read(file)
    assert library is not None
    content = bytearray(path.read_bytes())
    for start, size in ((0, 64), (library.segments_at, 56 * len(library.segments))):
        content[start : start + size] = bytes(size)
    found = []
    for one in library.segments:
        assert one.type != LOADED or one.offset % one.align == one.address % one.align
        assert one.offset + one.size <= len(content)
        mapped = hashlib.sha256(memoryview(content)[one.offset : one.offset + one.size]).hexdigest()
        found.append((one.type, one.address, one.memory, mapped))
    return found


def kept(path: Path) -> dict[int, tuple[str, Section, str]]:
    """Name, line without its place, and content's hash of each section but those of no type, by number."""
    with path.open("rb") as file:
        library = read(file)
        assert library is not None
        found = {}
        for number, one in enumerate(library.sections):
            file.seek(one.offset)
            content = b"" if one.type == 8 else file.read(one.size)
            name = library.names[one.name :].split(b"\0")[0].decode()
            if one.type:
                found[number] = (name, one._replace(offset=0), hashlib.sha256(content).hexdigest())
    return found


def test_a_library_is_loaded_as_before(library: Path, tmp_path: Path) -> None:
    new = tmp_path / library.name
    saved = strip(library, new, LEAST)
    assert saved == library.stat().st_size - new.stat().st_size > 100_000
    assert loaded(new) == loaded(library)
    before, after = kept(library), kept(new)
    lost = {before[number][0] for number in before.keys() - after.keys()}
    assert {".symtab", ".strtab", ".debug_info", ".debug_line", ".debug_str"} <= lost
    assert all(name in (".symtab", ".strtab") or name.startswith(".debug_") for name in lost)
    assert after == {number: line for number, line in before.items() if number in after}
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).total(3))"
    told = [subprocess.check_output([sys.executable, "-c", code, path], text=True) for path in (library, new)]
    assert told[0] == told[1] == f"{3 * sum(range(2000)) + 2000}\n"


def test_the_same_bytes_each_time_and_nothing_the_second(library: Path, tmp_path: Path) -> None:
    once, again, twice = (tmp_path / name for name in ("once", "again", "twice"))
    assert strip(library, once, LEAST) == strip(library, again, LEAST)
    assert once.read_bytes() == again.read_bytes()
    assert strip(once, twice, 1) == 0 and not twice.exists()


def test_segments_behind_the_symbols_move_up_by_whole_pages(tmp_path: Path) -> None:
    """So lie those of torch's wheels, whose names of other libraries were written anew at the end."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    library = Path(spec.origin).parent / "lib" / "libtorch_python.so"
    with library.open("rb") as file:
        tables = read(file)
    assert tables is not None
    symbols = [one.offset for one in tables.sections if one.type == SYMTAB]
    if not symbols or max(map(place, tables.segments)) < max(symbols):
        pytest.skip("this torch's library has no segment behind its symbols")
    new = tmp_path / library.name
    saved = strip(library, new, LEAST)
    assert saved > 1e6 and saved % 4096 == 0 and saved == library.stat().st_size - new.stat().st_size
    assert loaded(new) == loaded(library)


def place(segment: Segment) -> int:
    return segment.offset


def test_what_has_relocations_of_its_symbols_keeps_them(tmp_path: Path) -> None:
    library = build(tmp_path, "-Wl,--emit-relocs")
    new = tmp_path / "new"
    assert strip(library, new, LEAST) == 0
    assert not new.exists()


def test_symbols_within_what_is_loaded_stay(library: Path, tmp_path: Path) -> None:
    """A segment over the whole file, as a linker's script may ask for."""
    content = bytearray(library.read_bytes())
    with library.open("rb") as file:
        tables = read(file)
    assert tables is not None
    number = next(i for i, one in enumerate(tables.segments) if one.type == LOADED)
    size = len(content).to_bytes(8, "little")
    at = tables.segments_at + number * 56 + 32
    content[at : at + 8] = size
    (tmp_path / "whole.so").write_bytes(content)
    assert strip(tmp_path / "whole.so", tmp_path / "new", LEAST) == 0


class Made(NamedTuple):
    """A section of a file made by the test."""

    name: str
    type: int
    start: float  # pages
    end: float
    flags: int = 0
    link: int = 0
    info: int = 0
    align: int = 1


DEBUG = Made(".debug_info", 1, 1, 9)
BEHIND = (LOADED, 4, 10 * PAGE, 20 * PAGE, 20 * PAGE, PAGE, PAGE, PAGE)  # a segment


def elf(sections: list[Made], segments_at: int = 64) -> bytes:
    """Eleven pages of numbers, a segment at the eleventh, and the tables."""
    names, rows = b"\0", [(0,) * 10]
    for one in [*sections, Made(".shstrtab", 3, 11, 11 + 200 / PAGE)]:
        at, end = int(one.start * PAGE), int(one.end * PAGE)
        rows.append((len(names), one.type, one.flags, 0, at, end - at, one.link, one.info, one.align, 0))
        names += one.name.encode() + b"\0"
    sections_at = 12 * PAGE
    numbers = (3, 62, 1, 0, segments_at, sections_at, 0, 64, 56, 1, 64, len(rows), len(rows) - 1)
    content = bytearray(b"".join(number.to_bytes(4, "little") for number in range(12 * PAGE // 4)))
    content[:64] = HEADER.pack(ELF64_LITTLE + bytes(10), *numbers)
    content[segments_at : segments_at + 56] = SEGMENT.pack(*BEHIND)
    content[11 * PAGE : 11 * PAGE + len(names)] = names
    return bytes(content) + b"".join(SECTION.pack(*row) for row in rows)


SYMBOLS = Made(".symtab", SYMTAB, 1, 5, link=2)
STRINGS = Made(".strtab", 3, 5, 9)


@pytest.mark.parametrize(
    ("sections", "pages"),
    [
        ([DEBUG], 8),
        ([SYMBOLS, STRINGS], 8),
        # Neighbours share a page, overlap, or are apart.
        ([DEBUG._replace(end=3.5), DEBUG._replace(start=3.5, end=6)], 5),
        ([DEBUG, DEBUG._replace(start=3, end=6)], 8),
        ([DEBUG._replace(end=3), DEBUG._replace(start=6, end=9)], 5),
        # What follows keeps its place in a larger page.
        ([DEBUG, Made(".data", 1, 10, 10.1, align=4 * PAGE)], 4),
        # Something else lies in between, is loaded, or speaks of it.
        ([DEBUG, Made(".comment", 1, 4, 4.1)], 0),
        ([DEBUG._replace(flags=2)], 0),
        ([DEBUG._replace(end=10.5)], 0),
        ([SYMBOLS, STRINGS, Made(".dynsym", 11, 9, 9.5, link=2)], 0),
        ([DEBUG, Made(".rela", 4, 9, 9.5, info=1)], 0),
        ([SYMBOLS._replace(link=2)], 0),
        # Not well formed.
        ([DEBUG._replace(type=8)], 0),
        ([DEBUG._replace(start=100, end=108)], 0),
        ([SYMBOLS._replace(link=99), STRINGS], 0),
        ([DEBUG, Made(".data", 1, 10, 10.1, align=6000)], 0),
    ],
)
@pytest.mark.parametrize("segments_at", [64, int(9.5 * PAGE)])
def test_pages_that_nothing_else_lies_in_go(
    sections: list[Made], pages: int, segments_at: int, tmp_path: Path
) -> None:
    path, new = tmp_path / "made.so", tmp_path / "new"
    path.write_bytes(elf(sections, segments_at))
    assert strip(path, new, 1) == pages * PAGE
    assert new.exists() == (pages > 0)
    if pages:
        assert path.stat().st_size - new.stat().st_size == pages * PAGE
        assert loaded(new) == loaded(path)
        after = kept(new)
        assert after == {number: line for number, line in kept(path).items() if number in after}
        assert {name for name, _, _ in after.values()} <= {".shstrtab", ".data"}


@pytest.mark.parametrize("content", [b"", b"GROUP ( libc.so.6 )\n", b"\x7fELF\x01\x01" + bytes(90)])
def test_other_files_are_passed_over(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "libc.so").write_bytes(content)
    assert strip(tmp_path / "libc.so", tmp_path / "new", LEAST) == 0
    assert not (tmp_path / "new").exists()


def test_a_library_cut_short_is_passed_over(library: Path, tmp_path: Path) -> None:
    (tmp_path / "short.so").write_bytes(library.read_bytes()[:-100])
    assert strip(tmp_path / "short.so", tmp_path / "new", LEAST) == 0


def test_little_is_not_worth_a_change(library: Path, tmp_path: Path) -> None:
    assert strip(library, tmp_path / "new", library.stat().st_size) == 0
    assert not (tmp_path / "new").exists()
