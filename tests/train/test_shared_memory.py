"""Promise: parameters and buffers that share memory train as in a plain loop, whatever else a run does."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from tests.helpers.refusals import refused
from tests.helpers.steps import ALONE, train_some
from tests.helpers.toys import TokenTask, make_recipe
from tests.helpers.world import Ranks
from trainer.config.model import LoraConfig, ModelConfig
from trainer.config.training import AverageConfig, OptimConfig, ParallelConfig
from trainer.distributed.overlap import buffers_of_parameters, sharing
from trainer.distributed.parallel import World
from trainer.distributed.sharding import check_sharding
from trainer.errors import BadInputError
from trainer.models.finetune import fine_tune
from trainer.models.weights import load_initial
from trainer.optim.average import WeightAverage
from trainer.optim.muon import Muon
from trainer.optim.optimizers import parameter_groups
from trainer.train.components.run import build
from trainer.train.step import train_step

pytestmark = pytest.mark.compat
F64 = torch.float64
KINDS = ["transposed", "data", "rows", "buffer", "frozen", "flat"]


class Tied(nn.Module):
    """Two layers whose weights share memory in a way that the kind names."""

    def __init__(self, kind: str = "transposed", width: int = 6) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(15, width), nn.Linear(width, 2)
        self.enc, self.dec = nn.Linear(width, width), nn.Linear(width, width)
        weight = self.enc.weight
        match kind:
            case "transposed" | "frozen":
                self.dec.weight = nn.Parameter(weight.t(), requires_grad=kind != "frozen")
            case "data":
                self.dec.weight.data = weight.data
            case "slice":
                self.dec.bias = nn.Parameter(weight.detach()[:, 1])
            case "rows":
                self.dec.weight = nn.Parameter(weight.detach()[:3])
                self.dec.bias = nn.Parameter(self.dec.bias.detach()[:3])
            case "buffer":
                self.register_buffer("seen", weight.detach()[1:3])
                self.register_buffer("mean", torch.zeros(width))
            case "flat":
                flat = torch.randn(2 * width * width) * 0.3
                self.enc.weight = nn.Parameter(flat[: width * width].view(width, width))
                self.dec.weight = nn.Parameter(flat[width * width :].view(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x.flatten(1))
        if self.kind == "buffer" and self.training:
            self.get_buffer("mean").lerp_(h.detach().mean(0), 0.1)
        h = self.enc(h).tanh()
        h = nn.functional.linear(h, self.dec.weight, self.dec.bias).tanh()
        if self.kind == "rows":
            h = torch.cat((h, h), 1)
        result: torch.Tensor = self.last(h)
        return result


class Task(TokenTask):
    def __init__(self, kind: str = "transposed") -> None:
        super().__init__(32, ragged=False)
        self.kind = kind

    def model(self) -> nn.Module:
        return Tied(self.kind).double() if self.kind == "flat" else _doubled(Tied(self.kind))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        result: torch.Tensor = model(batch.fields["x"]).square().sum()
        return result

    def measure(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": self.loss(model, batch)}


def _doubled(model: nn.Module) -> nn.Module:
    """In float64, with the memory shared as before: `double` moves each tensor by itself."""
    torch.set_default_dtype(F64)
    try:
        return Tied(model.kind)  # type: ignore[arg-type]
    finally:
        torch.set_default_dtype(torch.float32)


def recipe(name: str = "adamw", **sections: Any) -> Any:
    rate = {"lr": 2**-7, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.125}
    data = {"global_batch_size": 8, "micro_batch_size": 8}
    return make_recipe(epochs=2, data=data, optim={"name": name, **rate}, **sections)


def by_hand(task: Task, name: str, steps: int, model: nn.Module, plan: Any) -> dict[str, torch.Tensor]:
    """torch's own optimizers, one parameter after the other."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.requires_grad and (p.ndim >= 2) is decayed]}
        | {"weight_decay": 0.125 * decayed}
        for decayed in (True, False)
    ]
    settings: dict[str, Any] = {"lr": 2**-7, "foreach": False}
    if name == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, **settings)
    else:
        optimizer = torch.optim.SGD(groups, momentum=0.9, nesterov=True, **settings)
    model.train()
    for step in range(steps):
        samples = plan.read(np.arange(step, step + 1)).sample[0]
        loss = model(task.arrays["x"][samples]).square().sum() / (8 * 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(("kind", "name"), [*((kind, "adamw") for kind in KINDS), ("transposed", "sgd")])
def test_they_train_as_in_a_plain_loop_and_an_average_is_no_part_of_it(kind: str, name: str) -> None:
    task = Task(kind)
    run = build(recipe(name, ema={"decay": 0.5}), task, ALONE, 0)
    average = run.state.average
    assert average is not None
    plain = task.model()
    plain.load_state_dict(run.state.model.state_dict())
    right = by_hand(task, name, 8, plain, run.plan)
    run.replica.train()
    batches = run.loader(run.share.batches())
    for step in range(8):
        train_step(run, batches, step)
        tensors = {n: t.clone() for n, t in average.tensors.items()}
        with average.in_place():
            inside = run.state.model.state_dict()
            for n, tensor in tensors.items():
                assert torch.allclose(inside[n], tensor, rtol=1e-12, atol=1e-12), n
        assert all(torch.equal(average.tensors[n], t) for n, t in tensors.items())
    for n, tensor in right.items():
        assert torch.allclose(run.state.model.state_dict()[n], tensor, rtol=1e-11, atol=1e-12), n
    run.close()


def test_muon_updates_one_after_the_other() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(6, 6, dtype=F64) for _ in range(2)]
    states = []
    for apart in (True, False):
        torch.manual_seed(1)
        weight = torch.randn(6, 6, dtype=F64)
        one, other = nn.Parameter(weight), nn.Parameter(weight)
        if not apart:
            model = nn.Module()
            for name, p in (("a", one), ("b", other)):
                model.register_parameter(name, p)
            config = OptimConfig(weight_decay=0.5)
            groups = [{**group, "orthogonal": True} for group in parameter_groups(config, model)]
        optimizer = None if apart else Muon(groups, lr=0.1, momentum=0.9)
        settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5}
        alone = [Muon([{"params": [p], "orthogonal": True}], **settings) for p in (one, other)]
        for _ in range(3):
            one.grad, other.grad = (g.clone() for g in gradients)
            for each in [optimizer] if optimizer else alone:
                each.step()
        states.append(weight)
    assert torch.allclose(states[0], states[1], rtol=1e-12, atol=1e-12)


def test_only_what_has_numbers_in_common_shares_memory() -> None:
    flat = torch.zeros(24)
    matrix = flat[:12].view(3, 4)
    tensors = {
        **{"a": matrix, "b": matrix.t(), "c": flat[12:], "d": matrix[:, 1], "e": matrix[:, 2]},
        **{"rest": torch.zeros(3), "empty": flat[:0], "last": flat[23:]},
    }
    assert sharing(tensors) == [["a", "b", "d", "e"], ["c", "last"]]
    del tensors["a"], tensors["b"]
    assert sharing(tensors) == [["c", "last"]], "columns of a matrix lie between each other"
    with torch.device("meta"):
        shapes = Tied("transposed")
    assert sharing(dict(shapes.named_parameters())) == [["enc.weight", "dec.weight"]]
    model = Tied("buffer")
    assert [tuple(buffer.shape) for buffer in buffers_of_parameters(model)] == [(2, 6)]
    assert not sharing(dict(Tied("flat").named_parameters()))
    memory = torch.zeros(6)  # an expanded view, and what lies between its elements
    tensors = {"ends": memory.as_strided((2, 3), (5, 0)), "middle": memory[2:4], "first": memory[:1]}
    assert sharing(tensors) == [["ends", "first"]]


def test_what_cannot_be_shared_out_or_adapted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError):  # by name, or because torch is older than 2.9
        check_sharding(ParallelConfig(strategy="fsdp"), Tied(), 2)
    with refused("enc.weight dec.weight"):
        fine_tune(Tied(), ModelConfig(lora=LoraConfig(rank=2, targets=("dec",))))
    state = {name: tensor.clone().contiguous() for name, tensor in Tied().state_dict().items()}
    state["dec.weight"] = state["dec.weight"] + 1
    safetensors.torch.save_file(state, tmp_path / "other.safetensors")
    with refused("enc.weight dec.weight"):
        load_initial(Tied(), tmp_path / "other.safetensors", ())


def test_a_parameter_with_gaps_is_refused_as_kernels_would_write_into_them() -> None:
    with refused("dec.bias 6"):
        parameter_groups(OptimConfig(), Task("slice").model())
    assert len(parameter_groups(OptimConfig(), Task("transposed").model())) == 4


def test_frozen_and_odd_parameters_are_in_no_average() -> None:
    """They are in the model as they are, also where a forward pass moves one."""
    model = nn.Linear(2, 2)
    for name, tensor in {
        **{"int8": torch.ones(2, dtype=torch.int8), "bool": torch.ones(2, dtype=torch.bool)},
        **{"fp8": torch.ones(2).to(torch.float8_e4m3fn), "teacher": torch.ones(2)},
    }.items():
        model.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    average = WeightAverage(model, AverageConfig(decay=0.9))
    assert average.tensors.keys() == {"weight", "bias"}
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.weight.add_(1.0), model.get_parameter("teacher").fill_(7.0)
    average.update(0, None, torch.zeros(1))
    with average.in_place():
        assert model.get_parameter("teacher").tolist() == [7.0, 7.0]
        assert torch.allclose(model.weight, before["weight"] + 0.9)
    assert torch.equal(model.weight, before["weight"] + 1.0)


@pytest.mark.parametrize("reduction", ["all_reduce", "tree"])
@pytest.mark.parametrize("kind", ["transposed", "buffer"])
def test_two_ranks_are_as_one(ranks: Ranks, kind: str, reduction: str) -> None:
    alone = on_rank(ALONE, kind, reduction)
    for state in ranks.run(2, on_rank, kind, reduction):
        for name, tensor in alone.items():
            assert torch.allclose(state[name], tensor, rtol=1e-10, atol=1e-12), name


def on_rank(world: World, kind: str, reduction: str) -> dict[str, torch.Tensor]:
    data = {"global_batch_size": 8, "micro_batch_size": 4}
    parallel = {"threads": 1, "reduction": reduction}
    settings = recipe(ema={"decay": 0.5}, parallel=parallel).model_copy()
    settings = make_recipe(**{**settings.model_dump(), "data": {**settings.data.model_dump(), **data}})
    return train_some(settings, Task(kind), range(4), world=world)[0]["model"]
