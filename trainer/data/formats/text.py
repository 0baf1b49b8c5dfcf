"""Text as tokens in memory: what it is, where it comes from, and how it becomes characters again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.formats.tokens import TokenFile, read_about, unknown_token
from trainer.errors import BadInputError
from trainer.host.files import read_at
from trainer.rng import Ints, Purpose, key

Tokens = npt.NDArray[np.unsignedinteger[Any]]

_CHUNK = 8 << 20
_SHARE = 0.9  # of a character file is learned from, as in nanoGPT


class Text(NamedTuple):
    """Tokens, and what they mean.

    Attributes:
        tokens: uint8, uint16 or uint32 (n,): one document after another, each with its end.
        vocabulary: Every token is below it.
        end: The token that ends a document; None where there are no documents.
        tokenizer: "bytes", "characters", or as `trainer data tokenize` writes it down.
        characters: What the tokens of "characters" stand for.
        begins: int64 (documents,), where each begins, if the end token doesn't say; then a document's first
            token is given, and not predicted.
        counts: bool (n,), which tokens count in the loss; None: all.
    """

    tokens: Tokens
    vocabulary: int
    end: int | None
    tokenizer: str
    characters: str = ""
    begins: Ints | None = None
    counts: npt.NDArray[np.bool_] | None = None


def join_documents(documents: Sequence[Tokens], end: int) -> Tokens:
    """Documents one after another, each with its end."""
    mark = np.array([end], documents[0].dtype)
    return np.concatenate([part for document in documents for part in (document, mark)])


def smallest_type(vocabulary: int) -> npt.DTypeLike:
    """The type that holds every token below so many."""
    return np.uint8 if vocabulary <= 1 << 8 else np.uint16 if vocabulary <= 1 << 16 else np.uint32


def character_text(path: Path, known: str | None = None) -> tuple[Text, Text]:
    """A text file by characters: the first nine tenths to learn from, the rest to measure on.

    Args:
        path: The file.
        known: The model's characters, in their order; None: those of the text.

    Raises:
        BadInputError: If it can't be read, is too short to be shared, or holds a character that isn't known.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise BadInputError(
            f"{path}: isn't a regular file; give a text file"
        )  # a pipe would wait for a writer
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise BadInputError(f"{path}: can't be read ({error.strerror}); give a text file") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path}: not UTF-8 (byte {error.start}); convert it (iconv -t UTF-8)") from error
    if (zero := text.find("\0")) >= 0:
        raise BadInputError(
            f"{path}: holds zeros from character {zero:,} on: it is torn, or no text in UTF-8"
        )
    characters = "".join(sorted(set(text))) if known is None else known
    if odd := sorted(set(text) - set(characters)):
        raise BadInputError(f"{path}: holds {odd[0]!r}, which is none of the model's characters")
    first = int(len(text) * _SHARE)
    if first < 2 or len(text) - first < 2:
        raise BadInputError(f"{path}: {len(text)} characters are no text to learn from; give a longer one")
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    found = np.searchsorted(np.array([ord(c) for c in characters], np.uint32), codes)
    tokens = found.astype(smallest_type(len(characters)))
    learned, held = (
        Text(part, len(characters), None, "characters", characters)
        for part in (tokens[:first], tokens[first:])
    )
    return learned, held


def file_text(path: Path, about: TokenFile) -> Text:
    """A token file with its documents, held in memory.

    Raises:
        BadInputError: If it can't be read.
    """
    try:
        tokens: Tokens = np.fromfile(path, about.dtype)
    except OSError as error:
        raise BadInputError(f"{path}: can't be read ({error.strerror}); give a token file") from error
    if len(tokens) != about.tokens:
        raise BadInputError(f"{path}: {len(tokens)} tokens, but {about.tokens} are said; tokenize again")
    return Text(tokens, about.vocabulary, about.end_of_document, about.tokenizer)


def random_text(vocabulary: int, tokens: int, seed: int, longest: int = 0) -> Text:
    """Random tokens, for measuring speed.

    Args:
        vocabulary: Every token is below it; the last one ends a document.
        tokens: How many.
        seed: Of the run.
        longest: Documents have 1 to so many tokens; 0: there is only one.
    """
    random = np.random.Generator(np.random.Philox(key(seed, Purpose.DATA)))
    kind = smallest_type(vocabulary)
    found = random.integers(0, max(1, vocabulary - 1), tokens, dtype=np.uint32).astype(kind)
    if longest:
        lengths = random.integers(1, longest + 1, tokens)
        ends = np.cumsum(lengths) - 1
        found[ends[ends < tokens]] = vocabulary - 1
    return Text(found, vocabulary, vocabulary - 1 if longest else None, "random")


def check_tokens(path: Path, length: int, dtype: str, vocabulary: int) -> None:
    """Looks for a token that the model doesn't know, in a file of any size.

    Args:
        path: The token file.
        length: Tokens that a sample predicts, for the sample's number.
        dtype: Of the file.
        vocabulary: Every token must be below it.

    Raises:
        BadInputError: Names the first one and its sample.
    """
    size = np.dtype(dtype).itemsize
    at = 0
    try:
        with path.open("rb") as file:
            while part := read_at(file.fileno(), at * size, _CHUNK):
                tokens = np.frombuffer(part[: len(part) // size * size], dtype)
                if len(tokens) == 0:
                    return
                if int(tokens.max()) >= vocabulary:
                    first = int(np.argmax(tokens >= vocabulary))
                    raise unknown_token(path, (at + first) // length, int(tokens[first]), vocabulary)
                at += len(tokens)
    except OSError as error:
        raise BadInputError(f"{path}: can't be read ({error.strerror}); check the disk") from error


def encode_text(text: str, tokenizer: str, characters: str = "") -> list[int]:
    """Characters to tokens, for the tokenizers that need no file.

    Raises:
        BadInputError: If the tokenizer needs its file, or doesn't know a character.
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
    """Tokens to characters; bytes that are no UTF-8 become U+FFFD."""
    if tokenizer == "bytes":
        return bytes(token for token in tokens if token < 1 << 8).decode(errors="replace")
    if tokenizer == "characters":
        return "".join(characters[token] if token < len(characters) else "\ufffd" for token in tokens)
    return " ".join(map(str, tokens))


def about_or(path: Path, dtype: str | None, vocabulary: int | None) -> TokenFile | None:
    """Reads the JSON file beside a token file; None where dtype and vocabulary are given instead.

    Raises:
        BadInputError: If neither is there.
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
