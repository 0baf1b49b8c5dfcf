"""Samples of text in memory: a stream cut at equal lengths, packed documents, or padded documents.

A document ends with the end token. Its first input is an end token and its first target is its first token,
so every token is a target exactly once. A document longer than a sample is cut; the first input of a later
part is the token before it. If a text states where its documents begin, the first token of each is an input
only. If only some tokens count in the loss, the other targets are -100.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.dataset import LENGTH, NUM_ITEMS, ArrayDataset, Arrays, Field, spread
from trainer.data.formats.text import Text, Tokens
from trainer.data.formats.tokens import TOKENS
from trainer.errors import BadInputError
from trainer.host.limits import read_limits
from trainer.rng import Float32, Ints

TARGETS, SEGMENT = "targets", "segment"
NO_TARGET = -100  # target that doesn't count in the loss

_HASHED_TOKENS = 4 << 20


class StreamDataset:
    """Sequences of a text in memory: sample i is `length` + 1 tokens from token i * stride.

    The field `tokens` has shape (length + 1,); the last token is only a target.

    Args:
        tokens: (n,), of an unsigned integer type.
        length: Targets of a sample.
        stride: Tokens between the starts of samples; None: `length`, so that every token but the first is a
            target once, except for a rest shorter than `length`.
        whole: True to make a sample of the rest too, padded and with a field `num_items`.

    Raises:
        BadInputError: If the text is shorter than a sample.
    """

    def __init__(self, tokens: Tokens, length: int, stride: int | None = None, whole: bool = False) -> None:
        """Takes the tokens, without a copy unless they are padded."""
        targets = len(tokens) - 1
        step = length if stride is None else stride
        if targets < (1 if whole else length):
            raise BadInputError(
                f"the text has {len(tokens)} tokens: too few for a sample of "
                f"language.sequence_length={length} and the one after it; lower it"
            )
        self.arrays: Arrays | None = None
        self.uniforms, self.in_process, self.num_items = 0, True, length
        fields = {TOKENS: Field((length + 1,), tokens.dtype)}
        self._samples = (targets - length) // step + 1 if targets >= length else 0
        if whole:
            self._samples = -(-targets // length)
            fields[NUM_ITEMS] = Field((), np.dtype(np.int64))
            rest = self._samples * length - targets
            tokens = np.concatenate((tokens, np.zeros(rest, tokens.dtype)))
        self.fields: Mapping[str, Field] = fields
        self._tokens, self._targets, self._length, self._step = tokens, targets, length, step

    def __len__(self) -> int:
        return self._samples

    def fingerprint(self) -> str:
        """Returns the sample count and a hash of the tokens, or of 4 Mi evenly spaced ones."""
        some = self._tokens[spread(len(self._tokens), _HASHED_TOKENS)]
        about = f"{some.dtype} {self._length} {self._step} {len(self._tokens)};".encode()
        return f"{len(self)} samples {hashlib.sha256(about + some.tobytes()).hexdigest()[:16]}"

    def read(self, samples: Ints, random: Float32 | None, out: Arrays) -> None:  # noqa: ARG002
        """Copies tokens; see `Dataset.read`."""
        first = samples * self._step
        np.take(self._tokens, first[:, None] + np.arange(self._length + 1), out=out[TOKENS], mode="clip")
        if NUM_ITEMS in self.fields:
            out[NUM_ITEMS][...] = np.minimum(self._targets - first, self._length)


class Pieces(NamedTuple):
    """Parts of documents, each within a sample.

    Attributes:
        first: int64 (n,), index of the first target in the text.
        targets: int64 (n,), number of targets.
    """

    first: Ints
    targets: Ints


def pieces_of(text: Text, length: int) -> Pieces:
    """Cuts documents into parts of at most `length` targets, in their order.

    Raises:
        BadInputError: If there are no documents.
    """
    begins, ends = _documents(text)
    parts = -(-(ends - begins) // length)
    part = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    first = np.repeat(begins, parts) + part * length
    return Pieces(first, np.minimum(np.repeat(ends, parts) - first, length))


def _documents(text: Text) -> tuple[Ints, Ints]:
    """Returns the index of the first target of each document, and of the end of its targets."""
    if text.begins is not None:
        return text.begins + 1, np.append(text.begins[1:], len(text.tokens))
    if text.end is None or not len(text.tokens):
        raise BadInputError(
            "language.text=packed and padded are for documents, and there are none here; use "
            "language.text=stream, or a token file whose documents end with a token of their own"
        )
    ends = np.flatnonzero(text.tokens == text.end) + 1
    if not len(ends) or ends[-1] != len(text.tokens):
        ends = np.append(ends, len(text.tokens))
    return np.concatenate(([0], ends[:-1])), ends


def padded(text: Text, length: int) -> ArrayDataset:
    """Makes a sample of each piece of a document, padded, sorted by length.

    The fields are `tokens` and `targets` (length,), of the text's dtype, padded at the end, and `num_items`,
    the number of targets. If only some targets count, `num_items` is their number, `targets` is int32 with
    -100 for the others, and the field `length` is the number of all targets.
    """
    pieces = pieces_of(text, length)
    order = np.argsort(pieces.targets, kind="stable")
    places = np.arange(len(order))
    return ArrayDataset(_filled(text, length, Pieces(*(part[order] for part in pieces)), places, places * 0))


def packed(text: Text, length: int) -> ArrayDataset:
    """Packs pieces of documents into samples, by best fit with the longest first.

    The fields are those of `padded`, and `segment`, int16 or int32 (length,): the number of the piece in the
    sample from 1, and 0 for padding.
    """
    pieces = pieces_of(text, length)
    order = np.argsort(-pieces.targets, kind="stable")
    sample, start = _best_fit(pieces.targets[order], length)
    ordered = Pieces(*(part[order] for part in pieces))
    arrays = dict(_filled(text, length, ordered, sample, start))
    segment = np.zeros((len(arrays[NUM_ITEMS]), length), np.int16 if length < 1 << 15 else np.int32)
    number = np.zeros(len(segment), np.int64)
    for row, begin, count in zip(sample.tolist(), start.tolist(), ordered.targets.tolist(), strict=True):
        number[row] += 1
        segment[row, begin : begin + count] = number[row]
    return ArrayDataset(arrays | {SEGMENT: segment})


def _filled(text: Text, length: int, pieces: Pieces, sample: Ints, start: Ints) -> Arrays:
    """Returns the fields of samples, given the sample and the position of each piece."""
    count = int(sample.max()) + 1
    # The end token before the text is the input for its first token.
    inputs = np.concatenate((np.array([text.end or 0], text.tokens.dtype), text.tokens))
    _check_room(2 * count * length * inputs.dtype.itemsize)
    labels: npt.NDArray[Any] = text.tokens
    padding = 0
    if text.counts is not None:
        labels, padding = np.where(text.counts, text.tokens.astype(np.int32), np.int32(NO_TARGET)), NO_TARGET
    tokens, targets = np.zeros((count, length), inputs.dtype), np.full((count, length), padding, labels.dtype)
    spans = zip(pieces.first.tolist(), pieces.targets.tolist(), sample.tolist(), start.tolist(), strict=True)
    for first, size, row, begin in spans:
        tokens[row, begin : begin + size] = inputs[first : first + size]
        targets[row, begin : begin + size] = labels[first : first + size]
    lengths = np.bincount(sample, pieces.targets, count).astype(np.int64)
    if text.counts is None:
        return {TOKENS: tokens, TARGETS: targets, NUM_ITEMS: lengths}
    num_items = (targets != NO_TARGET).sum(1, dtype=np.int64)
    return {TOKENS: tokens, TARGETS: targets, NUM_ITEMS: num_items, LENGTH: lengths}


def _check_room(needed: int) -> None:
    """Refuses samples that take more than half of the memory: every rank holds them."""
    memory = read_limits().memory_bytes
    if memory and needed > memory // 2:
        raise BadInputError(
            f"language.text=packed or padded: the samples take {needed / 1e9:.1f} GB, more than half of the "
            f"{memory / 1e9:.1f} GB of memory; "
            "use language.text=stream, or a shorter language.sequence_length"
        )


def _best_fit(counts: Ints, length: int) -> tuple[Ints, Ints]:
    """Assigns pieces, sorted with the longest first, each to the fullest sample that it fits in.

    Returns:
        Sample of each piece, and its position in the sample.
    """
    sample, start = np.empty_like(counts), np.empty_like(counts)
    with_room: list[list[int]] = [[] for _ in range(length + 1)]
    rooms, samples = 0, 0  # bit r of rooms: some sample has room for r tokens
    for index, count in enumerate(counts.tolist()):
        enough = rooms >> count
        if enough:
            room = count + (enough & -enough).bit_length() - 1
            row = with_room[room].pop()
            rooms ^= (not with_room[room]) << room
        else:
            row, room, samples = samples, length, samples + 1
        sample[index], start[index] = row, length - room
        if rest := room - count:
            with_room[rest].append(row)
            rooms |= 1 << rest
    return sample, start
