"""Promise: no model is trained on a CPU with the convolution whose gradient overruns its memory in oneDNN."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.toys import build_alone
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override, read_recipe
from trainer.models.pointwise import mend_pointwise
from trainer.train.components.operations import blank_batch
from trainer.train.components.task import make_task


class Convolutions(TorchDispatchMode):
    """Records each convolution: shape of its weight, and its strides."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[torch.Size, list[int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.seen.append((args[1].shape, args[3]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", ["digits-detection", "digits"])
def test_no_strided_convolution_of_few_channels_and_a_1x1_kernel_is_left(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the forward pass is looked at: the backward pass of such a one may end this process."""
    monkeypatch.setattr("trainer.data.builtin.boxes.TRAIN", 16)
    monkeypatch.setattr("trainer.data.builtin.boxes.TEST", 4)
    small = ["model.width=8", "data.micro_batch_size=2", "ema.decay=0.9", "parallel.threads=1"]
    chosen = Recipe.model_validate(override(read_recipe(recipe), small))
    task = make_task(chosen)
    run = build_alone(chosen, task)
    convolutions = Convolutions()
    with convolutions:
        task.loss(run.state.model, blank_batch(task, 2, torch.device("cpu")))
    assert sum(shape[2:] == (1, 1) for shape, _ in convolutions.seen), "a shortcut is there"
    assert not [each for each in convolutions.seen if each[0][2:] == (1, 1) and max(each[1]) > 1]


@pytest.mark.compat
@pytest.mark.parametrize(("stride", "groups"), [(2, 1), ((1, 3), 2)])
def test_it_gives_the_same_and_so_does_a_copy_of_it_by_its_own_weights(stride: Any, groups: int) -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(4, 6, 1, stride, groups=groups).double()  # which oneDNN doesn't compute
    mended = nn.Sequential(copy.deepcopy(plain))
    mend_pointwise(mended)
    again = copy.deepcopy(mended)
    image = torch.randn(2, 4, 7, 9, dtype=torch.float64)
    found = []
    for model in (plain, mended, again):
        result = model(image)
        found.append([result, *torch.autograd.grad(result.square().sum(), [*model.parameters()])])
    torch.testing.assert_close(found[1:], found[:1] * 2)
    nn.init.zeros_(again.get_parameter("0.weight"))
    nn.init.ones_(again.get_parameter("0.bias"))
    assert bool((again(image) == 1).all()) and torch.equal(mended(image), found[1][0])
    assert mended.state_dict().keys() == {"0.weight", "0.bias"}
