"""Recognition of files that aren't images that can be read, by their first bytes."""

import codecs
import re
from pathlib import Path

_CONVERT = ", which isn't read; convert it to JPEG or PNG"
_UNPACK = ": unpack it"
DAMAGED = "that is cut off or damaged"
WEB_PAGE = "an HTML page"
# Offset, bytes, name, and what is said of it; the first match counts.
_KINDS = (
    (0, b"\xff\xd8", "a JPEG", f" {DAMAGED}"),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG", f" {DAMAGED}"),
    (0, b"GIF8", "a GIF", f" {DAMAGED}"),
    (8, b"WEBP", "a WebP", f" {DAMAGED}"),
    (0, (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), "a TIFF", f" {DAMAGED}"),
    (0, b"BM", "a BMP", f" {DAMAGED}"),
    (0, (b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51"), "a JPEG 2000", f" {DAMAGED}"),
    (4, (b"ftypavif", b"ftypavis"), "an AVIF", f" {DAMAGED}, or that this PIL can't read"),
    (4, (b"ftyphei", b"ftyphev", b"ftypmif1", b"ftypmsf1"), "HEIC", _CONVERT),
    (0, (b"\0\0\0\x0cJXL ", b"\xff\x0a"), "JPEG XL", _CONVERT),
    (0, b"8BPS", "a Photoshop file (PSD)", _CONVERT),
    (0, b"%PDF", "a PDF", _CONVERT),
    (128, b"DICM", "DICOM", _CONVERT),
    (0, b"\x1f\x8b", "gzip", _UNPACK),
    (0, b"PK", "a zip archive", _UNPACK),
    (0, b"BZh", "bzip2", _UNPACK),
    (0, b"\xfd7zXZ\0", "xz", _UNPACK),
    (0, b"\x28\xb5\x2f\xfd", "zstd", _UNPACK),
    (257, b"ustar", "a tar archive", _UNPACK),
    (0, b"\x93NUMPY", "a NumPy array", ""),
    (0, b"PAR1", "Parquet", ""),
    (0, b"ARROW1", "Arrow", ""),
    (0, (b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5"), "a Python pickle", ""),
    (0, b"\x1aE\xdf\xa3", "a video (Matroska, WebM)", ""),
    (4, b"ftyp", "a video (MP4)", ""),
    (8, b"WAVE", "a recording (WAV)", ""),
    (0, b"fLaC", "a recording (FLAC)", ""),
    (0, b"OggS", "a recording (Ogg)", ""),
    (0, b"ID3", "a recording (MP3)", ""),
)
# Patterns of text files; the first match counts.
_TEXTS = (
    (r"<!doctype html|<(html|head|body|title|script)\b", WEB_PAGE),
    (r"\Aversion https://git-lfs", "a Git LFS pointer, not the file: `git lfs pull` fetches it"),
    (r"\A\S*annex/objects/", "a git-annex pointer, not the file: `git annex get` fetches it"),
    (r"<svg\b", f"SVG{_CONVERT}"),
    (r"\A<\?xml", "XML"),
    (r"\A(/9j/|iVBORw0KGgo|R0lGOD|UklGR|data:image/)", "an image as base64 text: decode it"),
)
_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f]")
_LOOKED_AT, _SHOWN = 1024, 40
_HEAD = 4096


def what_it_is(data: bytes | bytearray) -> str:
    """Describes a file that isn't a readable image in a few words; "" if it is unknown."""
    if not data:
        return "empty"
    if data.count(data[0]) == len(data):
        return "zeros" if not data[0] else f"{len(data):,} bytes 0x{data[0]:02x} and nothing else"
    for at, magic, name, more in _KINDS:
        if data.startswith(magic, at):
            return name + more
    if data.endswith(b"TRUEVISION-XFILE.\0"):
        return f"TGA{_CONVERT}"
    return _text(bytes(data[:_LOOKED_AT]))


def what_lies_at(file: Path) -> str:
    """Describes a file by its first bytes; see `what_it_is`."""
    with file.open("rb") as opened:
        return what_it_is(opened.read(_HEAD))


def _text(data: bytes) -> str:
    if data.startswith(_BOMS) and data.decode("utf-16", "replace")[:_SHOWN].split("\n")[0].isprintable():
        return "text in UTF-16"
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data).strip()
    except UnicodeDecodeError:
        return ""
    if _CONTROL.search(text):
        return ""
    for pattern, name in _TEXTS:
        if re.search(pattern, text, re.IGNORECASE):
            return name
    begin = "".join(letter if letter.isprintable() else " " for letter in text[:_SHOWN])
    return f"text that begins with '{begin}'" if text else "blanks"
