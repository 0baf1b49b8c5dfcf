"""Promise: activation checkpointing, memory formats and BatchNorm change no result."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.refusals import named, refused
from tests.helpers.small_task import Small
from tests.helpers.steps import ALONE, assert_same_bits
from tests.helpers.toys import SMALL, build_alone, make_recipe, run_steps
from trainer.config.model import MemoryConfig, ModelConfig
from trainer.errors import BadInputError
from trainer.host.memory_room import Room
from trainer.models.activation_checkpointing import blocks, candidates, recompute
from trainer.models.activations import KeptBytes, measure
from trainer.models.images import build_model
from trainer.tasks.custom import CustomTask
from trainer.train.components.memory import memory_to_come, too_much
from trainer.train.components.operations import blank_batch
from trainer.train.components.task import make_task

pytestmark = pytest.mark.compat


def train(**sections: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    recipe = make_recipe(**{**SMALL, **sections})
    run = build_alone(recipe, make_task(recipe))
    return run_steps(run), run.state.model.state_dict()


def test_checkpointing_changes_no_bit_with_dropout_and_batchnorm() -> None:
    """Dropout draws the same in the recomputation, running statistics are counted once."""
    assert_same_bits(train(memory={"checkpointing": "blocks"}), train())


@pytest.mark.parametrize(("name", "count"), [("resnet18", 8), ("convnext_tiny", 18)])
def test_blocks_are_the_repeated_parts(name: str, count: int) -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(name=name), 3, 10)
    found = blocks(model)
    inside = {p: p.numel() for block in found.values() for p in block.parameters()}
    assert len(found) >= count and sum(inside.values()) > 0.75 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("config", "chosen"),
    [
        ({"checkpointing": "blocks"}, ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
        ({"checkpointing": "blocks", "every": 2}, ["blocks.0", "blocks.2"]),
        ({"checkpointing": "names", "names": ("blocks.1", "head")}, ["blocks.1", "head"]),
    ],
)
def test_what_is_checkpointed_is_what_was_asked_for(config: dict[str, Any], chosen: list[str]) -> None:
    model = build_model(ModelConfig(width=8, blocks=(2, 2)), 1, 10)
    assert candidates(MemoryConfig(**config), model)[1] == chosen


def test_a_choice_that_means_nothing_is_refused() -> None:
    for memory, name in (
        ({"names": ["blocks.7"], "checkpointing": "names"}, "blocks.7"),
        ({"every": 2}, "every"),
    ):
        with pytest.raises((BadInputError, ValueError), match=name):
            train(memory=memory)


def kept_by(model: nn.Module, forward: Callable[[], Any]) -> int:
    """Bytes that autograd holds after a forward pass, counted with all of them alive."""
    held = {p.untyped_storage().data_ptr(): 0 for p in model.parameters()}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor.detach())  # the tensor itself would never go, see `KeptBytes`
        held.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return alive[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(held.values())


def test_predicted_bytes_are_those_that_are_kept() -> None:
    torch.manual_seed(0)
    image = torch.randn(4, 3, 32, 32)
    model = build_model(ModelConfig(width=8, blocks=(2, 2)), 3, 10)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = blocks(model)

    def forward() -> torch.Tensor:  # changes a parameter, as a teacher's is, beside BatchNorm's buffers
        model.get_parameter("head.weight").data.mul_(0.9)
        model.get_parameter("head.bias").data = torch.ones(10)
        return model(image).square().sum()  # type: ignore[no-any-return]

    cost = measure(model, found, forward)
    assert_same_bits({**model.state_dict()}, before)
    assert cost.kept() == pytest.approx(kept_by(model, lambda: model(image).square().sum()), rel=0.02)
    some = list(found)[::2]
    for block in some:
        recompute(found[block])
    assert cost.kept(some) == pytest.approx(kept_by(model, lambda: model(image).square().sum()), rel=0.02)


def test_what_a_rank_will_want_is_known_before_it_does() -> None:
    recipe = make_recipe(data={"micro_batch_size": 16})
    task = make_task(recipe)
    model = task.model()
    needs, kept = memory_to_come(recipe, task, model, ALONE), KeptBytes(model.parameters())
    with kept.counting():
        task.loss(model, blank_batch(task, 16, torch.device("cpu")))
    assert kept.bytes_without() > 0
    assert needs["activations"] == pytest.approx(kept.bytes_without(), rel=0.05)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert needs["gradients and optimizer state"] == 3 * weights, "AdamW has two moments"


def test_too_little_memory_is_told_with_what_takes_it() -> None:
    gigabyte = 10**9
    needs = {"activations": 4 * gigabyte // 10, "gradients and optimizer state": gigabyte // 10, "loading": 0}
    room = Room(2 * gigabyte, gigabyte, "/sys/fs/cgroup/memory.max")
    assert too_much(room, 1, needs) == ""
    line = too_much(room, 2, needs)
    assert named(line, "2.00 GB /sys/fs/cgroup/memory.max 1.00 2 0.40 0.10 data.micro_batch_size")


def test_what_is_trained_keeps_what_the_log_says() -> None:
    """Not a model that was only measured: the one that the training step calls."""
    model = {"width": 8, "blocks": [2, 2]}
    recipe = make_recipe(**{**SMALL, "memory": {"checkpointing": "blocks"}, "model": model})
    task = make_task(recipe)
    run = build_alone(recipe, task)
    (note,) = run.notes
    found = re.search(r"keeps ([\d.]+) MiB.* and backward ([\d.]+) more .* instead of ([\d.]+)", note)
    assert found is not None
    keeps, again, instead = map(float, found.groups())
    batch = blank_batch(task, 16, torch.device("cpu"))
    kept = kept_by(run.state.model, lambda: run.replica(batch))
    assert kept / (1 << 20) == pytest.approx(keeps, abs=0.06)
    assert 0 < again < instead - keeps + 0.11


class Odd(Small):
    """Changes an input in place; and reads the weights of a projection that it never calls."""

    def model(self) -> nn.Module:
        encoder = nn.TransformerEncoderLayer(2, 1, 4)
        return nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), encoder, nn.Linear(2, 1))


@pytest.mark.parametrize("name", ["1", "2.self_attn.out_proj"])
def test_what_cannot_be_computed_again_is_refused(name: str) -> None:
    recipe = make_recipe(task="own", memory={"checkpointing": "names", "names": [name]})
    with refused(f"'{name}'"):
        build_alone(recipe, CustomTask(Odd(), "odd"))


def test_what_changes_its_buffers_is_not_both_compiled_and_checkpointed() -> None:
    memory = {"checkpointing": "names", "names": ["1"]}
    recipe = make_recipe(task="own", memory=memory, compile={"mode": "default"})
    norm = nn.InstanceNorm1d(1, track_running_stats=True)
    model = nn.Sequential(nn.Unflatten(1, (1, 2)), norm, nn.Flatten(), nn.Linear(2, 1))
    own = type("Moving", (Small,), {"model": lambda _: copy.deepcopy(model)})()
    with refused("memory.checkpointing", "compile.mode"):
        build_alone(recipe, CustomTask(own, "own"))


class Penalized(Small):  # the blocks can't be measured one by one
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch["x"].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum(1)


def test_a_loss_that_takes_gradients_itself_is_trained_with_checkpointed_blocks() -> None:
    after = []
    for memory in ({}, {"checkpointing": "names", "names": ["0"]}):
        run = build_alone(make_recipe(task="own", memory=memory), CustomTask(Penalized(), "own"))
        after.append((run_steps(run), run.state.model.state_dict()))
    assert_same_bits(*after)


class Sums(nn.Linear):
    def forward(self, before: Any) -> Any:
        return super().forward(torch.stack(before).sum(0)).tanh()


def test_a_block_is_computed_again_of_the_list_that_it_was_given() -> None:
    """To which densenet adds its output."""
    block, gradients = Sums(2, 2), list[torch.Tensor]()
    for _ in range(2):
        given = [torch.ones(3, 2)]
        given.append(block(given))
        gradients += torch.autograd.grad(given[1].sum(), block.weight)
        recompute(block)
    assert torch.equal(*gradients)


def test_channels_last_changes_only_rounding() -> None:
    plain_losses, _ = train()
    losses, state = train(model={"width": 8, "dropout": 0.5, "channels_last": True})
    assert losses == pytest.approx(plain_losses, rel=1e-4)
    assert state["stem.weight"].is_contiguous(memory_format=torch.channels_last)
