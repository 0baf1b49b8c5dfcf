"""Promise: what the first step compiled serves all others; nothing is compiled again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.counting import skip_with_another_torch
from tests.helpers.toys import assemble_alone
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override, read_recipe
from trainer.config.section import validated
from trainer.distributed.parallel import World
from trainer.observe.log import MetricLogger
from trainer.train import prepare
from trainer.train.evaluate import evaluate
from trainer.train.loop import train
from trainer.train.run import make_task
from trainer.train.step import take_metrics

CPU = torch.device("cpu")
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


@pytest.mark.parametrize(
    ("scope", "last", "resident"),
    [
        ("model", "cross", True),
        ("model", "weighted", False),
        ("blocks", "weighted", True),
        ("blocks", "cross", False),
    ],
)
def test_nothing_is_compiled_after_the_first_step(
    scope: str, last: str, resident: bool, compiled: list[Any]
) -> None:
    words = [*_DIGITS, "compile.mode=default", f"compile.scope={scope}", f"data.last_batch={last}"]
    words += [f"data.resident={resident}", "data.workers=0"]
    recipe = validated(Recipe, override(read_recipe("digits"), words), "digits")
    task = make_task(recipe)
    parts = assemble_alone(recipe, task)
    t, world = parts.training, World(0, 1, 0, CPU, None)
    plan, rates, counts = t.share.plan, set[float](), list[int]()
    assert plan.epoch_at(plan.steps) > 1 and t.gradient_accumulation_steps == 2

    def evaluated(_: int) -> None:
        loader, share = parts.evaluation_loader, parts.evaluation_share
        evaluate(task, t.model, loader, share, world, recipe.precision)

    def done(_: int) -> None:
        counts.append(len(compiled))
        rates.add(float(t.rates.current))

    train(
        t,
        parts.loader(t.share.batches()),
        range(plan.steps),
        MetricLogger(plan, CPU, [], lambda: take_metrics(t)),
        recipe.log.every,
        lambda step: step in _EVALUATED,
        evaluated,
        done,
    )
    assert len(rates) == plan.steps - 1  # the last one is kept
    blocks = 2
    assert counts[0] > 0 and counts == counts[:1] * plan.steps
    skip_with_another_torch()
    # Forward and backward; of blocks, the second is another function only where its shapes differ.
    assert counts[0] == (2 if scope == "model" else 2 * blocks)
