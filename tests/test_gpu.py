"""Promise, on a GPU: no host synchronisation in the loop, and the same results as on the CPU."""

import math
from typing import Any

import pytest
import torch

from tests.toys import make_recipe
from trainer.loop import train
from trainer.observe.log import Meter
from trainer.parallel import World
from trainer.run import assemble, make_task
from trainer.step import take_figures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

DIGITS: dict[str, Any] = {
    "max_windows": 30,
    "epochs": 2,
    "data": {"global_batch": 64, "micro_batch": 16, "augment": "affine"},
    "model": {"width": 16, "dropout": 0.1},
    "optim": {"lr": 0.01, "clip": 1.0},
    "ema": {"decay": 0.9},
    "log": {"every": 5},
}


def losses_on(device: torch.device, strict: bool, **sections: Any) -> list[float]:
    recipe = make_recipe(**{**DIGITS, **sections})
    parts = assemble(recipe, make_task(recipe), World(0, 1, 0, device, None), workers=2)
    t = parts.training
    rows: list[Any] = []
    meter = Meter(t.share.plan, device, [rows.append], lambda: take_figures(t))
    batches = parts.loader(t.share.batches())

    def strict_after_warm_up(done: int) -> None:
        if strict and done == 10:
            torch.cuda.set_sync_debug_mode("error")

    try:
        train(
            t,
            batches,
            range(t.share.plan.windows),
            meter,
            recipe.log.every,
            lambda _: False,
            lambda _: None,
            strict_after_warm_up,
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
        parts.loader.close()
    return [row["loss"] for row in rows]


@pytest.mark.parametrize("mode", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("resident", [True, False])
def test_the_loop_never_waits_for_the_gpu(mode: str, resident: bool) -> None:
    data = DIGITS["data"] | {"resident": resident, "workers": "auto" if resident else 2}
    losses = losses_on(torch.device("cuda", 0), strict=True, precision={"mode": mode}, data=data)
    assert len(losses) == 6
    assert all(math.isfinite(loss) for loss in losses)


def test_checkpointing_and_accumulation_never_wait_either() -> None:
    data = DIGITS["data"] | {"micro_batch": 8}
    losses = losses_on(torch.device("cuda", 0), strict=True, memory={"checkpointing": "blocks"}, data=data)
    assert all(math.isfinite(loss) for loss in losses)


def test_gpu_and_cpu_agree() -> None:
    plain: dict[str, Any] = {"model": {"width": 16}}
    on_gpu = losses_on(torch.device("cuda", 0), strict=False, **plain)
    assert on_gpu == pytest.approx(losses_on(torch.device("cpu"), strict=False, **plain), rel=1e-2)
