"""Promise: token batches are timed beside a nanoGPT-style get_batch of the same kind, and judged."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import tokens
from benchmarks.tokens import bench_tokens, get_batch, token_loader
from tests.helpers.clock import Clock
from trainer.data.formats.tokens import TOKENS, TokenDataset, inputs_and_targets

Capsys = pytest.CaptureFixture[str]


@pytest.mark.parametrize(("theirs", "code", "verdict"), [(2**-7, 0, "met"), (2**-8, 1, "MISSED")])
def test_a_slower_loader_misses_the_target(
    monkeypatch: pytest.MonkeyPatch, capsys: Capsys, theirs: float, code: int, verdict: str
) -> None:
    """On a clock that each batch moves, of ours by 2**-10 s."""
    clock = Clock()

    def moved(seconds: float, function: Any) -> Any:
        return lambda *arguments: (clock.move(seconds), function(*arguments))[1]

    monkeypatch.setattr(tokens, "time", clock.time)
    monkeypatch.setattr(tokens, "get_batch", moved(theirs, get_batch))
    monkeypatch.setattr(TokenDataset, "read", moved(2**-10, TokenDataset.read))
    assert bench_tokens(rounds=6, batches=20, megabytes=1) == code
    out = capsys.readouterr().out
    assert f"| trainer, no workers | 34 | 34 to 34 | {theirs * 2**10:.1f} (" in out
    assert f"target 8x: {verdict}" in out


def test_both_deliver_the_same_kind_of_batch(tmp_path: Path) -> None:
    file = tmp_path / "x.bin"
    (np.arange(500_000) % 50_000).astype(np.uint16).tofile(file)
    (batch,) = token_loader(file, 20)(range(19, 20))
    for x, y in (get_batch(file), inputs_and_targets(batch.fields[TOKENS])):
        kinds = [(part.dtype, part.shape, part.is_contiguous()) for part in (x, y)]
        assert kinds == [(torch.int64, (32, 1024), True)] * 2
        assert ((x + 1) % 50_000 == y).all()
        assert (x[:, 1:] == y[:, :-1]).all()
