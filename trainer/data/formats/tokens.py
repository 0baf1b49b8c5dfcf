"""Token files, uint16 or uint32 without a header as nanoGPT writes them, and their JSON descriptions."""

import hashlib
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field as Key, ValidationError

from trainer.config.section import first_problem
from trainer.data.dataset import NUM_ITEMS, Arrays, Field, spread
from trainer.data.formats.files import fill_exactly, open_sample_file
from trainer.errors import BadInputError
from trainer.host import strict_json
from trainer.host.files import read_at, read_hashed
from trainer.rng import Float32, Ints

_LOOKED_AT = 4096
_TAIL = 64 << 10
_MAGICS = {
    b"\x93NUMPY": "a NumPy array (.npy): write its tokens alone, array.tofile(…)",
    b"PK\3\4": "a zip archive (.npz or torch.save), no tokens",
    b"\x1f\x8b\x08\0": "gzip: unpack it",
}
# llm.c and modded-nanogpt: a header of 256 int32; the third is the number of tokens.
_HEADED = {20240520: 2, 20240801: 4}
_HEADER_BYTES = 1024


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
    if len(head) >= _HEADER_BYTES:
        magic, _, tokens = np.frombuffer(head, "<i4", 3).tolist()
        if magic in _HEADED and abs(size - _HEADER_BYTES - tokens * _HEADED[magic]) < _HEADED[magic]:
            return (
                f"a token file of llm.c with a header of {_HEADER_BYTES:,} bytes: write it without: tail -c "
                f"+{_HEADER_BYTES + 1} (uint{8 * _HEADED[magic]})"
            )
    return ""


TOKENS = "tokens"

# The fingerprint hashes so many parts of so many bytes; the full file below 16 MiB.
_PARTS, _PART_BYTES = 256, 64 << 10


class TokenFile(BaseModel):
    """Description of a token file that `trainer data tokenize` writes beside it, `train.bin.json`."""

    model_config = ConfigDict(frozen=True, strict=True)

    dtype: Literal["uint16", "uint32"]
    vocabulary: int = Key(ge=1, le=1 << 32)  # above every token
    tokens: int = Key(ge=1)
    documents: int = Key(ge=1)
    unknown: int = Key(0, ge=0)  # tokens that stand for what the vocabulary lacks
    end_of_document: int = Key(ge=0)
    tokenizer: str
    tokenizer_sha256: str | None
    source: str  # number of files, and a hash of their names and content
    sha256: str


class TokenDataset:
    """Sequences of a token file: sample i is the tokens from i * length to i * length + length, inclusive.

    The last token of a sample is only a target, and the first token of the next sample. So in an epoch every
    token but the first is a target once, except for a rest shorter than `length`, unless `whole`.

    The field `tokens` has shape (length + 1,) and the file's dtype; it is cast to int64 on the device.

    Args:
        path: The file. It is read by pread: truncating a mapped file ends the process (SIGBUS).
        length: Targets of a sample.
        dtype: uint16 or uint32; None: by the JSON file beside it.
        whole: True to make a sample of the rest too, padded and with a field `num_items`; for evaluation.

    Attributes:
        vocabulary: Bound of the tokens, which is checked; None if no JSON file states it.

    Raises:
        BadInputError: If the file is missing, differs from its JSON file, or holds no sample.
    """

    def __init__(self, path: Path, length: int, dtype: str | None = None, *, whole: bool = False) -> None:
        """Opens the file and checks its size."""
        self._path = path.absolute()  # a loader worker may have another working directory
        self._length = length
        self._file, facts = _opened(self._path)
        weakref.finalize(self, os.close, self._file)
        self._identity = _identity(facts)
        about = read_about(self._path)
        if about is None and dtype is None:
            raise BadInputError(
                f"{path}: uint16 or uint32? There is no {about_path(path).name} that says so: give the dtype "
                "(nanoGPT writes uint16), or make the file with trainer data tokenize"
            )
        if about is not None and dtype not in (None, about.dtype):
            raise BadInputError(
                f"{path}: {about_path(path).name} says {about.dtype}, not {dtype}; leave it out"
            )
        self._dtype = np.dtype(dtype if about is None else about.dtype)
        tokens, rest = divmod(facts.st_size, self._dtype.itemsize)
        if about is not None and (tokens, rest) != (about.tokens, 0):
            raise BadInputError(
                f"{path}: {facts.st_size} bytes, but {about_path(path).name} says {about.tokens} tokens of "
                f"{about.dtype}: it is torn, or the two don't belong together; tokenize again"
            )
        if about is None:
            try:
                check_tokens_alone(path, self._file, facts.st_size)
            except OSError as error:
                raise self._unreadable(error) from error
        if rest:
            raise BadInputError(
                f"{path}: {facts.st_size} bytes are no whole number of {self._dtype} tokens; "
                "it is torn, or of another dtype"
            )
        if tokens <= (1 if whole else length):
            raise BadInputError(
                f"{path}: {tokens} tokens are too few for a sample of {length} and the one after it"
            )
        self.vocabulary = None if about is None else about.vocabulary
        self._targets = tokens - 1
        self._samples = -(-self._targets // length) if whole else self._targets // length
        self._bytes = facts.st_size
        self.num_items = length
        self.uniforms = 0
        self.arrays: Arrays | None = None
        self.in_process = True
        fields = {TOKENS: Field((length + 1,), self._dtype)}
        if whole:
            fields[NUM_ITEMS] = Field((), np.dtype(np.int64))
        self.fields: Mapping[str, Field] = fields

    def __len__(self) -> int:
        return self._samples

    def fingerprint(self) -> str:
        """Returns the sample count and a hash of evenly spaced parts, or of the full file below 16 MiB."""
        digest = hashlib.sha256(f"{self._dtype} {self._length} {self._bytes};".encode())
        try:
            for part in spread(-(-self._bytes // _PART_BYTES), _PARTS).tolist():
                digest.update(read_at(self._descriptor(), part * _PART_BYTES, _PART_BYTES))
        except OSError as error:
            raise self._unreadable(error) from error
        return f"{len(self)} samples {digest.hexdigest()[:16]}"

    def read(self, samples: Ints, random: Float32 | None, out: Arrays) -> None:  # noqa: ARG002
        """Reads samples into the batch; see `Dataset.read`.

        Raises:
            BadInputError: If the file can't be read, was changed, or holds a token outside the vocabulary.
        """
        file = self._descriptor()
        rows = out[TOKENS].data.cast("B")
        step = self._length * self._dtype.itemsize
        size = step + self._dtype.itemsize
        row = 0
        try:
            for sample in samples.tolist():
                stored = min(size, self._bytes - sample * step)
                fill_exactly(file, sample * step, rows[row : row + stored])
                rows[row + stored : row + size] = bytes(size - stored)
                row += size
        except OSError as error:
            raise self._unreadable(error) from error
        if NUM_ITEMS in self.fields:
            out[NUM_ITEMS][...] = np.minimum(self._targets - samples * self._length, self._length)
        if self.vocabulary is not None and (largest := int(np.max(out[TOKENS]))) >= self.vocabulary:
            sample = int(samples[int(np.argmax(np.max(out[TOKENS], axis=1)))])
            raise unknown_token(self._path, sample, largest, self.vocabulary)

    def _descriptor(self) -> int:
        """Returns the open file; a loader worker that isn't forked opens it when it first reads."""
        if self._file < 0:
            self._file, facts = _opened(self._path)
            weakref.finalize(self, os.close, self._file)
            if _identity(facts) != self._identity:
                raise BadInputError(f"{self._path}: was changed or replaced while in use; start again")
        return self._file

    def _unreadable(self, error: OSError) -> BadInputError:
        return BadInputError(
            f"{self._path}: can't be read ({error.strerror}); check the disk, and that nobody changes it"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Drops the descriptor: a loader worker that isn't forked opens its own."""
        return self.__dict__ | {"_file": -1}


def unknown_token(path: Path, sample: int, token: int, vocabulary: int) -> BadInputError:
    """Returns the error for a token outside the vocabulary."""
    return BadInputError(
        f"{path}: sample {sample} holds token {token}, but the vocabulary is {vocabulary} (0 to "
        f"{vocabulary - 1}); tokenize again with the right tokenizer, or raise language.vocabulary"
    )


def inputs_and_targets(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a language model's inputs and targets.

    Args:
        tokens: uint16 or uint32 (micro_batch_size, length + 1), on any device.

    Returns:
        Inputs and targets, int64 (micro_batch_size, length), targets shifted by one token.
    """
    if tokens.device.type != "cpu" or type(tokens) is not torch.Tensor:
        return tokens[:, :-1].to(torch.int64), tokens[:, 1:].to(torch.int64)
    array = tokens.numpy()  # casts non-contiguous rows in 60 % of torch's time
    return (
        torch.from_numpy(array[:, :-1].astype(np.int64)),
        torch.from_numpy(array[:, 1:].astype(np.int64)),
    )


def verify_tokens(path: Path, advance: Callable[[int], object]) -> TokenFile:
    """Compares a token file with the hash in the JSON file beside it.

    Args:
        path: The token file.
        advance: Called with the number of bytes that were read.

    Returns:
        The content of the JSON file.

    Raises:
        BadInputError: If there is no JSON file, or the hashes differ.
    """
    about = read_about(path)
    if about is None:
        raise BadInputError(f"{path}: no {about_path(path).name} beside it: there is no hash to compare with")
    file, facts = _opened(path)
    try:
        same = read_hashed(file, facts.st_size, None, advance) == about.sha256
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path}: can't be read ({error}); check the disk and try again") from error
    finally:
        os.close(file)
    if not same:
        raise BadInputError(f"{path}: its content isn't what {about_path(path).name} says; tokenize again")
    return about


def about_path(path: Path) -> Path:
    """Returns the path of the JSON file of a token file."""
    return path.with_name(f"{path.name}.json")


def read_about(path: Path) -> TokenFile | None:
    """Reads the JSON file of a token file; returns None if there is none.

    Raises:
        BadInputError: If it is invalid.
    """
    file = about_path(path)
    try:
        with file.open("rb") as opened:
            data = opened.read(strict_json.LARGEST + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInputError(f"{file}: can't be read ({error.strerror}); check its permissions") from error
    try:
        return TokenFile.model_validate(strict_json.parse(data))
    except ValidationError as error:
        reason = first_problem(error)
    except ValueError as error:
        reason = str(error)
    raise BadInputError(f"{file}: {reason}; tokenize again, or remove it and give the dtype")


def _opened(path: Path) -> tuple[int, os.stat_result]:
    try:
        return open_sample_file(path)
    except OSError as error:
        raise BadInputError(
            f"{path}: can't be opened ({error.strerror}); give a token file, such as train.bin"
        ) from error


def _identity(facts: os.stat_result) -> tuple[int, ...]:
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns
