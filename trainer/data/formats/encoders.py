"""Tokenizers, and the encoding of documents in bounded memory.

A long document is cut at ends of lines where a trial shows that no token changes, and the pieces are encoded
in parallel by the library's threads.
"""

import codecs
import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainer.errors import BadInputError, first_line, reading
from trainer.host import strict_json
from trainer.host.files import read_bounded

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# A file and its content in chunks.
Document = tuple[Path, Iterator[bytes]]

PIECE_CHARACTERS = 1 << 18  # least characters of a piece
_BATCH_CHARACTERS, _BATCH_PIECES = 1 << 22, 4096  # encoded in parallel
_LONGEST = 1 << 25  # most characters without a cut
_CUT = re.compile(r"(?<=\w)(?=[\r\n])")  # between a word and the end of its line
_CUTS = 64  # cuts that are tried
_AROUND = 512  # characters on each side of a cut that are encoded to try it
_LARGEST_TOKENIZER = 1 << 30
# Characters with all bytes of UTF-8: ASCII and later ones, and the first ones of two, three and four.
_FIRST = (
    *range(0x100, 0x800, 64),
    0x800,
    *range(0x1000, 1 << 16, 1 << 12),
    1 << 16,
    *range(1 << 18, 5 << 18, 1 << 18),
)
_ALL_BYTES = "".join(map(chr, (*range(0xC1), *_FIRST)))
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class Encoder(NamedTuple):
    """A tokenizer.

    Attributes:
        name: "bytes", or "bpe:" and the name of its file.
        sha256: SHA-256 of its file; None for bytes.
        vocabulary: Largest token + 1.
        end: Token that ends a document.
        tokenizer: Tokenizer of the library; None for bytes.
        lossy: True if it leaves out characters that it has no token for.
        unknown: Token that stands for what the vocabulary lacks; None if there is none.
    """

    name: str
    sha256: str | None
    vocabulary: int
    end: int
    tokenizer: "Tokenizer | None"
    lossy: bool = False
    unknown: int | None = None


def read_tokenizer(tokenizer: str, end: str | None = None) -> Encoder:
    """Reads a tokenizer from a local file; see `tokenize`.

    Raises:
        BadInputError: If the file is invalid, or the token that ends a document is ambiguous.
    """
    if tokenizer == "bytes":
        if end is not None:
            raise BadInputError("--end belongs to bpe:FILE; with bytes, token 256 ends a document")
        return Encoder("bytes", None, 257, 256, None)
    kind, _, name = tokenizer.partition(":")
    if kind != "bpe" or not name:
        raise BadInputError(f"--tokenizer {tokenizer}: use bytes, or bpe:FILE with a tokenizer.json")
    with reading(name, "give a tokenizer.json"):
        content = read_bounded(Path(name), _LARGEST_TOKENIZER)
    read = parse_tokenizer(content, name)
    read.encode_special_tokens = True  # those in a text are encoded as text
    known = read.get_vocab(with_added_tokens=True)
    ends = [token for token in _ENDS if token in known] if end is None else [end]
    if len(ends) != 1 or ends[0] not in known:
        what = f"knows no {end}" if end is not None else f"knows {' and '.join(ends) or 'no usual end token'}"
        raise BadInputError(f"{name}: {what}; name the token that ends a document with --end")
    sha256 = hashlib.sha256(content).hexdigest()
    vocabulary = max(known.values()) + 1
    found = unknown_of(read)
    return Encoder(f"bpe:{Path(name).name}", sha256, vocabulary, known[ends[0]], read, is_lossy(read), found)


def parse_tokenizer(content: bytes, file: object) -> "Tokenizer":
    """Parses a tokenizer.json, without truncation and padding, which are for single sentences.

    Raises:
        BadInputError: If the library isn't installed, the file is invalid, or it draws tokens at random.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise BadInputError(f"{file}: the library tokenizers isn't installed; run make venv") from error
    with one_line(str(file), "not a tokenizer.json"):
        read: Tokenizer = Tokenizer.from_str(content.decode())
    if dropout := getattr(read.model, "dropout", None):
        raise BadInputError(
            f"{file}: says dropout {dropout:.2g}, so a text has other tokens each time; write null there"
        )
    read.no_truncation()
    read.no_padding()
    return read


def encoded(documents: Iterable[Document], encoder: Encoder, dtype: str) -> Iterator[bytes]:
    """Encodes documents, each followed by the end token.

    Args:
        documents: Documents in order; the chunks of one are read before the next is requested.
        encoder: The tokenizer.
        dtype: uint16 or uint32.

    Yields:
        Bytes of the token file.

    Raises:
        BadInputError: If a document isn't UTF-8 (except for "bytes"), is too long and can't be cut, or has a
            character that the tokenizer leaves out or takes for the end of a document.
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
                yield from _encode(batch, encoder, kind)
                batch, characters = [], 0
    yield from _encode(batch, encoder, kind)


def _encode(batch: list[tuple[str, bool]], encoder: Encoder, dtype: np.dtype[np.generic]) -> Iterator[bytes]:
    texts, tokenizer = [text for text, _ in batch], encoder.tokenizer
    assert tokenizer is not None
    if encoder.lossy:
        check_known(texts, tokenizer, f"--tokenizer {encoder.name}")
    with one_line("--tokenizer"):
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    for encoding, (_, last) in zip(encodings, batch, strict=True):
        ids = np.array(encoding.ids, dtype)
        if encoder.unknown == encoder.end and (ids == encoder.end).any():
            raise BadInputError(
                f"--tokenizer {encoder.name}: a text has what the vocabulary lacks, and "
                f"{tokenizer.id_to_token(encoder.end)} stands for that and for a document's end; name "
                "another by --end"
            )
        yield np.append(ids, np.array([encoder.end] * last, dtype)).tobytes()


def unknown_of(tokenizer: "Tokenizer") -> int | None:
    """Returns the token that stands for what the vocabulary lacks; None if there is none."""
    if hasattr(tokenizer.model, "unk_token"):
        text = tokenizer.model.unk_token
        return None if text is None else tokenizer.token_to_id(text)
    said = strict_json.parse_quickly(tokenizer.to_str(), _LARGEST_TOKENIZER)["model"]  # of Unigram
    number: int | None = said.get("unk_id")
    return number


def is_lossy(tokenizer: "Tokenizer") -> bool:
    """True if a tokenizer leaves out what it has no token for: a BPE without unk_token and all bytes."""
    model = tokenizer.model
    if getattr(model, "unk_token", "") is not None or getattr(model, "byte_fallback", True):
        return False
    return not _symbols(_ALL_BYTES, tokenizer) <= tokenizer.get_vocab().keys()


def _symbols(text: str, tokenizer: "Tokenizer") -> set[str]:
    """Returns the characters that reach the model."""
    normalizer, cutter = tokenizer.normalizer, tokenizer.pre_tokenizer
    text = text if normalizer is None else normalizer.normalize_str(text)
    pieces = [text] if cutter is None else [piece for piece, _ in cutter.pre_tokenize_str(text)]
    return set[str]().union(*pieces)


def check_known(texts: Sequence[str], tokenizer: "Tokenizer", what: str) -> None:
    """Checks texts of a lossy tokenizer.

    Raises:
        BadInputError: If a character leads to one without a token.
    """
    known = tokenizer.get_vocab().keys()
    for sign in sorted(set[str]().union(*texts) - known):
        if sign.isprintable() and not _symbols(sign, tokenizer) <= known:
            raise BadInputError(
                f"{what}: has no token for {sign!r} and leaves it out; add it, or give the model in that "
                "file an unk_token"
            )


@contextlib.contextmanager
def one_line(what: str, why: str = "its rules fail on a text") -> Iterator[None]:
    """Turns an error of the library into one line; it panics after 10^7 steps of a regular expression."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and BaseException if it panics
        raise BadInputError(f"{what}: {why} ({first_line(error)}); use another tokenizer.json") from error


def _pieces(text: Iterator[str], file: Path, tokenizer: "Tokenizer") -> Iterator[tuple[str, bool]]:
    """Cuts a document where no token changes; yields pieces, and True with the last one."""
    held = ""
    for part in text:
        held += part
        while len(held) > PIECE_CHARACTERS + _AROUND and (cut := _harmless_cut(held, tokenizer)):
            yield held[:cut], False
            held = held[cut:]
        if len(held) > _LONGEST:
            raise BadInputError(
                f"{file}: {_LONGEST >> 20} million characters without an end of a line at which it "
                "may be cut; split the file into documents"
            )
    yield held, True


def _harmless_cut(text: str, tokenizer: "Tokenizer") -> int:
    """Returns a cut after `PIECE_CHARACTERS` characters that changes no token; 0 if there is none."""

    def ids(part: str) -> list[int]:
        with one_line("--tokenizer"):
            return list(tokenizer.encode(part, add_special_tokens=False).ids)

    matches = _CUT.finditer(text, PIECE_CHARACTERS, len(text) - _AROUND)
    for cut in (match.start() for match in islice(matches, _CUTS)):
        left, right = text[max(0, cut - _AROUND) : cut], text[cut : cut + _AROUND]
        if ids(left) + ids(right) == ids(left + right):
            return cut
    return 0


def _text(chunks: Iterator[bytes], file: Path) -> Iterator[str]:
    """Decodes UTF-8 in chunks."""
    decoder, seen = codecs.getincrementaldecoder("utf-8")(), 0
    for chunk in chain(chunks, [b""]):
        held = len(decoder.getstate()[0])  # bytes of a character that the last chunk cut
        try:
            yield decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise BadInputError(
                f"{file}: not UTF-8 (byte 0x{error.object[error.start]:02x} at {seen - held + error.start}); "
                "convert it (iconv -t UTF-8), leave it out with --files, or use --tokenizer bytes"
            ) from error
        seen += len(chunk)
