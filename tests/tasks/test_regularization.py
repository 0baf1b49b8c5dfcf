"""Promise: mixup, CutMix and stochastic depth are what their papers say, and keyed by the micro-batch."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers.refusals import refused
from trainer.config.data import DataConfig
from trainer.config.model import ModelConfig
from trainer.config.recipe import Recipe
from trainer.config.section import validated
from trainer.config.tasks import RegularizationConfig
from trainer.data.batch import Batch
from trainer.models.activation_checkpointing import blocks
from trainer.models.images import build_model
from trainer.models.stochastic_depth import add_stochastic_depth
from trainer.tasks.augment import mix
from trainer.tasks.classification import Classification

pytestmark = pytest.mark.compat


def images(count: int, side: int = 16) -> torch.Tensor:
    """Each image is its number all over, so that one can see how much of which is where."""
    return torch.arange(1.0, count + 1).view(-1, 1, 1, 1).expand(count, 1, side, side)


def test_mixup_is_a_blend_with_one_neighbor() -> None:
    torch.manual_seed(0)
    mixed = mix(image := images(64), 0.4, 0.0)
    assert torch.equal(mixed.other, torch.arange(64).roll(1))
    blended = mixed.fraction * image[:, 0, 0, 0] + (1 - mixed.fraction) * image[mixed.other, 0, 0, 0]
    assert torch.allclose(mixed.image, blended.view(-1, 1, 1, 1).expand_as(image), atol=1e-4)


def test_cutmix_pastes_a_rectangle_and_counts_its_pixels() -> None:
    torch.manual_seed(0)
    mixed = mix(image := images(256), 0.0, 1.0)
    own, pasted = mixed.image == image, mixed.image == image[mixed.other]
    assert bool((own | pasted).all())
    assert torch.allclose(mixed.fraction, own.float().mean((1, 2, 3)))
    assert bool((mixed.fraction < 0.5).any() and (mixed.fraction > 0.5).any())
    for pixels in pasted[:, 0]:
        rows, columns = pixels.any(1), pixels.any(0)
        assert torch.equal(pixels, rows[:, None] & columns[None]), "not a rectangle"
        assert int(rows.int().diff().abs().sum()) <= 2, "not in one piece"


def classification(regularization: dict[str, float]) -> Any:
    return Classification(DataConfig(), ModelConfig(), RegularizationConfig(**regularization), 0)


def constant(logits: torch.Tensor) -> Any:
    """A model that gives the same logits for every image."""
    return lambda image: logits.expand(len(image), -1)


def batch_of(label: torch.Tensor, weight: torch.Tensor | None = None) -> Batch:
    image = torch.zeros(len(label), 1, 8, 8, dtype=torch.uint8)
    return Batch({"image": image, "label": label}, weight, None, len(label))


def test_the_loss_is_that_of_the_mixed_target() -> None:
    torch.manual_seed(0)
    label, logits = torch.randint(10, (32,)), torch.randn(10)
    torch.manual_seed(1)
    loss = classification({"mixup": 0.5, "label_smoothing": 0.1}).loss(constant(logits), batch_of(label))
    torch.manual_seed(1)
    mixed = mix(torch.zeros(32, 1, 8, 8), 0.5, 0.0)
    hot = F.one_hot(label, 10).float()
    target = mixed.fraction[:, None] * hot + (1 - mixed.fraction[:, None]) * hot[mixed.other]
    target = 0.9 * target + 0.01
    wanted = -(target * F.log_softmax(logits, 0)).sum()
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)


def test_what_is_measured_is_neither_smoothed_nor_padding() -> None:
    batch, logits = batch_of(torch.tensor([2, 3, 2]), torch.tensor([1.0, 1.0, 0.0])), torch.arange(10.0)
    logits[2] = 20.0
    measured = classification({"mixup": 0.5, "label_smoothing": 0.1}).measure(constant(logits), batch)
    assert int(measured["accuracy"]) == 1
    wanted = -F.log_softmax(logits, 0)[[2, 3]].sum()
    assert float(measured["loss"]) == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize(
    ("data", "regularization", "names"),
    [
        ({"last_batch": "weighted"}, {"cutmix": 0.2}, "data.last_batch=cross"),
        ({"micro_batch_size": 1}, {"mixup": 0.2}, "regularization.mixup"),
    ],
    ids=["padding", "a micro-batch of one"],
)
def test_padding_is_never_mixed_into_samples(data: Any, regularization: Any, names: str) -> None:
    with refused(names):
        validated(Recipe, {"epochs": 1, "data": data, "regularization": regularization}, "mine")


@pytest.mark.parametrize("name", ["small_resnet", "resnet18", "vit_b_32", "convnext_tiny"])
def test_stochastic_depth_reaches_the_branches_of_known_models(name: str) -> None:
    """Without branches nothing is left of a sample's image but what the shortcuts carry."""
    with torch.device("meta"):
        model = build_model(ModelConfig(name=name, blocks=(2, 2)), 3, 10)
    names = set(model.state_dict())
    own: list[Any] = [m for m in model.modules() if type(m).__name__ == "StochasticDepth"]
    torchvisions = [m.p for m in own]
    add_stochastic_depth(model, 0.5)
    assert set(model.state_dict()) == names
    hooked = [m for m in model.modules() if m._forward_hooks]
    assert bool(hooked) != bool(own)
    if own:
        assert own[-1].p == 0.5 and own[0].p == torchvisions[0] == 0
        assert [m.p for m in own] == pytest.approx([0.5 * p / torchvisions[-1] for p in torchvisions])
    else:
        hooks = [next(iter(m._forward_hooks.values())) for m in hooked]
        drops = [hook.args[0] for hook in hooks if isinstance(hook, functools.partial)]
        assert drops == sorted(drops)
        assert (drops[-1], drops[0]) == (0.5, pytest.approx(0.5 / len(blocks(model))))


def test_a_model_without_known_branches_is_refused() -> None:
    with refused("blocks"):
        add_stochastic_depth(nn.Sequential(nn.Linear(2, 2)), 0.1)


def test_a_branch_is_left_out_for_some_samples_and_scaled_for_the_others() -> None:
    torch.manual_seed(0)
    model = build_model(ModelConfig(width=4, blocks=(1,), norm="group"), 1, 10)
    block = model.get_submodule("blocks.0")
    x = torch.randn(1, 4, 8, 8).expand(4000, 4, 8, 8)
    with torch.no_grad():
        whole = block(x[:1])
        shortcut = torch.relu(block.get_submodule("norm1")(x[:1]))
        add_stochastic_depth(model, 0.25)
        model.train()
        dropped = block(x)
        left_out = (dropped == shortcut).flatten(1).all(1)
        assert float(left_out.float().mean()) == pytest.approx(0.25, abs=0.03)
        kept = shortcut + (whole - shortcut) / 0.75
        assert torch.allclose(dropped[~left_out], kept.expand_as(dropped[~left_out]), atol=1e-5)
        model.eval()
        assert torch.equal(block(x[:1]), whole)


def test_with_both_half_of_the_images_get_either() -> None:
    torch.manual_seed(0)
    mixed = mix(images(4000), 1.0, 1.0)
    flat = mixed.image.flatten(1)
    uniform = (flat == flat[:, :1]).all(1) & (mixed.fraction < 1) & (mixed.fraction > 0)
    assert float(uniform.float().mean()) == pytest.approx(0.5, abs=0.05)


def test_padding_counts_for_nothing_when_mixed() -> None:
    batch = batch_of(torch.tensor([1, 2, 3]), torch.tensor([1.0, 1.0, 0.0]))
    torch.manual_seed(0)
    loss = classification({"mixup": 1.0}).loss(constant(torch.zeros(10)), batch)
    assert float(loss) == pytest.approx(2 * torch.tensor(10.0).log().item(), rel=1e-6)
