"""Promise: token batches are timed beside a nanoGPT-style get_batch of the same kind."""

from pathlib import Path

import numpy as np
import torch

from benchmarks.tokens import get_batch, token_loader
from trainer.data.formats.tokens import TOKENS, inputs_and_targets


def test_both_deliver_the_same_kind_of_batch(tmp_path: Path) -> None:
    file = tmp_path / "x.bin"
    (np.arange(500_000) % 50_000).astype(np.uint16).tofile(file)
    (batch,) = token_loader(file, 20)(range(19, 20))
    for x, y in (get_batch(file), inputs_and_targets(batch.fields[TOKENS])):
        kinds = [(part.dtype, part.shape, part.is_contiguous()) for part in (x, y)]
        assert kinds == [(torch.int64, (32, 1024), True)] * 2
        assert ((x + 1) % 50_000 == y).all()
        assert (x[:, 1:] == y[:, :-1]).all()
