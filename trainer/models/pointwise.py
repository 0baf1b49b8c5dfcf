"""Workaround for a oneDNN fault in strided 1 x 1 convolutions on a CPU."""

import functools

import torch
from torch import nn
from torch.nn import functional as F

_BLOCK = 16  # channels in a block of oneDNN with AVX-512; 8 with AVX2


def mend_pointwise(model: nn.Module) -> None:
    """Makes strided 1 x 1 convolutions of few channels subsample their input first, in place; names stay.

    With fewer channels than a block and in channels-last format, oneDNN's weight gradient of such a layer
    writes past its workspace on a CPU: a crash, or wrong gradients
    (https://github.com/uxlfoundation/oneDNN/issues/6035, seen with torch 2.9.1). An image of one channel is
    channels-last and contiguous at once, so this happens without `model.channels_last`, too.
    """
    for layer in model.modules():
        if (
            isinstance(layer, nn.Conv2d)
            and layer.kernel_size == (1, 1)
            and layer.stride != (1, 1)
            and layer.padding in ((0, 0), "valid")
            and layer.in_channels < _BLOCK * layer.groups
        ):
            # A partial, not a closure: deepcopy binds it to the copy.
            layer._conv_forward = functools.partial(_sampled, layer)  # type: ignore[method-assign]


def _sampled(
    layer: nn.Conv2d, image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    if image.device.type != "cpu":
        result: torch.Tensor = nn.Conv2d._conv_forward(layer, image, weight, bias)
        return result
    down, right = layer.stride
    return F.conv2d(image[..., ::down, ::right], weight, bias, groups=layer.groups)
