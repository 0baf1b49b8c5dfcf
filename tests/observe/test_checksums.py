"""Promise: a fingerprint changes with any bit of a tensor, and the first record that differs is named."""

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainer.observe import checksums
from trainer.observe.checksums import (
    ChecksumRow,
    FirstDifference,
    fingerprints_of,
    last_names,
    read_checksums,
)


def holding(*tensors: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for number, tensor in enumerate(tensors):
        module.register_buffer(f"t{number}", tensor)
    return module


def test_fingerprints_are_those_of_runs_before() -> None:
    """Else no run that was trained by an older trainer could be verified."""
    found = fingerprints_of(holding(torch.arange(5.0), torch.arange(5000.0)))().tolist()
    assert [f"{one % (1 << 64):016x}" for one in found] == ["f72b533502799f27", "bdbe3d442f93e8f5"]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Of the tensor itself: what is written there changes it."""
    return tensor.view(-1).view(torch.uint8)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, ()), (torch.bool, (7,)), (torch.uint8, (3, 1023)), (torch.float32, (3 * 8192 + 5,))],
)
def test_any_flipped_bit_is_seen_and_where(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    one, other = (torch.zeros(size).normal_().to(dtype).contiguous() for _ in range(2))
    take = fingerprints_of(holding(one, other))
    before = take().tolist()
    for place in {0, one.nbytes - 1, *random.integers(0, one.nbytes, 5).tolist()}:
        for bit in range(8) if dtype is not torch.bool else (0,):
            bits(one)[place] ^= 1 << bit
            now = take().tolist()
            assert now[0] != before[0] and now[1] == before[1]
            bits(one)[place] ^= 1 << bit
    assert take().tolist() == before


def test_changes_that_add_up_to_nothing_are_seen() -> None:
    values = torch.randn(3 * 8192 + 100)
    take = fingerprints_of(holding(values))
    words = values.view(torch.int32)
    random = np.random.default_rng(1)
    before = take().item()
    for _ in range(200):
        # Of one unit in the last place up, and of another down; in different columns of 64 bits.
        up, down = random.choice(1024, 2, replace=False) * 2 + random.integers(0, 3, 2) * 2048
        words[up] += 1
        words[down] -= 1
        assert take().item() != before
        words[up] -= 1
        words[down] += 1
    swapped = values.clone()
    swapped[[3, 8]] = values[[8, 3]]
    assert fingerprints_of(holding(swapped))().item() != before


MOVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negated": lambda x: -x,
    "rows swapped": lambda x: x[[1, 0, *range(2, len(x))]],
    "columns permuted": lambda x: x[:, torch.randperm(x.shape[1])],
    "rolled": lambda x: x.flatten().roll(1).view(x.shape),
    "halves of words swapped": lambda x: x.view(-1, 2).flip(1).reshape(x.shape),
    "a column negated": lambda x: torch.cat([-x[:, :1], x[:, 1:]], 1),
}


@pytest.mark.parametrize("change", MOVED.values(), ids=MOVED)
def test_what_is_negated_or_moved_is_seen(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    size = (40, 2048)
    for one in (torch.randn(size), torch.randn(6, 20).bfloat16(), torch.eye(*size) + 1, torch.ones(size)):
        other = change(one).contiguous()
        same = torch.equal(bits(one), bits(other))
        assert (fingerprints_of(holding(one))().item() == fingerprints_of(holding(other))().item()) is same


def test_neither_threads_nor_strides_nor_nan_count() -> None:
    values = torch.randn(64, 64, 3, 3)
    values[0, 0] = math.nan
    with_zero = torch.zeros(3)
    model = holding(values, with_zero)
    one = fingerprints_of(model)().tolist()
    torch.set_num_threads(2)
    assert fingerprints_of(model)().tolist() == one
    torch.set_num_threads(1)
    strided = holding(values.contiguous(memory_format=torch.channels_last), torch.zeros(3, 2)[:, 1])
    assert fingerprints_of(strided)().tolist() == one
    odd = holding(torch.cat([torch.zeros(1), values.flatten()])[1:].view(values.shape), with_zero)
    assert fingerprints_of(odd)().tolist() == one, "at any place in memory"
    values[0, 0] = -values[0, 0]
    with_zero.neg_()
    other = fingerprints_of(model)().tolist()
    assert other[0] != one[0] and other[1] != one[1], "NaN and -NaN, 0 and -0 are other bits"


def written(*rows: tuple[dict[str, Any], list[int]], known: list[str] | None = None, step: int = 0) -> str:
    file = io.StringIO()
    write = checksums.checksums_to(file, ["a", "b"], known or [], step)
    for row, prints in rows:
        write(row, prints)
    return file.getvalue()


def test_what_is_written_is_read_to_the_bit(tmp_path: Path) -> None:
    file = tmp_path / "checksums.jsonl"
    metrics = {"loss": 0.1 + 0.2, "nan": math.nan, "inf": -math.inf, "zero": -0.0, "updates": 3}
    evaluated = ({"kind": "eval", "step": 2, "loss": 5e-324}, list[int]())
    text = written(({"kind": "train", "step": 2, **metrics}, [-1, 255]), evaluated)
    file.write_text(text + '{"kind": "train", "win')
    rows, names, bad = read_checksums(file)
    assert (names, bad) == (["a", "b"], 0), "the last line was cut off"
    exact = {"loss": "0.30000000000000004", "nan": "nan", "inf": "-inf", "zero": "-0.0", "updates": "3"}
    first = ChecksumRow("train", 2, exact, {"a": "f" * 16, "b": "00000000000000ff"})
    assert rows == [first, ChecksumRow("eval", 2, {"loss": "5e-324"}, {})]
    assert read_checksums(tmp_path / "none") == ([], [], 0)
    file.write_text(text + "[]\n{}\nx\n" + '{"kind": "train", "step": 4, "tensors": ["1"]}\n')
    assert len(read_checksums(file)[0]) == 2 and read_checksums(file)[2] == 4


def test_the_last_names_are_found_without_keeping_the_rows(tmp_path: Path) -> None:
    file = tmp_path / "checksums.jsonl"
    assert last_names(file) == []
    row = ({"kind": "train", "step": 2, "loss": 1.0}, [1, 2])
    file.write_text(written(row) + 'x "names"\n["names"]\n{"kind": "train", "names": 1, "step": 3}\n')
    assert last_names(file) == ["a", "b"]
    later = json.dumps({"kind": "names", "step": 4, "tensors": ["c"]})
    file.write_text(file.read_text() + later)
    assert last_names(file) == ["a", "b"] == read_checksums(file)[1], "the last line was cut off"
    file.write_text(file.read_text() + "\n" + written(row, known=["a", "b"]))
    assert last_names(file) == ["c"] == read_checksums(file)[1]


def row(step: int, kind: str = "train", loss: str = "1.5", **tensors: str) -> ChecksumRow:
    return ChecksumRow(kind, step, {"loss": loss}, tensors or {"a": "0", "b": "0"})


RUN = [row(2), row(4), row(4, "eval"), row(6)]


@pytest.mark.parametrize(
    ("again", "found"),
    [
        (RUN, None),
        ([*RUN, row(8)], FirstDifference(8, 6, [("row of train metrics", "missing", "there")], [], 0)),
        ([row(2), row(4, a="0", b="1"), *RUN[2:]], FirstDifference(4, 2, [], ["b"], 2)),
        ([row(2, loss="1.6"), *RUN[1:]], FirstDifference(2, 0, [("loss", "1.5", "1.6")], [], 2)),
        (
            [row(2), row(4, a="9", b="0"), row(4, "eval", "2"), row(6)],
            FirstDifference(4, 2, [("loss", "1.5", "2")], ["a"], 2),
        ),
        (RUN[:3], FirstDifference(6, 4, [("row of train metrics", "there", "missing")], [], 0)),
        ([*RUN[:3], row(6, a="0", b="0", c="0")], FirstDifference(6, 4, [], ["c"], 3)),
    ],
)
def test_the_first_difference_is_found(again: list[ChecksumRow], found: FirstDifference | None) -> None:
    assert checksums.first_difference(RUN, again) == found
