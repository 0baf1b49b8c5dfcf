"""Promise: a model is built by its name, wherever it comes from; a name that there isn't is said."""

from typing import Any

import pytest
import torch
import torchvision

from tests.helpers.libraries import require
from trainer.config.model import ModelConfig
from trainer.models.images import build_model


def test_timms_models_take_these_images() -> None:
    require("timm")
    model = build_model(ModelConfig(name="timm/resnet10t"), 1, 7).eval()
    assert model(torch.zeros(2, 1, 64, 64)).shape == (2, 7)


# timm's names for what torchvision's vision transformer has.
_OF_TIMM = {
    "class_token": "cls_token",
    "encoder.pos_embedding": "pos_embed",
    "conv_proj": "patch_embed.proj",
    "encoder.layers.encoder_layer_": "blocks.",
    "encoder.ln.": "norm.",
    "ln_1": "norm1",
    "ln_2": "norm2",
    "self_attention.in_proj_": "attn.qkv.",
    "self_attention.out_proj": "attn.proj",
    "mlp.0": "mlp.fc1",
    "mlp.3": "mlp.fc2",
    "heads.head": "head",
}


def test_vit_small_computes_what_timms_does_with_the_same_weights() -> None:
    require("timm")
    theirs = build_model(ModelConfig(name="timm/vit_small_patch16_224"), 3, 10).eval()
    with torch.device("meta"):
        model: Any = build_model(ModelConfig(name="vit_small"), 3, 10)
    weights = {}
    for name in model.state_dict():
        known = name
        for ours, timms in _OF_TIMM.items():
            known = known.replace(ours, timms)
        weights[name] = torch.randn_like(theirs.state_dict()[known]) / 20
        theirs.state_dict()[known].copy_(weights[name])
    assert len(weights) == len(theirs.state_dict())
    model.load_state_dict(weights, assign=True)
    image = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.allclose(model.eval()(image), theirs(image), rtol=1e-3, atol=1e-4)


def test_vit_small_has_the_published_size_and_begins_as_torchvisions() -> None:
    """Of the heads torchvision's ViTs begin with zeros, as big_vision's; positions are normal with 0.02."""
    model: Any = build_model(ModelConfig(name="vit_small"), 3, 1000)
    assert sum(p.numel() for p in model.parameters()) == 22_050_664
    assert not model.heads.head.weight.any() and not model.class_token.any()
    assert model.encoder.pos_embedding.std().item() == pytest.approx(0.02, rel=0.02)
    assert {part.eps for part in model.modules() if isinstance(part, torch.nn.LayerNorm)} == {1e-6}


@pytest.mark.parametrize(
    "name",
    [
        "resnet50",
        "convnext_tiny",
    ],
)
def test_a_model_of_torchvision_is_as_torchvision_makes_it(name: str) -> None:
    """No default of its own stands between: eps, momentum, dropout, stochastic depth."""
    with torch.device("meta"):
        ours, theirs = (
            build_model(ModelConfig(name=name), 3, 10),
            torchvision.models.get_model(name, num_classes=10),
        )
    assert repr(ours) == repr(theirs)
