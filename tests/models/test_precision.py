"""Promise: AMP does what it should, also when it overflows, and no update is counted that wasn't made."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers.refusals import named, refused
from trainer.config.model import ModelConfig, PrecisionConfig
from trainer.models.images import build_model
from trainer.models.nonfinite import FirstNonFinite
from trainer.models.precision import check_precision, fp32_modules, gathered_in, keep_in_fp32, set_matmul_mode
from trainer.tasks.augment import affine

pytestmark = pytest.mark.compat


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
        assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
    finally:
        set_matmul_mode(PrecisionConfig(mode="fp32"))
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cudnn.allow_tf32
    with refused("precision.mode=tf32"):
        check_precision(PrecisionConfig(mode="tf32"), torch.device("cpu"))


def test_modules_that_were_named_compute_in_fp32() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parts = OrderedDict(first=nn.Linear(2, 2), inner=inner, last=nn.Linear(2, 2))
    model, seen = nn.Sequential(parts), list[torch.dtype]()
    for layer in (parts["first"], *inner, parts["last"]):
        layer.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    names = list(model.state_dict())
    keep_in_fp32(fp32_modules(model, ["inner", "l*st"]).values(), torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        output = model(torch.randn(3, 2))
    assert seen == [torch.bfloat16, torch.float32, torch.float32, torch.float32]
    output.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert list(model.state_dict()) == names


def test_what_nobody_calls_cannot_be_kept_in_fp32() -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(name="vit_b_32"), 3, 10)
    attention = "encoder.layers.encoder_layer_0.self_attention"
    with refused("precision.keep_fp32", f"{attention}.out_proj"):
        fp32_modules(model, [f"{attention}.out_proj"])
    assert list(fp32_modules(model, [f"{attention}*"])) == [attention], "kept with what reads it"


class Breaking(nn.Module):
    """Gives an infinity (or only an infinite gradient) in one of its modules, or between them."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.one, self.two, self.three = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x) * (1e30 if self.where == "module" else 1)
        x = self.three(self.two(x))
        return x.half() if self.where == "backward" else x


@pytest.mark.parametrize(
    ("where", "place"),
    [
        ("module", "output of two"),
        ("backward", "gradient of the output of the model"),
        ("weights", "weights of two"),
        ("nowhere", None),
    ],
)
def test_the_first_that_is_not_finite_is_named(
    where: str, place: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Breaking(where)
    nn.init.constant_(model.two.weight, 1e30 if where == "module" else 0.1)
    watched = FirstNonFinite(model, torch.device("cpu"), None)
    if where == "weights":
        nn.init.constant_(model.two.bias, float("nan"))
    output = model(torch.ones(4, 2))
    (output.float() * 1e6).sum().backward()
    watched.end_step(6)
    watched.end_step(7)
    watched.name_first({"kind": "train", "step": 9, **{n: float(v) for n, v in watched.take().items()}})
    error = capsys.readouterr().err
    if place is None:
        assert not error
    else:
        assert named(error, f"7 {place}")
    assert float(watched.take()["nonfinite_place"]) == -1, "each row starts anew"


def test_what_a_sharded_model_is_gathered_in() -> None:
    devices, low = (torch.device("cpu"), torch.device("cuda")), PrecisionConfig(mode="bf16")
    for norm, wanted in (
        (nn.BatchNorm1d(4), [None, None]),
        (nn.LayerNorm(4), [None, torch.bfloat16]),
        (nn.RMSNorm(4), [torch.bfloat16, torch.bfloat16]),
    ):
        model = nn.Sequential(nn.Linear(4, 4), norm)
        assert [gathered_in(low, model, device) for device in devices] == wanted
        assert [gathered_in(PrecisionConfig(), model, device) for device in devices] == [None, None]
