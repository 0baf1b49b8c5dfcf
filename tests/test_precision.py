"""Promise: AMP does what it should, also when it overflows, and no update is counted that wasn't made."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.toys import TokenTask, assemble_alone, make_recipe
from trainer.batchnorm import WindowStatistics
from trainer.data.loader import Batch
from trainer.data.sources import DataConfig
from trainer.errors import BadInputError
from trainer.mixing import RegularizationConfig
from trainer.models import ModelConfig
from trainer.precision import PrecisionConfig, check_precision, set_matmul_mode
from trainer.step import take_figures, train_window
from trainer.tasks.classification import Classification, affine


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
        optim={"name": optimizer, "lr": 0.1, "clip": clip, "warmup": 0.0},
        ema={"decay": 0.9},
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


def trajectory(mode: str, optim: dict[str, Any]) -> list[float]:
    recipe = make_recipe(
        epochs=4,
        data={"global_batch": 8, "micro_batch": 4},
        precision={"mode": mode},
        optim=optim,
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


@pytest.mark.parametrize("optim", [{"lr": 0.01}, {"name": "sgd", "lr": 0.1, "clip": 0.3}])
@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_low_precision_follows_fp32(mode: str, optim: dict[str, Any]) -> None:
    """With clipping, too: its limit is meant for gradients without the loss scale."""
    full, low = trajectory("fp32", optim), trajectory(mode, optim)
    assert low != full, "autocast was not on"
    assert low == pytest.approx(full, rel=0.03)
    assert full[-1] < full[0]


def test_a_skipped_window_does_not_enter_batchnorm() -> None:
    layer = nn.BatchNorm1d(2)
    statistics = WindowStatistics(layer, None)
    for data, skipped in ((torch.ones(4, 2), 0.0), (torch.full((4, 2), float("inf")), 1.0)):
        layer(data)
        statistics.add_shard()
        statistics.end_window(1, torch.tensor(skipped))
    assert layer.running_mean is not None
    assert layer.running_mean.tolist() == pytest.approx([0.1, 0.1])
    layer(torch.ones(4, 2))
    statistics.add_shard()
    statistics.end_window(1, torch.tensor(0.0))
    assert layer.running_mean.tolist() == pytest.approx([0.19, 0.19])


def test_augmentation_does_not_depend_on_the_precision() -> None:
    image = torch.arange(224.0).expand(2, 1, 224, 224).contiguous()
    task: Any = Classification(DataConfig(augment="affine"), ModelConfig(), RegularizationConfig(), 0)
    batch = Batch({"image": image.to(torch.uint8)}, None, torch.rand(2, 5), 2)
    full = task._pixels(batch, train=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(task._pixels(batch, train=True), full)


def test_the_affine_grid_is_torchs() -> None:
    """Without turning and scaling, shifted by an eighth of the side: four of 32 pixels."""
    image = torch.randn(1, 2, 32, 32)
    shifted = affine(image, torch.tensor([[0.5, 0.5, 0.5, 1.0, 0.0]]))
    assert torch.allclose(shifted[..., 4:, :-4], image[..., :-4, 4:], atol=1e-5)
    random = torch.rand(3, 5)
    angle, width, height, right, down = (2 * random - 1).unbind(1)
    cos, sin = (0.21 * angle).cos(), (0.21 * angle).sin()
    rows = [cos * (1 + 0.15 * width), -sin, 0.25 * right, sin, cos * (1 + 0.15 * height), 0.25 * down]
    images = torch.randn(3, 1, 9, 14)
    grid = F.affine_grid(torch.stack(rows, 1).view(3, 2, 3), [3, 1, 9, 14], align_corners=False)
    expected = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    assert torch.allclose(affine(images, random), expected, atol=1e-5)


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
