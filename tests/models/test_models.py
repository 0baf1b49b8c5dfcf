"""Promise: a model is built by its name, wherever it comes from; a name that there isn't is said."""

from typing import Any

import pytest
import torch
import torchvision

from trainer.config.model import ModelConfig
from trainer.models.images import build_model


def test_timms_models_take_these_images() -> None:
    pytest.importorskip("timm")
    model = build_model(ModelConfig(name="timm/resnet10t"), 1, 7).eval()
    assert model(torch.zeros(2, 1, 64, 64)).shape == (2, 7)


def test_vit_small_has_the_published_size_and_begins_as_torchvisions() -> None:
    """Of the heads torchvision's ViTs begin with zeros, as big_vision's; positions are normal with 0.02."""
    model: Any = build_model(ModelConfig(name="vit_small"), 3, 1000)
    assert sum(p.numel() for p in model.parameters()) == 22_050_664
    assert not model.heads.head.weight.any() and not model.class_token.any()
    assert model.encoder.pos_embedding.std().item() == pytest.approx(0.02, rel=0.02)
    assert {part.eps for part in model.modules() if isinstance(part, torch.nn.LayerNorm)} == {1e-6}


@pytest.mark.parametrize("name", ["resnet50", "convnext_tiny"])
def test_a_model_of_torchvision_is_as_torchvision_makes_it(name: str) -> None:
    """No default of its own stands between: eps, momentum, dropout, stochastic depth."""
    with torch.device("meta"):
        ours = build_model(ModelConfig(name=name), 3, 10)
        theirs = torchvision.models.get_model(name, num_classes=10)
    assert repr(ours) == repr(theirs)
