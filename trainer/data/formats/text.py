"""Text as tokens in memory: its sources, and conversion to and from characters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.formats.tokens import TokenFile, read_about, unknown_token
from trainer.errors import BadInputError, reading
from trainer.host.files import read_at
from trainer.rng import Ints, Purpose, key

Tokens = npt.NDArray[np.unsignedinteger[Any]]

_CHUNK = 8 << 20
_TRAIN_FRACTION = 0.9  # of a character file, as in nanoGPT


class Text(NamedTuple):
    """Tokens of a text, with their vocabulary and documents.

    Attributes:
        tokens: uint8, uint16 or uint32 (n,): concatenated documents, each with its end token.
        vocabulary: Bound of the tokens: each is below it.
        end: Token that ends a document; None if there are no documents.
        tokenizer: "bytes", "characters", or the name in a token file's description.
        characters: Characters of the tokens, for "characters".
        begins: int64 (documents,), start of each document, if end tokens don't mark them; the first token of
            a document is then an input only.
        counts: bool (n,), True for tokens that count in the loss; None: all.
        tokenizer_sha256: Of the tokenizer's file, as many have one name; None without a file.
    """

    tokens: Tokens
    vocabulary: int
    end: int | None
    tokenizer: str
    characters: str = ""
    begins: Ints | None = None
    counts: npt.NDArray[np.bool_] | None = None
    tokenizer_sha256: str | None = None


def join_documents(documents: Sequence[Tokens], end: int) -> Tokens:
    """Concatenates documents, each followed by the end token."""
    mark = np.array([end], documents[0].dtype)
    return np.concatenate([part for document in documents for part in (document, mark)])


def smallest_type(vocabulary: int) -> npt.DTypeLike:
    """Returns the smallest unsigned type for tokens below `vocabulary`."""
    return np.uint8 if vocabulary <= 1 << 8 else np.uint16 if vocabulary <= 1 << 16 else np.uint32


def character_text(path: Path, known: str | None = None) -> tuple[Text, Text]:
    """Reads a text file by characters: the first 90 % for training, the rest for evaluation.

    Args:
        path: The file.
        known: Characters of the model, in order; None: those of the text.

    Raises:
        BadInputError: If the file can't be read, is too short, or holds a character that the model lacks.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise BadInputError(f"{path}: isn't a regular file; give a text file")  # opening a pipe would block
    try:
        with reading(path, "give a text file"):
            text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path}: not UTF-8 (byte {error.start}); convert it (iconv -t UTF-8)") from error
    if (zero := text.find("\0")) >= 0:
        raise BadInputError(
            f"{path}: holds zeros from character {zero:,} on: it is torn, or no text in UTF-8"
        )
    characters = "".join(sorted(set(text))) if known is None else known
    if odd := sorted(set(text) - set(characters)):
        raise BadInputError(f"{path}: holds {odd[0]!r}, which is none of the model's characters")
    first = int(len(text) * _TRAIN_FRACTION)
    if first < 2 or len(text) - first < 2:
        raise BadInputError(f"{path}: {len(text)} characters are no text to learn from; give a longer one")
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    order = np.array([ord(c) for c in characters], np.uint32)
    tokens = np.searchsorted(order, codes).astype(smallest_type(len(characters)))
    learned, held = (
        Text(part, len(characters), None, "characters", characters)
        for part in (tokens[:first], tokens[first:])
    )
    return learned, held


def file_text(path: Path, about: TokenFile) -> Text:
    """Reads a token file into memory.

    Raises:
        BadInputError: If it can't be read.
    """
    with reading(path, "give a token file"):
        tokens: Tokens = np.fromfile(path, about.dtype)
    if len(tokens) != about.tokens:
        raise BadInputError(f"{path}: {len(tokens)} tokens, but {about.tokens} are said; tokenize again")
    return text_about(tokens, about)


def text_about(tokens: Tokens, about: TokenFile) -> Text:
    """Returns tokens with what the JSON file of their token file says."""
    text = Text(tokens, about.vocabulary, about.end_of_document, about.tokenizer)
    return text._replace(tokenizer_sha256=about.tokenizer_sha256)


def random_text(vocabulary: int, tokens: int, seed: int, longest: int = 0) -> Text:
    """Returns random tokens, to measure speed.

    Args:
        vocabulary: Number of distinct tokens; the last one ends a document.
        tokens: Number of tokens.
        seed: Seed of the run.
        longest: Largest number of tokens of a document; 0: a single document.
    """
    random = np.random.Generator(np.random.Philox(key(seed, Purpose.DATA)))
    kind = smallest_type(vocabulary)
    drawn = random.integers(0, max(1, vocabulary - 1), tokens, dtype=np.uint32).astype(kind)
    if longest:
        lengths = random.integers(1, longest + 1, tokens)
        ends = np.cumsum(lengths) - 1
        drawn[ends[ends < tokens]] = vocabulary - 1
    return Text(drawn, vocabulary, vocabulary - 1 if longest else None, "random")


def check_tokens(path: Path, length: int, dtype: str, vocabulary: int) -> None:
    """Checks that all tokens of a file are in the vocabulary, in bounded memory.

    Args:
        path: The token file.
        length: Targets of a sample, for the sample number in the message.
        dtype: Type of the tokens.
        vocabulary: Bound of the tokens.

    Raises:
        BadInputError: If a token is outside; names the first one and its sample.
    """
    size = np.dtype(dtype).itemsize
    at = 0
    with reading(path, "check the disk"), path.open("rb") as file:
        while part := read_at(file.fileno(), at * size, _CHUNK):
            tokens = np.frombuffer(part[: len(part) // size * size], dtype)
            if len(tokens) == 0:
                return
            if int(tokens.max()) >= vocabulary:
                first = int(np.argmax(tokens >= vocabulary))
                raise unknown_token(path, (at + first) // length, int(tokens[first]), vocabulary)
            at += len(tokens)


def encode_text(text: str, tokenizer: str, characters: str = "") -> list[int]:
    """Encodes text by a tokenizer without a file, "bytes" or "characters".

    Raises:
        BadInputError: If the tokenizer needs its file, or lacks a character.
    """
    if tokenizer == "bytes":
        return list(text.encode())
    if tokenizer != "characters":
        raise BadInputError(f"tokenizer {tokenizer}: text needs its tokenizer.json; give tokens instead")
    known = {character: number for number, character in enumerate(characters)}
    if odd := [character for character in text if character not in known]:
        raise BadInputError(f"the text that was learned from holds no {odd[0]!r}: leave it out of the prompt")
    return [known[character] for character in text]


def decode_text(tokens: Sequence[int], tokenizer: str, characters: str = "") -> str:
    """Decodes tokens; invalid UTF-8 becomes U+FFFD."""
    if tokenizer == "bytes":
        return bytes(token for token in tokens if token < 1 << 8).decode(errors="replace")
    if tokenizer == "characters":
        return "".join(characters[token] if token < len(characters) else "\ufffd" for token in tokens)
    return " ".join(map(str, tokens))


def about_or(path: Path, dtype: str | None, vocabulary: int | None) -> TokenFile | None:
    """Reads the JSON file beside a token file; returns None if dtype and vocabulary are given instead.

    Raises:
        BadInputError: If there is neither.
    """
    about = read_about(path)
    if about is None and not path.is_file():
        raise BadInputError(f"{path}: no such file; data.path is a folder with train.bin and val.bin")
    if about is None and (dtype is None or vocabulary is None):
        raise BadInputError(
            f"{path}: there is no {path.name}.json that says what its tokens are: give language.dtype and "
            "language.vocabulary (nanoGPT's files: uint16 and 50257), or use trainer data tokenize"
        )
    return about
