"""Promise: BatchNorm is folded into the layer before it where that computes the same, and stays elsewhere."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from trainer.models.export.fold import fold_batchnorm


def _random_norm(kind: type[Any], width: int, affine: bool, eps: float) -> Any:
    norm = kind(width, affine=affine, eps=eps).double()
    norm.running_mean.normal_()
    norm.running_var.copy_(torch.rand(width, dtype=torch.float64) + 1e-4)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm


@given(
    kind=st.sampled_from(["1d", "2d", "3d", "linear"]),
    groups=st.integers(1, 3),
    width=st.integers(1, 3),
    bias=st.booleans(),
    affine=st.booleans(),
    eps=st.sampled_from([1e-5, 1e-3, 0.5]),
    stride=st.integers(1, 2),
    padding=st.sampled_from(["zeros", "reflect"]),
    seed=st.integers(0, 1 << 30),
)
def test_a_folded_model_computes_the_same(
    kind: str,
    groups: int,
    width: int,
    bias: bool,
    affine: bool,
    eps: float,
    stride: int,
    padding: Any,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    source, target = 2 * groups, width * groups
    layer: nn.Module
    if kind == "linear":
        layer, norm = nn.Linear(source, target, bias), _random_norm(nn.BatchNorm1d, target, affine, eps)
        x = torch.randn(3, source, dtype=torch.float64)
    else:
        dims = int(kind[0])
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        layer = conv(source, target, 3, stride, 1, groups=groups, bias=bias, padding_mode=padding)
        norm = _random_norm((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1], target, affine, eps)
        x = torch.randn(3, source, *[5] * dims, dtype=torch.float64)
    model = nn.Sequential(layer.double(), norm, nn.ReLU()).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        wanted = model(x)
        fold = fold_batchnorm(model, (x,))
        assert fold.names == ("1",)
        assert fold.kept == 0
        torch.testing.assert_close(fold.model(x), wanted, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class _Twice(nn.Module):
    """The output of the convolution is taken by BatchNorm and by the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        result: torch.Tensor = self.norm(y) + y
        return result


class _CalledTwice(_Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.conv(self.conv(x)))
        return result


class _NormCalledTwice(_Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(torch.relu(self.norm(self.conv(x))))
        return result


class _WeightRead(_Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.conv(x)) * self.conv.weight.sum()
        return result


class _Between(_Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(torch.relu(self.conv(x)))
        return result


class _Decides(_Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.conv(x))
        return y if y.sum() > 0 else -y


class _Aliased(_Twice):
    """One convolution under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.other = self.conv

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.conv(x)) + self.other(x)
        return result


class _OverLength(nn.Module):
    """(n, length, channels): BatchNorm takes the length for its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.conv(x.flatten(2)[:, :, :2]))
        return result


def _plain() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))


def _hooked() -> nn.Module:
    model = _plain()
    model[0].register_forward_hook(lambda _m, _i, output: output * 2)  # type: ignore[index]
    return model


def _without_statistics() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2, track_running_stats=False))


def _training() -> nn.Module:
    model = _plain().eval()
    model[1].train()  # type: ignore[index]
    return model


def _overridden() -> nn.Module:
    model = _plain()
    forward = model[0].forward  # type: ignore[index]
    model[0].forward = lambda x: forward(x).sigmoid()  # type: ignore[index]
    return model


@pytest.mark.parametrize(
    "make",
    [
        *(_Twice, _CalledTwice, _NormCalledTwice, _WeightRead, _Between, _Decides, _Aliased, _OverLength),
        *(_hooked, _without_statistics, _training, _overridden),
    ],
)
def test_what_isnt_one_affine_map_stays(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    if make is not _training:
        model.eval()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d) and norm.running_mean is not None:
            norm.running_mean.fill_(0.5)
    x = torch.randn(3, 2, 4, 4)
    with torch.no_grad():
        fold = fold_batchnorm(model, (x,))
        torch.testing.assert_close(fold.model(x), model(x))
    assert fold.names == ()
    assert fold.kept == 1
    assert bool(fold.why) == (make is _Decides)
