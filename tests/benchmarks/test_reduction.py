"""Promise: the cost of the tree reduction is measured in alternation and judged by its interval."""

import pytest
import torch

from benchmarks import reduction
from benchmarks.reduction import _measure, _Price, _ratio, bench_reduction
from trainer.distributed.parallel import World

Capsys = pytest.CaptureFixture[str]


def test_the_tree_keeps_log2_of_the_shards_and_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "_WIDTH", 4)
    monkeypatch.setattr(reduction, "_IMAGE", 8)
    price = _measure(World(0, 1, 0, torch.device("cpu"), None), rounds=1)
    assert price.peak == [0, 4 * price.gradients]
    assert [len(seconds) for seconds in price.seconds] == [1, 1]


@pytest.mark.parametrize(("slower", "code"), [(1.0, 0), (2.0, 1)])
def test_the_target_is_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: Capsys, slower: float, code: int
) -> None:
    price = _Price([[1.0] * 9, [slower] * 9], [1.0, 1.0], [0, 4], 1)
    assert _ratio(price) == (slower, slower, slower)
    monkeypatch.setattr(reduction, "_measure", lambda *_: price)
    monkeypatch.setattr(reduction, "on_ranks", lambda *_, **__: price)
    assert bench_reduction(rounds=9, target=1.05) == code
    assert ("met" if code == 0 else "MISSED") in capsys.readouterr().out
