"""What proves a run: the exact figures of each row, and a fingerprint of every tensor of the model.

`trace.jsonl` holds a line with the names of the tensors, and then for each row of figures one with `kind`,
`window`, the figures and `tensors`, 64 bits of each as hexadecimal text. What isn't finite is a text, too.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import nn

from trainer.keyed_rng import Purpose, key, keys

# int64 values in a row of the matrix that a tensor is added up as. Two elements with the same weight, in one
# column, hide a change only if their changes cancel to the bit.
_COLUMNS = 1024
_ROW = 8 * _COLUMNS


@dataclass(frozen=True)
class Trace:
    """How the meter records.

    Attributes:
        take: Gives the fingerprints now, int64 (tensors,), on the device; the host doesn't wait for it.
        write: Takes a row and the fingerprints that were taken with it, if any were.
    """

    take: Callable[[], torch.Tensor]
    write: Callable[[Mapping[str, Any], Sequence[int]], None]


def fingerprints_of(model: nn.Module) -> Callable[[], torch.Tensor]:
    """Makes the function that fingerprints a model's parameters and buffers: int64 (tensors,).

    Each is a sum of the tensor's bits as 64-bit integers times weights by position, modulo 2**64: exact, and
    the same in whatever order a device adds. A flipped bit always changes it.
    """
    state = model.state_dict()
    device = next(iter(state.values())).device
    words = [_words(tensor) for tensor in state.values()]
    segments = torch.from_numpy(np.repeat(np.arange(len(words)), words)).to(device)
    places = np.concatenate([np.arange(count) for count in words])
    odd = keys(key(Purpose.FINGERPRINT), places) | np.uint64(1)
    weights = torch.from_numpy(odd.view(np.int64)).to(device)

    @torch.no_grad()
    def take() -> torch.Tensor:
        parts = [part for tensor in model.state_dict().values() for part in _parts(tensor)]
        summed = torch.zeros(len(words), dtype=torch.int64, device=device)
        # Integers: whichever is added first, the sum is the same.
        return summed.index_add_(0, segments, torch.cat(parts) * weights)

    return take


def _words(tensor: torch.Tensor) -> int:
    """Number of int64 values in `_parts`."""
    whole, rest = divmod(tensor.nbytes, _ROW)
    return _COLUMNS * bool(whole) + -(-rest // 8)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor's bits, int64: its rows added up, and what is left of it."""
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
    return [words[: whole // 8].view(-1, _COLUMNS).sum(0), words[whole // 8 :]]


def trace_to(file: TextIO, names: Sequence[str], known: Sequence[str], window: int) -> Callable[..., None]:
    """Makes the function that writes rows to a file.

    Args:
        file: Open for appending.
        names: Of the tensors.
        known: Those that the file names last, from an earlier attempt.
        window: Windows done.
    """
    due, window = list(names) != list(known), window if known else 0

    def write(row: Mapping[str, Any], prints: Sequence[int] = ()) -> None:
        nonlocal due
        lines = [{"kind": "names", "window": window, "tensors": list(names)}] if due else []
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
class Traced:
    """A row of a trace.

    Attributes:
        kind: "train" or "evaluation".
        window: Windows done.
        figures: By name, as the text that stands in the file.
        tensors: Fingerprints by name; an evaluation has none.
    """

    kind: str
    window: int
    figures: Mapping[str, str]
    tensors: Mapping[str, str]


def read_trace(file: Path) -> tuple[list[Traced], list[str], int]:
    """Reads a trace; no file is an empty one.

    Returns:
        Its rows, the names of the tensors that it names last, and how many lines can't be read; a last one
        that was cut off is none of these.

    Raises:
        OSError: If it can't be read.
    """
    if not file.exists():
        return [], [], 0
    *lines, _ = file.read_bytes().split(b"\n")
    rows, names, bad = list[Traced](), list[str](), 0
    for line in lines:
        try:
            # Numbers as text: equal texts are equal bits, -0.0 and all.
            row = json.loads(line, parse_float=str, parse_int=str)
            kind, window, tensors = str(row.pop("kind")), int(row.pop("window")), row.pop("tensors")
            if kind == "names":
                names = [str(name) for name in tensors]
                continue
            prints = dict(zip(names, map(str, tensors), strict=True)) if tensors else {}
            rows.append(Traced(kind, window, {name: str(value) for name, value in row.items()}, prints))
        except (ValueError, KeyError, TypeError, AttributeError):
            bad += 1
    return rows, names, bad


@dataclass(frozen=True)
class Difference:
    """Where two runs part.

    Attributes:
        window: The row that differs first; nothing says in which window since the row before.
        after: The last window at which all was the same.
        figures: What differs in that row: (name, recorded, replayed).
        tensors: The tensors that differ there, in the model's order.
        of: The number of tensors that were compared there.
    """

    window: int
    after: int
    figures: list[tuple[str, str, str]] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    of: int = 0


def first_difference(recorded: Iterable[Traced], replayed: Iterable[Traced]) -> Difference | None:
    """Compares every recorded row with its replay; None if all of them are the same."""
    there = {(row.window, row.kind): row for row in replayed}
    rows = sorted(recorded, key=lambda row: row.window)
    for window, at_once in itertools.groupby(rows, key=lambda row: row.window):
        figures, tensors, of = list[tuple[str, str, str]](), list[str](), 0
        for row in at_once:
            again = there.get((window, row.kind))
            if again is None:
                figures.append((f"row of {row.kind} figures", "there", "missing"))
                continue
            figures += _differing(row.figures, again.figures)
            tensors += [name for name, _, _ in _differing(row.tensors, again.tensors)]
            of = max(of, len(row.tensors))
        if figures or tensors:
            after = max((row.window for row in rows if row.window < window), default=0)
            return Difference(window, after, figures, tensors, of)
    return None


def _differing(before: Mapping[str, str], now: Mapping[str, str]) -> list[tuple[str, str, str]]:
    names = dict.fromkeys([*before, *now])
    return [
        (name, before.get(name, "nothing"), now.get(name, "nothing"))
        for name in names
        if before.get(name) != now.get(name)
    ]
