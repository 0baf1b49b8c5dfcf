"""Promise: token batches at least 8 times as many per CPU second as a nanoGPT-style get_batch; a bench that
can fail.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer.bench import tokens
from trainer.bench.tokens import bench_tokens, get_batch, token_loader
from trainer.data.tokens import TOKENS, TokenDataset, inputs_and_targets


def test_the_target_is_met(capsys: pytest.CaptureFixture[str]) -> None:
    """Up to four tries: other work on the machine falls on one of the loops now and then."""
    codes: list[int] = []
    while 0 not in codes and len(codes) < 4:
        codes.append(bench_tokens(rounds=6, batches=200, megabytes=10))
    out = capsys.readouterr().out
    # Undecided each time is no proof of the contrary: the machine was too busy to say.
    assert 0 in codes or 1 not in codes, out
    assert "| trainer, no workers |" in out


def test_a_slower_loader_misses_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = TokenDataset.read

    def slower(self: TokenDataset, *arguments: Any) -> None:
        original(self, *arguments)
        end = time.process_time() + 500e-6
        while time.process_time() < end:
            pass

    monkeypatch.setattr(TokenDataset, "read", slower)
    assert bench_tokens(rounds=6, batches=100, megabytes=5) == 1
    assert "MISSED" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [{"rounds": 0}, {"batches": 9}, {"megabytes": 0}])
def test_nothing_measured_is_no_success(arguments: dict[str, int]) -> None:
    assert bench_tokens(**arguments) == 3


def test_both_deliver_the_same_kind_of_batch(tmp_path: Path) -> None:
    file = tmp_path / "x.bin"
    (np.arange(500_000) % 50_000).astype(np.uint16).tofile(file)
    (batch,) = token_loader(file, 20)(range(19, 20))
    for x, y in (get_batch(file), inputs_and_targets(batch.fields[TOKENS])):
        for part in (x, y):
            assert (part.dtype, part.shape) == (torch.int64, (32, 1024))
            assert part.is_contiguous()
        assert ((x + 1) % 50_000 == y).all()
        assert (x[:, 1:] == y[:, :-1]).all()


def test_the_threads_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "interleaved", lambda *_: 1 / 0)
    torch.set_num_threads(2)
    with pytest.raises(ZeroDivisionError):
        bench_tokens(rounds=1, batches=10, megabytes=1)
    assert torch.get_num_threads() == 2
