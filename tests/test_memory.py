"""Promise: activation checkpointing, compiling, memory formats and BatchNorm change no result."""

import shutil
from typing import Any

import pytest
import torch
from torch import nn

from tests.toys import TokenTask, assemble_alone, make_recipe
from trainer.batchnorm import WindowStatistics
from trainer.errors import BadInputError
from trainer.memory import MemoryConfig, blocks, candidates, recompute
from trainer.models import ModelConfig, build_model
from trainer.run import make_task
from trainer.step import train_window

SMALL: dict[str, Any] = {
    "max_windows": 5,
    "data": {"global_batch": 32, "micro_batch": 16, "augment": "flip"},
    "model": {"width": 8, "dropout": 0.5},
    "optim": {"lr": 0.01, "clip": 1.0},
}


def train(**sections: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    recipe = make_recipe(**{**SMALL, **sections})
    parts = assemble_alone(recipe, make_task(recipe))
    batches = parts.loader(parts.training.share.batches())
    losses = []
    parts.training.replica.train()
    for window in range(parts.training.share.plan.windows):
        train_window(parts.training, batches, window)
        losses.append(float(parts.training.loss))
    return losses, parts.training.model.state_dict()


def test_checkpointing_changes_no_bit_with_dropout_and_batchnorm() -> None:
    """Dropout draws the same in the recomputation, running statistics are counted once."""
    plain_losses, plain = train()
    losses, state = train(memory={"checkpointing": "blocks"})
    assert losses == plain_losses
    assert state.keys() == plain.keys()
    assert all(torch.equal(state[name], plain[name]) for name in plain)


def test_checkpointing_really_recomputes() -> None:
    model = build_model(ModelConfig(width=8, blocks=(2, 2)), 1, 10)
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    found = blocks(model)
    assert list(found) == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    for block in found.values():
        block.register_forward_hook(count)
        block.get_submodule("conv1").register_forward_hook(count)
        recompute(block)
    model(torch.randn(2, 1, 8, 8)).sum().backward()
    assert calls == 4 + 2 * 4


@pytest.mark.parametrize(
    ("name", "count"), [("resnet18", 8), ("resnet50", 16), ("vit_b_16", 12), ("convnext_tiny", 18)]
)
def test_blocks_are_the_repeated_parts(name: str, count: int) -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(name=name), 3, 10)
    found = blocks(model)
    assert len(found) >= count
    inside = {id(p) for block in found.values() for p in block.parameters()}
    share = sum(p.numel() for p in model.parameters() if id(p) in inside) / sum(
        p.numel() for p in model.parameters()
    )
    assert share > 0.75


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(BadInputError, match="no repeated blocks"):
        candidates(MemoryConfig(checkpointing="blocks"), nn.Linear(2, 2))


def test_channels_last_changes_only_rounding() -> None:
    plain_losses, _ = train()
    losses, state = train(model={"width": 8, "dropout": 0.5, "channels_last": True})
    assert losses == pytest.approx(plain_losses, rel=1e-4)
    assert state["stem.weight"].is_contiguous(memory_format=torch.channels_last)


def test_statistics_without_accumulation_are_batchnorms_own() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    statistics = WindowStatistics(ours, None)
    for _ in range(4):
        data = torch.randn(8, 3) * 2 + 1
        ours(data)
        statistics.add_shard()
        statistics.end_window(1)
        theirs(data)
    for name, tensor in theirs.state_dict().items():
        assert torch.allclose(ours.state_dict()[name], tensor, atol=1e-6), name


def test_statistics_of_a_window_are_the_mean_over_its_shards() -> None:
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(3, momentum=0.25)
    statistics = WindowStatistics(layer, None)
    shards = [torch.randn(8, 3) for _ in range(4)]
    for shard in shards:
        layer(shard)
        layer(shard)  # once more, as activation checkpointing does
        statistics.add_shard()
    statistics.end_window(4)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert torch.allclose(
        layer.running_mean, 0.25 * torch.stack([s.mean(0) for s in shards]).mean(0), atol=1e-6
    )
    expected = 0.75 + 0.25 * torch.stack([s.var(0) for s in shards]).mean(0)
    assert torch.allclose(layer.running_var, expected, atol=1e-6)
    assert int(layer.num_batches_tracked or 0) == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
@pytest.mark.parametrize("last", ["cross", "weighted"])
def test_a_compiled_model_learns_the_same_and_never_compiles_again(last: str) -> None:
    """Over an epoch's ragged end, too: 20 samples in batches of 8."""
    losses: list[list[float]] = []
    for compiled in (False, True):
        recipe = make_recipe(
            epochs=4,
            compile={"mode": "default" if compiled else "none"},
            data={"global_batch": 8, "micro_batch": 4},
            window={"last": last},
            optim={"lr": 0.01},
        )
        parts = assemble_alone(recipe, TokenTask(20, ragged=True, dtype=torch.float32))
        batches = parts.loader(parts.training.share.batches())
        torch._dynamo.reset()
        series = []
        for window in range(parts.training.share.plan.windows):
            train_window(parts.training, batches, window)
            series.append(float(parts.training.loss))
            if window == 0:
                warm = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        losses.append(series)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == warm
        assert bool(warm) == compiled
        torch._dynamo.utils.counters.clear()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
