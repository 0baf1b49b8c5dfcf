"""Promise: what the first step compiled serves all others; nothing is compiled again."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.counting import skip_with_another_torch
from tests.helpers.toys import build_alone, rows_to
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override, read_recipe
from trainer.config.section import validated
from trainer.optim.optimizers import LRScheduler
from trainer.train import loop
from trainer.train.components import model as prepare
from trainer.train.components.task import make_task
from trainer.train.loop import train

# Two micro-batches a step, and steps that cross the ends of epochs (or, weighted, are padded there); a
# learning rate that changes in each; the digits' own augmentation, average of the weights and clipping.
_DIGITS = (
    *("data.global_batch_size=400", "data.micro_batch_size=200", "model.width=4", "model.norm=group"),
    *("max_steps=9", "log.every=4", "parallel.threads=1"),
)
_EVALUATED = (3, 6)  # steps done


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Graphs that were handed to the compiler, forward and backward; they run as they are."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func

    graphs: list[Any] = []
    original: Callable[..., Any] = torch.compile

    def as_it_is(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def compile_quickly(what: Any, *, mode: str, **keywords: Any) -> Any:
        assert mode == "default"
        backend = aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is)
        return original(what, backend=backend, **keywords)

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", compile_quickly)
    monkeypatch.setattr(prepare, "missing_for_compiling", lambda _: None)
    return graphs


def test_nothing_is_compiled_after_the_first_step(compiled: list[Any]) -> None:
    words = [*_DIGITS, "compile.mode=default", "compile.scope=model", "data.last_batch=weighted"]
    words += ["data.resident=false", "data.workers=0"]
    recipe = validated(Recipe, override(read_recipe("digits"), words), "digits")
    task = make_task(recipe)
    run = build_alone(recipe, task)
    plan, rates, counts = run.plan, set[float](), list[int]()
    assert plan.epoch_at(plan.steps) > 1 and run.gradient_accumulation_steps == 2

    def done(_: int) -> None:
        counts.append(len(compiled))
        assert isinstance(run.state.lr, LRScheduler)
        rates.add(float(run.state.lr.current))

    def evaluated(_recipe: Any, _plan: Any, step: int) -> int:
        return min((other for other in _EVALUATED if other > step), default=0)

    with mock.patch.object(loop, "next_evaluation", evaluated):
        train(run, rows_to(run, each_step=[done]))
    assert len(rates) == plan.steps - 1  # the last one is kept
    assert counts[0] > 0 and counts == counts[:1] * plan.steps
    skip_with_another_torch()
    assert counts[0] == 2, "forward and backward"
