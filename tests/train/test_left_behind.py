"""Promise: what a start measures, tries or builds on the side is gone when the loop begins."""

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.toys import TokenTask, build_alone, make_recipe
from trainer.models.activations import measure
from trainer.train.components.operations import count_operations
from trainer.train.step import train_step

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


class Task(TokenTask):
    """Remembers each model that was asked for, by its parameters and what its blocks gave."""

    def __init__(self) -> None:
        super().__init__(32, ragged=False, dtype=torch.float32)
        self.made: list[list[weakref.ref[torch.Tensor]]] = []

    def model(self) -> nn.Module:
        blocks = nn.Sequential(Saving(), Saving())
        model = nn.Sequential(nn.Linear(3, 6), blocks, nn.Linear(6, 4))
        seen = [weakref.ref[torch.Tensor](p) for p in model.parameters()]

        def look(_: nn.Module, __: Any, output: torch.Tensor) -> None:
            seen.append(weakref.ref(output))

        for block in blocks:
            block.register_forward_hook(look)
        self.made.append(seen)
        return model


def alive(refs: list[Any]) -> int:
    gc.collect()
    return sum(ref() is not None for ref in refs)


def test_what_was_measured_is_gone() -> None:
    model, refs = nn.Sequential(Saving(), Saving()), list[Any]()

    def look(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        refs.append(weakref.ref(output))

    for block in model:
        block.register_forward_hook(look)
        block.inner.register_forward_hook(look)  # type: ignore[union-attr]
    measure(model, dict(model.named_children()), functools.partial(_total, model, torch.randn(4, 5, 6)))
    assert len(refs) > 4 and alive(refs) == 0
    refs = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, block
    assert alive(refs) == 0


def _total(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(x).sum()
    return result


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
    recipe = make_recipe(data={"global_batch_size": 8, "micro_batch_size": 4}, **sections)
    task = Task()
    for _ in range(2):
        run = build_alone(recipe, task)
        trained = {id(parameter) for parameter in run.state.model.parameters()}
        count_operations(task, run.state.model, 4, CPU)
        gc.collect()
        held = [ref() for refs in task.made for ref in refs if ref() is not None]
        assert {id(tensor) for tensor in held} == trained, "what was tried or measured is still there"
        del held
        run.replica.train()
        batches = run.loader(run.share.batches())
        for step in range(2):
            train_step(run, batches, step)
        run.close()
        del run, batches
        assert alive([ref for refs in task.made for ref in refs]) == 0, "the run is still there"
