"""Promise: DDP's settings change how gradients are sent, not their values; BatchNorm can span ranks."""

import copy
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import nn

from tests.helpers.digits_steps import DIGITS, train_digits
from tests.helpers.refusals import refused
from tests.helpers.steps import ALONE, assert_same_bits
from tests.helpers.world import Ranks
from trainer.config.training import ParallelConfig
from trainer.distributed import parallel
from trainer.distributed.parallel import World, replicate
from trainer.models.batchnorm import StepStatistics, synchronize_batchnorm

pytestmark = pytest.mark.compat


def reduced_gradients(world: World, compress: Literal["none", "bf16"]) -> list[torch.Tensor]:
    """Gradient of a linear layer whose right value is the sum of what each rank contributes, and that."""
    assert world.group is not None
    model = nn.Linear(64, 64, bias=False)
    nn.init.zeros_(model.weight)
    replica = replicate(model, world.group, ParallelConfig(compress=compress))
    torch.manual_seed(world.rank)
    x = torch.randn(8, 64)
    replica(x).square().sum().backward()  # zero: the weights are
    target = torch.randn(8, 64)
    model.zero_grad(set_to_none=False)
    (replica(x) * target).sum().backward()
    assert model.weight.grad is not None
    return [model.weight.grad.clone(), target.T @ x]


def test_compressed_gradients_are_the_sum_of_rounded_ones(ranks: Ranks) -> None:
    """Half the bytes: each rank's share is rounded to bfloat16, and so is the sum; nothing is divided."""
    exact = ranks.run(2, reduced_gradients, "none")
    rounded = ranks.run(2, reduced_gradients, "bf16")
    right = torch.stack([own for _, own in exact]).sum(0)
    assert torch.allclose(exact[0][0], right, atol=1e-4)
    assert torch.equal(rounded[0][0], rounded[1][0])
    assert torch.equal(rounded[0][0], rounded[0][0].bfloat16().float()), "not what travelled in bfloat16"
    error = (rounded[0][0] - right).abs().max() / right.abs().max()
    assert 1e-6 < float(error) < 2 * 2**-8


def normalized(world: World, shape: tuple[int, ...], steps: int) -> dict[str, Any]:
    """Output, gradients and running statistics on one rank: synchronized, or torch's own on all samples."""
    torch.manual_seed(1)
    layer = (nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d)(shape[1], momentum=0.3).double()
    nn.init.normal_(layer.weight)
    if world.group is not None:
        assert synchronize_batchnorm(layer, world.group) == 1
        statistics = StepStatistics(layer, world.group)
    per_rank = shape[0] // world.size
    for _ in range(steps):
        both = torch.randn(2, *shape, dtype=torch.float64)
        mine, weights = both[:, world.rank * per_rank :][:, :per_rank]
        output = layer(mine := mine.clone().requires_grad_())
        layer.zero_grad()
        (output * weights).sum().backward()
        if world.group is not None:
            statistics.add(statistics.of_micro_batch())
            statistics.end_step()
    assert mine.grad is not None
    parameters, state = [p.grad for p in layer.parameters()], layer.state_dict()
    return {"output": output.detach(), "input": mine.grad, "parameters": parameters, "state": state}


@pytest.mark.parametrize(("size", "shape"), [(4, (8, 3)), (2, (8, 3, 4, 5))])
def test_synchronized_batchnorm_is_batchnorm_of_all_ranks_samples(
    ranks: Ranks, size: int, shape: Any
) -> None:
    answers, right = ranks.run(size, normalized, shape, 3), normalized(ALONE, shape, 3)
    near: Any = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-12)
    for part in ("output", "input"):
        near(torch.cat([answer[part] for answer in answers]), right[part])
    for number, gradient in enumerate(right["parameters"]):
        near(torch.stack([answer["parameters"][number] for answer in answers]).sum(0), gradient)
    near([answer["state"] for answer in answers], [right["state"]] * size)


def low_precision(world: World) -> list[torch.Tensor]:
    assert world.group is not None
    layer = nn.BatchNorm1d(3)
    synchronize_batchnorm(layer, world.group)
    torch.manual_seed(world.rank)
    x = (torch.randn(64, 3) * 100 + 1000).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    assert layer.running_mean is not None
    return [x.float(), output.detach(), layer.running_mean]


def test_statistics_of_low_precision_input_are_in_fp32(ranks: Ranks) -> None:
    answers = ranks.run(2, low_precision)
    x = torch.cat([x for x, _, _ in answers])
    for own, output, mean in answers:
        assert output.dtype == torch.bfloat16
        right = (own - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()
        assert torch.allclose(output.float(), right, atol=0.02)
        assert torch.allclose(mean, 0.1 * x.mean(0), rtol=1e-5)


def copied(world: World) -> bool:
    model = nn.Sequential(nn.BatchNorm1d(2))
    assert world.group is not None
    synchronize_batchnorm(model, world.group)
    twin = copy.deepcopy(model)
    twin.load_state_dict({**twin.state_dict(), "0.weight": torch.tensor([2.0, 2.0])})
    twin.eval()
    return bool((twin(torch.ones(1, 2)) > 1.5).all())


def test_a_copy_uses_its_own_weights(ranks: Ranks) -> None:
    assert ranks.run(2, copied) == [True, True]


@pytest.mark.parametrize("port", ["x", "29500000"])
def test_ranks_that_have_no_place_to_meet_are_one_line(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": port}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with refused("MASTER_ADDR a MASTER_PORT", port), parallel.joined_world("cpu", 60):
        pass


def test_two_ranks_with_it_train_like_one_with_the_whole_batch(ranks: Ranks) -> None:
    """That is what separate statistics don't do: there a micro-batch is normalized by itself."""
    small = DIGITS | {
        "data": DIGITS["data"] | {"micro_batch_size": 32},
        "parallel": {"threads": 1, "sync_batchnorm": True},
        "memory": {"checkpointing": "blocks"},
    }
    whole = DIGITS | {"data": DIGITS["data"] | {"micro_batch_size": 64}}
    together = ranks.run(2, train_digits, small, 0)
    (expected, _, weights), *_ = ranks.run(1, train_digits, whole, 0)
    losses = torch.tensor([losses for losses, _, _ in together]).sum(0)
    assert torch.allclose(losses, torch.tensor(expected), rtol=1e-4)
    separate = ranks.run(2, train_digits, small | {"parallel": {"threads": 1}}, 0)
    different = torch.tensor([losses for losses, _, _ in separate]).sum(0)
    assert not torch.allclose(different, torch.tensor(expected), rtol=1e-4)
    assert_same_bits(together[1][2], together[0][2])
    torch.testing.assert_close(together[0][2], weights, rtol=1e-2, atol=2e-3)
