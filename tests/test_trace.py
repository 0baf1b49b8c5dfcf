"""Promise: a fingerprint tells any change of a tensor, and the first row that differs is named."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainer.keyed_rng import Purpose, key
from trainer.observe.trace import Difference, Traced, fingerprints_of, first_difference, read_trace, trace_to

SIZES = [(), (1,), (7,), (3, 1023), (3 * 8192 + 5,), (40, 30, 3, 3)]
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def holding(*tensors: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for number, tensor in enumerate(tensors):
        module.register_buffer(f"t{number}", tensor)
    return module


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Of the tensor itself: what is written there changes it."""
    return tensor.view(-1).view(torch.uint8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", TYPES)
def test_any_flipped_bit_is_seen_and_where(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    one, other = (torch.zeros(size).normal_().to(dtype).contiguous() for _ in range(2))
    take = fingerprints_of(holding(one, other))
    before = take().tolist()
    for place in {0, one.nbytes - 1, *random.integers(0, one.nbytes, 5).tolist()}:
        for bit in (0, 3, 7) if dtype is not torch.bool else (0,):
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


def test_it_is_the_sum_that_is_described() -> None:
    values = torch.randn(2 * 2048 + 3)
    words = np.concatenate([values.numpy(), np.zeros(1, np.float32)]).view(np.int64).tolist()
    weight = [key(Purpose.FINGERPRINT, place) | 1 for place in range(1026)]
    whole = sum((words[place] + words[1024 + place]) * weight[place] for place in range(1024))
    rest = sum(word * weight[1024 + place] for place, word in enumerate(words[2048:]))
    assert fingerprints_of(holding(values))().item() % 2**64 == (whole + rest) % 2**64


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


def written(*rows: tuple[dict[str, Any], list[int]], known: list[str] | None = None, window: int = 0) -> str:
    file = io.StringIO()
    write = trace_to(file, ["a", "b"], known or [], window)
    for row, prints in rows:
        write(row, prints)
    return file.getvalue()


def test_what_is_written_is_read_to_the_bit(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    figures = {"loss": 0.1 + 0.2, "nan": math.nan, "inf": -math.inf, "zero": -0.0, "applied": 3}
    text = written(
        ({"kind": "train", "window": 2, **figures}, [-1, 255]),
        ({"kind": "evaluation", "window": 2, "loss": 5e-324}, []),
    )
    file.write_text(text + '{"kind": "train", "win')
    rows, names, bad = read_trace(file)
    assert (names, bad) == (["a", "b"], 0), "the last line was cut off"
    assert rows == [
        Traced(
            "train",
            2,
            {"loss": "0.30000000000000004", "nan": "nan", "inf": "-inf", "zero": "-0.0", "applied": "3"},
            {"a": "f" * 16, "b": "00000000000000ff"},
        ),
        Traced("evaluation", 2, {"loss": "5e-324"}, {}),
    ]
    assert read_trace(tmp_path / "none") == ([], [], 0)
    file.write_text(text + "[]\n{}\nx\n" + '{"kind": "train", "window": 4, "tensors": ["1"]}\n')
    assert len(read_trace(file)[0]) == 2 and read_trace(file)[2] == 4


def test_names_are_written_once_for_all_attempts(tmp_path: Path) -> None:
    row: dict[str, Any] = {"kind": "train", "window": 2}
    assert written((row, [1, 2]), (row, [1, 2])).count("names") == 1
    assert "names" not in written((row, [1, 2]), known=["a", "b"], window=1)
    # Another model, by --resume force: of its windows alone.
    file = tmp_path / "trace.jsonl"
    file.write_text(written((row, [1, 2]), known=["a"], window=1))
    assert file.read_text().startswith('{"kind": "names", "window": 1,')


def row(window: int, kind: str = "train", loss: str = "1.5", **tensors: str) -> Traced:
    return Traced(kind, window, {"loss": loss}, tensors or {"a": "0", "b": "0"})


RUN = [row(2), row(4), row(4, "evaluation"), row(6)]


@pytest.mark.parametrize(
    ("again", "found"),
    [
        (RUN, None),
        (RUN[::-1], None),
        ([*RUN, row(8)], None),
        ([row(2), row(4, a="0", b="1"), *RUN[2:]], Difference(4, 2, [], ["b"], 2)),
        ([row(2, loss="1.6"), *RUN[1:]], Difference(2, 0, [("loss", "1.5", "1.6")], [], 2)),
        (
            [row(2), row(4), row(4, "evaluation", "2"), row(6, b="7", a="1")],
            Difference(4, 2, [("loss", "1.5", "2")], [], 2),
        ),
        (
            [row(2), row(4, a="9", b="0"), row(4, "evaluation", "2"), row(6)],
            Difference(4, 2, [("loss", "1.5", "2")], ["a"], 2),
        ),
        (RUN[:3], Difference(6, 4, [("row of train figures", "there", "missing")], [], 0)),
        ([*RUN[:3], row(6, a="0")], Difference(6, 4, [], ["b"], 2)),
        ([*RUN[:3], row(6, a="0", b="0", c="0")], Difference(6, 4, [], ["c"], 2)),
    ],
)
def test_the_first_difference_is_found(again: list[Traced], found: Difference | None) -> None:
    assert first_difference(RUN, again) == found
