"""Proof of a run: the exact metrics of each record, and a fingerprint of every tensor of the model.

`checksums.jsonl` holds a line with the names of the tensors, and then for each metrics record one with
`kind`, `step`, the metrics and `tensors`, 64 bits of each as hexadecimal text. A metric that isn't finite is
text, too.
"""

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import nn

from trainer.host.files import lines_inside
from trainer.host.strict_json import parse_quickly
from trainer.rng import Purpose, key, keys

# int64 values in a row: of a large tensor each row is hashed to one value first.
_COLUMNS = 1024
_ROW = 8 * _COLUMNS
# Rows hashed at a time: temporaries stay in a CPU's cache, or small on a GPU.
_ROWS = {"cpu": 64, "cuda": 8192}
_MULTIPLY = 0xBF58476D1CE4E5B9 - (1 << 64)  # of SplitMix64's finalizer, as int64


@dataclass(frozen=True)
class Checksums:
    """Recorder of checksums for the logger.

    Attributes:
        take: Returns the current fingerprints, int64 (tensors,), on the device, without synchronization. With
            several ranks int64 (2, tensors): the second row is 1 where ranks differ, else 0.
        write: Takes a record and the fingerprints that were taken with it, if any were.
        drifted: Takes a record's step and the tensors that differ between ranks; may raise.
    """

    take: Callable[[], torch.Tensor]
    write: Callable[[Mapping[str, Any], Sequence[int]], None]
    drifted: Callable[[int, Sequence[int]], None] = lambda *_: None


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def fingerprints_of(
    model: nn.Module, part: Callable[[torch.Tensor], torch.Tensor] = _as_it_is
) -> Callable[[], torch.Tensor]:
    """Makes the function that fingerprints a model's parameters and buffers: int64 (tensors,).

    A tensor's bits are 64-bit integers. A row of 1024 of them becomes one: the sum of each times an odd key
    of its column, and of its upper half times another, so that sign bits count like any other. Row hashes and
    the remaining elements are mixed one by one with keys of their positions, and added up. All modulo
    2**64: exact, and the same in any order of summation. A flipped bit always changes it.

    Args:
        model: The model.
        part: Returns the part of a tensor to fingerprint.
    """
    state = [part(tensor) for tensor in model.state_dict().values()]
    device = state[0].device
    words = [_words(tensor) for tensor in state]
    segments = torch.from_numpy(np.repeat(np.arange(len(words)), words)).to(device)
    positions = _keys(0, np.concatenate([np.arange(count) for count in words])).to(device)
    columns = _keys(1, np.arange(_COLUMNS)).to(device), _keys(2, np.arange(_COLUMNS)).to(device)

    @torch.no_grad()
    def take() -> torch.Tensor:
        parts = [one for tensor in model.state_dict().values() for one in _parts(part(tensor), *columns)]
        mixed = torch.cat(parts).add_(positions)
        mixed ^= mixed >> 32
        mixed *= _MULTIPLY
        mixed ^= mixed >> 29
        summed = torch.zeros(len(words), dtype=torch.int64, device=device)
        # Integers: whichever is added first, the sum is the same.
        return summed.index_add_(0, segments, mixed)

    return take


def _keys(kind: int, places: np.typing.NDArray[np.int64]) -> torch.Tensor:
    """Odd keys, int64 (places,)."""
    odd = keys(key(Purpose.FINGERPRINT, kind), places) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64))


def _words(tensor: torch.Tensor) -> int:
    """Number of int64 values in `_parts`."""
    whole, rest = divmod(tensor.nbytes, _ROW)
    return whole + -(-rest // 8)


def _parts(tensor: torch.Tensor, keys: torch.Tensor, upper_keys: torch.Tensor) -> list[torch.Tensor]:
    """Returns hashes of a tensor's rows, and its remaining elements as bits, int64."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    size = data.numel()
    if data.storage_offset() % 8:  # a view into something else
        data = data.clone()
    whole = size // _ROW * _ROW
    if size % 8:
        data = nn.functional.pad(data, (0, -size % 8))
    words = data.view(torch.int64)
    if not whole:
        return [words]
    rows = words[: whole // 8].view(-1, _COLUMNS).split(_ROWS[words.device.type])
    return [*(_hashes(some, keys, upper_keys) for some in rows), words[whole // 8 :]]


def _hashes(rows: torch.Tensor, keys: torch.Tensor, upper_keys: torch.Tensor) -> torch.Tensor:
    """Returns a hash of each row, int64 (rows,)."""
    upper = rows >> 32
    if rows.is_cuda:  # which multiplies no integer matrices
        return torch.addcmul(rows * keys, upper, upper_keys).sum(1)
    return torch.mv(rows, keys) + torch.mv(upper, upper_keys)


def checksums_to(file: TextIO, names: Sequence[str], known: Sequence[str], step: int) -> Callable[..., None]:
    """Makes the function that writes records to a file.

    Args:
        names: Names of the tensors.
        known: Names that the file lists last, from an earlier attempt.
    """
    due, step = list(names) != list(known), step if known else 0

    def write(row: Mapping[str, Any], prints: Sequence[int] = ()) -> None:
        nonlocal due
        lines = [{"kind": "names", "step": step, "tensors": list(names)}] if due else []
        exact = {
            name: repr(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        lines.append({**exact, "tensors": [f"{one & (1 << 64) - 1:016x}" for one in prints]})
        file.write("".join(json.dumps(line) + "\n" for line in lines))
        file.flush()
        due = False

    return write


@dataclass(frozen=True)
class ChecksumRow:
    """A record of a trace.

    Attributes:
        kind: "train" or "eval".
        step: Steps done.
        metrics: Metrics by name, as text of the file.
        tensors: Fingerprints by name; an evaluation has none.
    """

    kind: str
    step: int
    metrics: Mapping[str, str]
    tensors: Mapping[str, str]


def read_checksums(file: Path) -> tuple[list[ChecksumRow], list[str], int]:
    """Reads a trace; no file is an empty one.

    Returns:
        Its records, the last list of tensor names, and the number of malformed lines, except a torn last one.

    Raises:
        OSError: If it can't be read.
    """
    rows, names, bad = list[ChecksumRow](), list[str](), 0
    for row in rows_as_text(file) if file.exists() else ():
        try:
            kind, step, tensors = str(row.pop("kind")), int(row.pop("step")), row.pop("tensors")
            if kind == "names":
                names = [str(name) for name in tensors]
                continue
            prints = dict(zip(names, map(str, tensors), strict=True)) if tensors else {}
            rows.append(ChecksumRow(kind, step, {name: str(value) for name, value in row.items()}, prints))
        except (ValueError, KeyError, TypeError, AttributeError):
            bad += 1
    return rows, names, bad


def last_names(file: Path) -> list[str]:
    """Returns the last list of tensor names in a trace; [] without a file.

    Raises:
        OSError: If it can't be read.
    """
    names = list[str]()
    if file.exists():
        for line in lines_inside(file):
            # Parsing each row, with a fingerprint of each tensor, would take seconds and its memory.
            if b'"names"' in line and line.endswith(b"\n"):
                with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
                    row = parse_quickly(line)
                    if row["kind"] == "names":
                        names = [str(name) for name in row["tensors"]]
    return names


def rows_as_text(file: Path) -> Iterator[Any]:
    """Returns the records of a file, with numbers as text: equal texts are equal bits, -0.0 and all.

    A malformed line is None; a torn last line, which a kill leaves, is skipped.

    Raises:
        OSError: If it can't be read.
    """
    for line in lines_inside(file):
        if not line.endswith(b"\n"):
            return
        try:
            yield parse_quickly(line, parse_float=str, parse_int=str)
        except (ValueError, RecursionError):
            yield None


@dataclass(frozen=True)
class FirstDifference:
    """First difference between two runs.

    Attributes:
        step: The first record that differs; the step may lie anywhere after the record before it.
        after: The last step at which all was the same.
        metrics: Differences in that record: (name, recorded, replayed).
        tensors: The tensors that differ there, in the model's order.
        of: The number of tensors that were compared there.
    """

    step: int
    after: int
    metrics: list[tuple[str, str, str]] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    of: int = 0


def first_difference(
    recorded: Iterable[ChecksumRow], replayed: Iterable[ChecksumRow]
) -> FirstDifference | None:
    """Compares the records of a run and its replay, in both directions; None if all are equal."""
    here, again_rows = ({(row.step, row.kind): row for row in rows} for rows in (recorded, replayed))
    rows = sorted({**here, **again_rows})
    for step, at_once in itertools.groupby(rows, key=lambda row: row[0]):
        metrics, tensors, of = list[tuple[str, str, str]](), list[str](), 0
        for one in at_once:
            row, again = here.get(one), again_rows.get(one)
            if row is None or again is None:
                known = ["missing" if found is None else "there" for found in (row, again)]
                metrics.append((f"row of {one[1]} metrics", known[0], known[1]))
                continue
            metrics += _differing(row.metrics, again.metrics)
            tensors += [name for name, _, _ in _differing(row.tensors, again.tensors)]
            of = max(of, len(row.tensors), len(again.tensors))
        if metrics or tensors:
            after = max((before for before, _ in rows if before < step), default=0)
            return FirstDifference(step, after, metrics, tensors, of)
    return None


def _differing(before: Mapping[str, str], now: Mapping[str, str]) -> list[tuple[str, str, str]]:
    names = dict.fromkeys([*before, *now])
    return [
        (name, before.get(name, "nothing"), now.get(name, "nothing"))
        for name in names
        if before.get(name) != now.get(name)
    ]
