"""Promise: AMP does what it should, also when it overflows, and no update is counted that wasn't made."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.toys import TokenTask, assemble_alone, make_recipe
from trainer.data.loader import Batch
from trainer.errors import BadInputError
from trainer.precision import PrecisionConfig, check_precision, set_matmul_mode
from trainer.step import take_figures, train_window


class Overflowing(TokenTask):
    """Its loss is infinite in one window."""

    def __init__(self, at: int) -> None:
        super().__init__(64, ragged=False, dtype=torch.float32)
        self.calls = 0
        self.at = at

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        logits = model(batch.fields["x"].float())
        assert logits.dtype == torch.float16
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.fields["y"].flatten(), reduction="sum")
        window, self.calls = self.calls // 2, self.calls + 1
        return loss * float("inf") if window == self.at else loss


def snapshot(training: Any) -> dict[str, Any]:
    average = training.average.model.parameters()
    state = [s.clone() for slot in training.optimizer.state.values() for s in slot.values()]
    return {
        "weights": [p.detach().clone() for p in training.parameters],
        "average": [p.detach().clone() for p in average],
        "state": state,
        "applied": int(training.rates.applied),
        "rate": float(training.rates.current),
        "scale": float(training.scaler.get_scale()),
    }


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_an_overflow_is_skipped_once_and_moves_nothing_but_the_data(optimizer: str, clip: float) -> None:
    at = 3
    recipe = make_recipe(
        data={"global_batch": 8, "micro_batch": 4},
        precision={"mode": "fp16", "initial_scale": 1024.0},
        optim={"name": optimizer, "lr": 0.1, "ema": 0.9, "clip": clip, "warmup": 0.0},
    )
    task = Overflowing(at)
    training = assemble_alone(recipe, task).training
    loader = assemble_alone(recipe, task).loader
    batches = loader(training.share.batches())
    states = []
    for window in range(6):
        train_window(training, batches, window)
        states.append(snapshot(training))
    before, after = states[at - 1], states[at]
    for name in ("weights", "average", "state"):
        assert all(torch.equal(a, b) for a, b in zip(before[name], after[name], strict=True)), name
    assert (after["applied"], after["rate"]) == (before["applied"], before["rate"])
    assert after["scale"] == before["scale"] / 2 == 512.0
    following = states[at + 1]
    assert following["applied"] == after["applied"] + 1 == 4
    assert following["rate"] < after["rate"]
    assert following["scale"] == after["scale"]
    assert not torch.equal(following["weights"][0], after["weights"][0])
    assert task.calls == 12, "the data went on"
    assert float(take_figures(training)["applied"]) == 5


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_skipped_first_update_leaves_no_garbage(optimizer: str) -> None:
    """With uninitialised memory filled with NaN, the run goes on as if the first window hadn't been."""
    recipe = make_recipe(
        data={"global_batch": 8, "micro_batch": 4},
        precision={"mode": "fp16", "initial_scale": 1024.0},
        optim={"name": optimizer, "lr": 0.1},
    )
    torch.use_deterministic_algorithms(True)
    try:
        parts = assemble_alone(recipe, Overflowing(0))
        batches = parts.loader(parts.training.share.batches())
        for window in range(4):
            train_window(parts.training, batches, window)
    finally:
        torch.use_deterministic_algorithms(False)
    assert int(parts.training.rates.applied) == 3
    assert all(bool(p.isfinite().all()) for p in parts.training.parameters)
    slots = [s for state in parts.training.optimizer.state.values() for s in state.values()]
    assert all(bool(slot.isfinite().all()) for slot in slots)


def trajectory(mode: str, **sections: Any) -> list[float]:
    recipe = make_recipe(
        epochs=4,
        data={"global_batch": 8, "micro_batch": 4},
        precision={"mode": mode},
        optim={"lr": 0.01},
        **sections,
    )
    task = TokenTask(64, ragged=True, dtype=torch.float32)
    parts = assemble_alone(recipe, task)
    batches = parts.loader(parts.training.share.batches())
    losses = []
    for window in range(parts.training.share.plan.windows):
        train_window(parts.training, batches, window)
        losses.append(float(parts.training.loss))
        parts.training.loss.zero_()
    return losses


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_low_precision_follows_fp32(mode: str) -> None:
    full, low = trajectory("fp32"), trajectory(mode)
    assert low != full, "autocast was not on"
    assert low == pytest.approx(full, rel=0.03)
    assert full[-1] < full[0]


def test_fp32_means_fp32_and_tf32_is_asked_for() -> None:
    try:
        set_matmul_mode(PrecisionConfig(mode="tf32"))
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32
    finally:
        set_matmul_mode(PrecisionConfig(mode="fp32"))
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.allow_tf32


def test_tf32_is_refused_on_a_cpu() -> None:
    with pytest.raises(BadInputError, match="needs an NVIDIA GPU"):
        check_precision(PrecisionConfig(mode="tf32"), torch.device("cpu"))
