"""Recognition of files that aren't token files, by their first and last bytes."""

from pathlib import Path

import numpy as np

from trainer.errors import BadInputError
from trainer.host.files import read_at

_LOOKED_AT = 4096
_TAIL = 64 << 10
_MAGICS = {
    b"\x93NUMPY": "a NumPy array (.npy): write its tokens alone, array.tofile(…)",
    b"PK\3\4": "a zip archive (.npz or torch.save), no tokens",
    b"\x1f\x8b\x08\0": "gzip: unpack it",
    b"\x28\xb5\x2f\xfd": "zstd: unpack it",
    b"\xfd7zXZ\0": "xz: unpack it",
    b"BZh91AY&SY": "bzip2: unpack it",
    b"\x89HDF\r\n": "HDF5, no tokens",
    b"PAR1": "Parquet, no tokens",
    b"ARROW1": "Arrow, no tokens",
    b"MMIDIDX\0\0": "Megatron's index: give the .bin file beside it",
}
# llm.c and modded-nanogpt: a header of 256 int32; the third is the number of tokens.
_HEADED = {20240520: 2, 20240801: 4}
_HEADER_BYTES = 1024
_PICKLES = (b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5")


def check_tokens_alone(path: Path, file: int, size: int) -> None:
    """Checks that a file without a description holds nothing but tokens.

    Raises:
        BadInputError: If it is of another kind, has a header, or ends with unwritten zeros.
        OSError: If it can't be read.
    """
    head = read_at(file, 0, min(size, _LOOKED_AT))
    if what := _kind(head, size):
        raise BadInputError(f"{path}: is {what}")
    tail = read_at(file, max(0, size - _TAIL), min(size, _TAIL))
    if size > _TAIL and not any(tail):
        raise BadInputError(
            f"{path}: its last {_TAIL:,} bytes are zeros, as where writing was cut off (np.memmap fills a "
            "file with them before tokens are written): write it again, or cut them off"
        )


def _kind(head: bytes, size: int) -> str:
    for magic, what in _MAGICS.items():
        if head.startswith(magic):
            return what
    if head.startswith(_PICKLES) and b"numpy" in head[:200]:
        return "a Python pickle, which isn't read"
    if len(head) >= _HEADER_BYTES:
        magic, _, tokens = np.frombuffer(head, "<i4", 3).tolist()
        if magic in _HEADED and abs(size - _HEADER_BYTES - tokens * _HEADED[magic]) < _HEADED[magic]:
            return (
                f"a token file of llm.c with a header of {_HEADER_BYTES:,} bytes: write it without: tail -c "
                f"+{_HEADER_BYTES + 1} (uint{8 * _HEADED[magic]})"
            )
    return "text, no tokens: make them with trainer data tokenize" if _is_text(head) else ""


def _is_text(head: bytes) -> bool:
    """True if the first bytes are at least 64 characters of printable text, which tokens hardly are."""
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 8:
            return False
        text = head[: error.start].decode("utf-8")
    return len(text) >= 64 and all(each.isprintable() or each in "\t\r\n\f" for each in text)
