"""Promise: a model is built by its name, wherever it comes from; a name that there isn't is said."""

import builtins
from typing import Any

import pytest
import torch

from tests.helpers.libraries import require
from trainer.config.model import ModelConfig
from trainer.errors import BadInputError
from trainer.models.images import build_model


@pytest.mark.parametrize(("channels", "classes"), [(3, 10), (1, 7)])
def test_timms_models_take_these_images(channels: int, classes: int) -> None:
    require("timm")
    model = build_model(ModelConfig(name="timm/resnet10t"), channels, classes).eval()
    assert model(torch.zeros(2, channels, 64, 64)).shape == (2, classes)


def test_what_timm_lacks_is_said() -> None:
    require("timm")
    with pytest.raises(BadInputError, match="timm has no model 'resnet10x'; did you mean"):
        build_model(ModelConfig(name="timm/resnet10x"), 3, 10)


def test_without_timm_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    original: Any = builtins.__import__

    def without(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "timm":
            raise ImportError(name)
        return original(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BadInputError, match="timm is not installed; run make venv"):
        build_model(ModelConfig(name="timm/resnet10t"), 3, 10)


def test_vit_small_is_the_published_size() -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(name="vit_small"), 3, 1000)
    assert sum(p.numel() for p in model.parameters()) == 22_050_664
