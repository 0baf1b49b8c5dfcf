"""Tokenizers, and documents through them in bounded memory.

A long document is cut into pieces at ends of lines where the cut is seen to change no token, and the pieces
are encoded side by side by the library's own threads.
"""

import codecs
import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainer.errors import BadInputError, first_line
from trainer.host.files import read_bounded

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# A file, and its content in chunks.
Document = tuple[Path, Iterator[bytes]]

PIECE = 1 << 18  # characters that are encoded as one, at least
_BATCH_CHARACTERS, _BATCH_PIECES = 1 << 22, 4096  # that are encoded side by side
_LONGEST = 1 << 25  # characters without a place to cut
_CUT = re.compile(r"(?<=\w)(?=[\r\n])")  # between a word and what ends its line
_CUTS = 64  # places that are tried
_AROUND = 512  # characters on each side of a cut that are encoded to see whether it is harmless
_LARGEST_TOKENIZER = 1 << 30
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class Encoder(NamedTuple):
    """A tokenizer, ready to be used.

    Attributes:
        name: As it is written down: "bytes", or "bpe:" and the name of its file.
        sha256: Of its file.
        vocabulary: Every token is below it.
        end: The token that ends a document.
        tokenizer: None for bytes.
    """

    name: str
    sha256: str | None
    vocabulary: int
    end: int
    tokenizer: "Tokenizer | None"


def read_tokenizer(tokenizer: str, end: str | None = None) -> Encoder:
    """Reads a tokenizer; see `tokenize`. Nothing is fetched.

    Raises:
        BadInputError: If it isn't one, or the token that ends a document isn't clear.
    """
    if tokenizer == "bytes":
        if end is not None:
            raise BadInputError("--end belongs to bpe:FILE; with bytes, token 256 ends a document")
        return Encoder("bytes", None, 257, 256, None)
    kind, _, name = tokenizer.partition(":")
    if kind != "bpe" or not name:
        raise BadInputError(f"--tokenizer {tokenizer}: use bytes, or bpe:FILE with a tokenizer.json")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise BadInputError(
            "--tokenizer bpe: the library tokenizers isn't installed; run make venv"
        ) from error
    try:
        content = read_bounded(Path(name), _LARGEST_TOKENIZER)
        read: Tokenizer = Tokenizer.from_str(content.decode())
    except OSError as error:
        raise BadInputError(f"{name}: can't be read ({error.strerror}); give a tokenizer.json") from error
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises nothing narrower, and where it panics this
        raise BadInputError(f"{name}: not a tokenizer.json ({error})") from error
    # Made for single sentences these would cut documents off; and what looks like a special token in a text
    # is text.
    read.no_truncation()
    read.no_padding()
    read.encode_special_tokens = True
    known = read.get_vocab(with_added_tokens=True)
    ends = [token for token in _ENDS if token in known] if end is None else [end]
    if len(ends) != 1 or ends[0] not in known:
        what = f"knows no {end}" if end is not None else f"knows {' and '.join(ends) or 'no usual end token'}"
        raise BadInputError(f"{name}: {what}; name the token that ends a document with --end")
    sha256 = hashlib.sha256(content).hexdigest()
    return Encoder(f"bpe:{Path(name).name}", sha256, max(known.values()) + 1, known[ends[0]], read)


def encoded(documents: Iterable[Document], encoder: Encoder, dtype: str) -> Iterator[bytes]:
    """Encodes documents: the tokens of each, then its end.

    Args:
        documents: In order; the chunks of one are read before the next is asked for.
        encoder: The tokenizer.
        dtype: uint16 or uint32.

    Yields:
        Bytes of the token file.

    Raises:
        BadInputError: If a document isn't UTF-8 (except for "bytes"), or can't be cut.
    """
    kind = np.dtype(dtype)
    end = np.array([encoder.end], kind).tobytes()
    if encoder.tokenizer is None:
        for _, chunks in documents:
            for chunk in chunks:
                yield np.frombuffer(chunk, np.uint8).astype(kind).tobytes()
            yield end
        return
    batch, characters = list[tuple[str, bool]](), 0
    for file, chunks in documents:
        for piece, last in _pieces(_text(chunks, file), file, encoder.tokenizer):
            batch.append((piece, last))
            characters += len(piece)
            if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_PIECES:
                yield from _encode(batch, encoder.tokenizer, kind, end)
                batch, characters = [], 0
    yield from _encode(batch, encoder.tokenizer, kind, end)


def _encode(
    batch: list[tuple[str, bool]], tokenizer: "Tokenizer", dtype: np.dtype[np.generic], end: bytes
) -> Iterator[bytes]:
    texts = [text for text, _ in batch]
    with one_line("--tokenizer"):
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    for encoding, (_, last) in zip(encodings, batch, strict=True):
        yield np.array(encoding.ids, dtype).tobytes()
        if last:
            yield end


@contextlib.contextmanager
def one_line(what: str) -> Iterator[None]:
    """Says in one line that the library failed: it panics after 10^7 tries of a regular expression."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise BadInputError(
            f"{what}: its rules fail on a text ({first_line(error)}); use another tokenizer.json"
        ) from error


def _pieces(text: Iterator[str], file: Path, tokenizer: "Tokenizer") -> Iterator[tuple[str, bool]]:
    """Cuts a document where that changes no token: pieces, and whether each is the last."""
    held = ""
    for part in text:
        held += part
        while len(held) > PIECE + _AROUND and (cut := _harmless_cut(held, tokenizer)):
            yield held[:cut], False
            held = held[cut:]
        if len(held) > _LONGEST:
            raise BadInputError(
                f"{file}: {_LONGEST >> 20} million characters without an end of a line at which it "
                "may be cut; split the file into documents"
            )
    yield held, True


def _harmless_cut(text: str, tokenizer: "Tokenizer") -> int:
    """A place after `PIECE` characters where both sides are encoded as they are together; 0 if none."""

    def ids(part: str) -> list[int]:
        with one_line("--tokenizer"):
            return list(tokenizer.encode(part, add_special_tokens=False).ids)

    found = _CUT.finditer(text, PIECE, len(text) - _AROUND)
    for cut in (match.start() for match in islice(found, _CUTS)):
        left, right = text[max(0, cut - _AROUND) : cut], text[cut : cut + _AROUND]
        if ids(left) + ids(right) == ids(left + right):
            return cut
    return 0


def _text(chunks: Iterator[bytes], file: Path) -> Iterator[str]:
    """Decodes UTF-8 that comes in chunks."""
    decoder, seen = codecs.getincrementaldecoder("utf-8")(), 0
    for chunk in chain(chunks, [b""]):
        held = len(decoder.getstate()[0])  # of a character that the last chunk ended in
        try:
            yield decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise BadInputError(
                f"{file}: not UTF-8 (byte 0x{error.object[error.start]:02x} at {seen - held + error.start}); "
                "convert it (iconv -t UTF-8), leave it out with --files, or use --tokenizer bytes"
            ) from error
        seen += len(chunk)
