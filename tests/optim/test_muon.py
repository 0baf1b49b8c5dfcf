"""Promise: Muon's update is the published one, is skipped on the device, and learns."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F
from torch.testing import assert_close

from benchmarks.optimizers import PatchTransformer
from tests.helpers.counting import counting, of
from tests.helpers.refusals import refused
from trainer.config.model import ModelConfig
from trainer.config.training import OptimConfig
from trainer.models.images import SmallResNet, build_model
from trainer.optim.muon import Muon, hidden_matrices
from trainer.optim.optimizers import LRScheduler, layer_factors, make_optimizer, parameter_groups

pytestmark = pytest.mark.compat
CPU = torch.device("cpu")
RATE, BETA, DECAY = 0.02, 0.9, 0.1


class Net(nn.Module):
    """A first and a last layer, and between them kernels and matrices, wide and tall, two of a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.wide = nn.Conv2d(4, 4, 3, padding=1)
        # Without biases: their gradients would be rounding noise, because the norm takes them out again.
        self.alike = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.tall = nn.Conv2d(4, 10, 1, bias=False)
        self.norm = nn.BatchNorm2d(10)
        self.inner = nn.Linear(10, 7)
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.alike(torch.tanh(self.wide(torch.tanh(self.stem(x)))))
        logits: torch.Tensor = self.head(torch.tanh(self.inner(self.norm(self.tall(x)).mean((2, 3)))))
        return logits


def make_net(layout: torch.memory_format = torch.contiguous_format) -> tuple[Net, Muon]:
    torch.manual_seed(0)
    net = Net().to(memory_format=layout)  # type: ignore[call-overload]
    config = OptimConfig(name="muon", momentum=BETA, weight_decay=DECAY)
    optimizer = make_optimizer(config, parameter_groups(config, net), LRScheduler([RATE], CPU))
    assert isinstance(optimizer, Muon)
    return net, optimizer


def loss_of(net: nn.Module, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    image = torch.randn(8, 1, 6, 6, generator=generator)
    return F.cross_entropy(net(image), torch.randint(0, 3, (8,), generator=generator))


def contents(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    slots = [slot for state in optimizer.state.values() for slot in state.values()]
    return [tensor.detach().clone() for tensor in (*net.parameters(), *slots)]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def by_the_book(before: list[torch.Tensor], gradient: torch.Tensor) -> list[torch.Tensor]:
    """One update of a matrix and its momentum, one line for each line of the papers; float64."""
    weight, momentum = before[0], BETA * before[1] + gradient
    x = (gradient + BETA * momentum).flatten(1)
    rows, columns = x.shape
    x = x / x.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    step = 0.2 * max(rows, columns) ** 0.5 * x.view(weight.shape)
    return [weight - RATE * (step + DECAY * weight), momentum]


def test_the_update_is_the_published_one() -> None:
    net, optimizer = make_net()
    hidden = hidden_matrices(net)
    others = [p for p in net.parameters() if all(p is not h for h in hidden)]
    expected = [[h.detach().double(), torch.zeros_like(h).double()] for h in hidden]
    twin = copy.deepcopy(others)
    groups = [
        {"params": [p for p in twin if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in twin if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=RATE, fused=True)
    for number in range(5):
        optimizer.zero_grad()
        loss_of(net, number).backward()
        for index, parameter in enumerate(hidden):
            assert parameter.grad is not None
            expected[index] = by_the_book(expected[index], parameter.grad.double())
        for theirs, ours in zip(twin, others, strict=True):
            theirs.grad = None if ours.grad is None else ours.grad.clone()
        optimizer.step()
        adamw.step()
    for parameter, (value, _) in zip(hidden, expected, strict=True):
        assert torch.allclose(parameter.double(), value, atol=2e-4), parameter.shape
    assert_close(others, twin, rtol=1e-5, atol=1e-5)


def test_hidden_matrices_are_those_between_the_ends() -> None:
    def names(model: nn.Module) -> set[str]:
        chosen = {id(p) for p in hidden_matrices(model)}
        return {name for name, p in model.named_parameters() if id(p) in chosen}

    assert names(Net()) == {"wide.weight", "alike.weight", "tall.weight", "inner.weight"}
    resnet = SmallResNet(ModelConfig(width=4, blocks=(1, 1)), 3, 5)
    blocks = {name for name, p in resnet.blocks.named_parameters(prefix="blocks") if p.ndim >= 2}
    assert names(resnet) == blocks
    layer = {"self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"}
    assert names(PatchTransformer()) == {f"layers.layers.{i}.{name}" for i in (0, 1) for name in layer}
    words = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False))
    assert names(words) == {"1.weight"}
    words[2].weight = words[0].weight
    assert names(words) == {"1.weight"}
    assert names(nn.Linear(3, 3)) == set()
    frozen = Net()
    frozen.wide.requires_grad_(False)
    assert names(frozen) == {"alike.weight", "tall.weight", "inner.weight"}


@pytest.mark.parametrize("unscaled_before", [True, False])
def test_an_overflow_moves_nothing(unscaled_before: bool) -> None:
    net, optimizer = make_net()
    scaler = GradScaler("cpu", init_scale=64.0)

    def step(number: int, factor: float) -> list[torch.Tensor]:
        optimizer.zero_grad()
        scaler.scale(loss_of(net, number) * factor).backward()
        if unscaled_before:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return contents(net, optimizer)

    start = contents(net, optimizer)
    assert same(start, step(0, float("inf"))), "with the very first update skipped"
    before = step(1, 1.0)
    assert not same(start, before)
    assert same(before, step(2, float("inf")))
    assert same(before, step(3, float("nan")))
    after = step(4, 1.0)
    assert all(bool(tensor.isfinite().all()) for tensor in after)
    steps = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
    assert set(steps) == {2.0}


def test_the_host_reads_nothing() -> None:
    net, optimizer = make_net()
    loss_of(net, 0).backward()
    fields: Any = optimizer
    seen = Counter[str]()
    for scaled in (False, True):
        if scaled:
            fields.grad_scale, fields.found_inf = torch.tensor(2.0), torch.tensor(0.0)
        with counting(seen):
            optimizer.step()
    assert seen and not of(seen, "waits aten") and not any("_to_copy" in name for name in seen), seen
    with counting(seen):
        float(fields.found_inf)
    assert of(seen, "waits aten")


def test_neither_a_loss_scale_nor_the_layout_in_memory_matters() -> None:
    results = []
    for scale, layout in ((1.0, torch.contiguous_format), (1024.0, torch.channels_last)):
        net, optimizer = make_net(layout)
        scaler = GradScaler("cpu", init_scale=scale, enabled=scale > 1)
        for number in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(net, number)).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(contents(net, optimizer))
    assert net.wide.weight.is_contiguous(memory_format=torch.channels_last)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*results, strict=True))


def test_parameters_without_a_gradient_stay_and_a_closure_is_called() -> None:
    net, optimizer = make_net()
    frozen: list[torch.Tensor] = [*net.wide.parameters(), *net.norm.parameters()]
    before = [p.requires_grad_(False).clone() for p in frozen]

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(net, 0)
        loss.backward()
        return loss.detach()

    losses: list[Any] = [optimizer.step(closure) for _ in range(6)]
    assert losses[-1] < losses[0] and same(before, frozen)


def test_a_model_without_hidden_matrices_is_refused() -> None:
    with refused("matrices"):
        parameter_groups(OptimConfig(name="muon"), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def test_groups_keep_their_rates_and_decay_when_split() -> None:
    config = OptimConfig(name="muon", layer_decay=0.5, weight_decay=0.1)
    model = build_model(ModelConfig(width=4, blocks=(1, 1)), 1, 10)
    factors = layer_factors(model, 0.5)
    names = {id(p): name for name, p in model.named_parameters()}
    matrices = {id(p) for p in hidden_matrices(model)}
    groups, own = parameter_groups(config, model), ("factor", "orthogonal", "weight_decay")
    found = [(names[id(p)], *(group[key] for key in own)) for group in groups for p in group["params"]]
    wanted = [
        (name, factors[name], id(p) in matrices, 0.1 * (p.ndim >= 2)) for name, p in model.named_parameters()
    ]
    assert sorted(found) == sorted(wanted)
