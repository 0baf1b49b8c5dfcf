"""Promise: what a start measures, tries or builds on the side is gone when the loop begins."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.steps import go
from tests.helpers.toys import TokenTask, build_alone, make_recipe
from trainer.models.activations import measure
from trainer.train.components.operations import count_operations

pytestmark = pytest.mark.compat

CPU = torch.device("cpu")


class Saving(nn.Module):
    """Its operations save what they give: ReLU, softmax, exp, attention, LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.norm, self.batch = nn.LayerNorm(6), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = (-self.inner(x).relu().softmax(-1)).exp()
        h = nn.functional.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None])[:, 0]
        h = self.batch(self.norm(h))
        return x + h


def watched(model: nn.Module, *layers: nn.Module) -> list[Any]:
    """What parameters and outputs of layers there are, as long as there are."""
    seen: list[Any] = [weakref.ref(p) for p in model.parameters()]
    for layer in layers:
        layer.register_forward_hook(lambda _, __, output: seen.append(weakref.ref(output)))
    return seen


def alive(refs: list[Any]) -> list[Any]:
    gc.collect()
    return [ref() for ref in refs if ref() is not None]


def test_what_was_measured_is_gone() -> None:
    blocks, x = [Saving(), Saving()], torch.randn(4, 5, 6)
    model = nn.Sequential(*blocks)
    refs = watched(model, *blocks, *(block.inner for block in blocks))
    weights = len(refs)
    measure(model, dict(model.named_children()), lambda one=model: one(x).sum())  # type: ignore[misc]
    assert len(refs) > weights + 4 and len(alive(refs)) == weights
    del model, blocks
    assert not alive(refs)


@pytest.mark.parametrize(
    "sections",
    [
        {"memory": {"checkpointing": "blocks"}, "ema": {"decay": 0.9}},
        {"precision": {"debug": True}},
        {"precision": {"mode": "bf16", "keep_fp32": ["2"]}, "anomaly": {"nonfinite": "skip"}},
        {"parallel": {"threads": 1, "reduction": "tree"}, "optim": {"name": "muon"}},
    ],
    ids="+".join,
)
def test_a_run_leaves_nothing_and_a_second_one_in_its_process_finds_none(sections: dict[str, Any]) -> None:
    """As a second `fit` builds it: once more in one process."""
    made: list[list[Any]] = []

    def make() -> nn.Module:
        blocks = nn.Sequential(Saving(), Saving())
        model = nn.Sequential(nn.Linear(3, 6), blocks, nn.Linear(6, 4))
        made.append(watched(model, *blocks))
        return model

    recipe = make_recipe(data={"global_batch_size": 8, "micro_batch_size": 4}, **sections)
    task = TokenTask(32, ragged=False, dtype=torch.float32, make=make)
    for _ in range(2):
        run = build_alone(recipe, task)
        trained = {id(parameter) for parameter in run.state.model.parameters()}
        count_operations(task, run.state.model, 4, CPU)
        held = {id(tensor) for refs in made for tensor in alive(refs)}
        assert held == trained, "what was tried or measured is still there"
        go(run, range(2))
        run.close()
        del run
        assert not alive([ref for refs in made for ref in refs]), "the run is still there"
