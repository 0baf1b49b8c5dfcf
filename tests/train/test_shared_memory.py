"""Promise: parameters and buffers that share memory train as in a plain loop, whatever else a run does."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.testing import assert_close

from tests.helpers.refusals import refused
from tests.helpers.steps import ALONE, go, train_some
from tests.helpers.toys import TokenTask, build_alone, make_recipe
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

pytestmark = pytest.mark.compat
F64 = torch.float64
KINDS = ["transposed", "data", "rows", "buffer", "frozen", "flat"]


class Tied(nn.Module):
    """Two layers whose weights share memory in a way that the kind names."""

    def __init__(self, kind: str = "transposed") -> None:
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(15, 6), nn.Linear(6, 2)
        self.enc, self.dec = nn.Linear(6, 6), nn.Linear(6, 6)
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
                self.register_buffer("mean", torch.zeros(6))
            case "flat":
                flat = torch.randn(2, 6, 6) * 0.3
                self.enc.weight, self.dec.weight = nn.Parameter(flat[0]), nn.Parameter(flat[1])

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
        """In float64 from the start: `double` would move each tensor by itself."""
        torch.set_default_dtype(F64)
        try:
            return Tied(self.kind)
        finally:
            torch.set_default_dtype(torch.float32)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        result: torch.Tensor = model(batch.fields["x"]).square().sum()
        return result

    def measure(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": self.loss(model, batch)}


def recipe(name: str = "adamw", micro_batch: int = 8, **sections: Any) -> Any:
    rate = {"lr": 2**-7, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.125}
    data = {"global_batch_size": 8, "micro_batch_size": micro_batch}
    return make_recipe(epochs=2, data=data, optim={"name": name, **rate}, **sections)


def by_hand(task: Task, name: str, steps: int, model: nn.Module, plan: Any) -> dict[str, torch.Tensor]:
    """torch's own optimizers, one parameter after the other."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.requires_grad and (p.ndim >= 2) is decayed]}
        | {"weight_decay": 0.125 * decayed}
        for decayed in (True, False)
    ]
    settings: dict[str, Any] = {"lr": 2**-7, "foreach": False}
    settings |= {} if name == "adamw" else {"momentum": 0.9, "nesterov": True}
    optimizer = (torch.optim.AdamW if name == "adamw" else torch.optim.SGD)(groups, **settings)
    model.train()
    for step in range(steps):
        samples = plan.read(np.arange(step, step + 1)).sample[0]
        optimizer.zero_grad()
        (model(task.arrays["x"][samples]).square().sum() / (8 * 5)).backward()
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize(("kind", "name"), [*((kind, "adamw") for kind in KINDS), ("transposed", "sgd")])
def test_they_train_as_in_a_plain_loop_and_an_average_is_no_part_of_it(kind: str, name: str) -> None:
    task = Task(kind)
    run = build_alone(recipe(name, ema={"decay": 0.5}), task)
    average, model, plain = run.state.average, run.state.model, task.model()
    assert average is not None
    plain.load_state_dict(model.state_dict())
    right = by_hand(task, name, 8, plain, run.plan)
    for step in range(8):
        go(run, range(step, step + 1))
        tensors = {n: t.clone() for n, t in average.tensors.items()}
        with average.in_place():
            assert_close({n: model.state_dict()[n] for n in tensors}, tensors, rtol=1e-12, atol=1e-12)
        assert all(torch.equal(average.tensors[n], t) for n, t in tensors.items())
    assert_close(dict(model.state_dict()), right, rtol=1e-11, atol=1e-12)
    run.close()


def test_muon_updates_one_after_the_other() -> None:
    torch.manual_seed(0)
    gradients, weights = [torch.randn(6, 6, dtype=F64) for _ in range(2)], [torch.randn(6, 6, dtype=F64)] * 2
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5}
    for number, together in enumerate((False, True)):
        weights[number] = weights[number].clone()
        both = [nn.Parameter(weights[number]) for _ in range(2)]
        groups: Any = [{"params": [p]} for p in both]
        if together:
            groups = parameter_groups(OptimConfig(weight_decay=0.5), nn.ParameterList(both))
        groups = [{**group, "orthogonal": True} for group in groups]
        optimizers = [
            Muon(some, **settings) for some in ([groups] if together else ([one] for one in groups))
        ]
        for _ in range(3):
            for parameter, gradient in zip(both, gradients, strict=True):
                parameter.grad = gradient.clone()
            for optimizer in optimizers:
                optimizer.step()
    assert_close(weights[1], weights[0], rtol=1e-12, atol=1e-12)


def test_only_what_has_numbers_in_common_shares_memory() -> None:
    flat = torch.zeros(24)
    matrix = flat[:12].view(3, 4)
    tensors = {"a": matrix, "b": matrix.t(), "c": flat[12:], "d": matrix[:, 1], "e": matrix[:, 2]}
    tensors |= {"rest": torch.zeros(3), "empty": flat[:0], "last": flat[23:]}
    assert sharing(tensors) == [["a", "b", "d", "e"], ["c", "last"]]
    del tensors["a"], tensors["b"]
    assert sharing(tensors) == [["c", "last"]], "columns of a matrix lie between each other"
    with torch.device("meta"):
        shapes = Tied("transposed")
    assert sharing(dict(shapes.named_parameters())) == [["enc.weight", "dec.weight"]]
    assert [tuple(buffer.shape) for buffer in buffers_of_parameters(Tied("buffer"))] == [(2, 6)]
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
    types = {"int8": torch.int8, "bool": torch.bool, "fp8": torch.float8_e4m3fn, "teacher": torch.float32}
    for name, dtype in types.items():
        model.register_parameter(name, nn.Parameter(torch.ones(2).to(dtype), requires_grad=False))
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
        assert_close(state, alone, rtol=1e-10, atol=1e-12)


def on_rank(world: World, kind: str, reduction: str) -> dict[str, torch.Tensor]:
    settings = recipe(micro_batch=4, ema={"decay": 0.5}, parallel={"threads": 1, "reduction": reduction})
    return train_some(settings, Task(kind), range(4), world=world)[0]["model"]
