"""Promise: what a forward pass moves late ends a run of several micro-batches by name; all else goes on."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.refusals import named, refused
from tests.helpers.steps import ALONE
from tests.helpers.toys import rows_to
from tests.helpers.world import Ranks
from tests.train.test_changed_by_forward import F64, Own, a_run
from trainer.distributed.parallel import World
from trainer.errors import BadInputError
from trainer.models.buffers import StillTensors
from trainer.train.loop import train

STEPS = 140


class Net(nn.Module):
    """Moves something, in the way that the kind names, after its first two calls."""

    center: torch.Tensor
    cache: torch.Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.student, self.teacher = nn.Linear(4, 3, dtype=F64), nn.Linear(4, 3, dtype=F64)
        self.teacher.requires_grad_(False)
        self.register_buffer("center", torch.zeros(3, dtype=F64))
        self.register_buffer("cache", torch.zeros(3, dtype=F64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.student(x)
        self.calls += self.training
        if self.training and self.calls > 2:
            self.move(made)
        result: torch.Tensor = (made - self.teacher(x) + self.center).square().sum(1)
        return result

    @torch.no_grad()
    def move(self, made: torch.Tensor) -> None:
        match self.kind:
            case "buffer":
                self.center.data.add_(made.mean())
            case "replaced":
                self.center = self.center + 1
            case "teacher":
                self.teacher.weight.data.lerp_(self.student.weight, 0.1)
            case "seldom" if not self.calls % 10:
                self.teacher.weight.add_(1)
            case "cache":
                self.cache.add_(1)
            case "limit":
                self.student.weight.clamp_(-0.1, 0.1)
            case "backward" if made.requires_grad:
                made.register_hook(self.note)
            case _:
                pass

    def note(self, gradient: torch.Tensor) -> None:
        self.center.add_(gradient.abs().mean())


class Following(Own):
    """Its optimizer moves the teacher now and then."""

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        made, done = torch.optim.SGD(model.student.parameters(), 0.01), [0]

        def follow(*_: Any) -> None:
            done[0] += 1
            if not done[0] % 5:
                model.teacher.load_state_dict(model.student.state_dict())

        made.register_step_post_hook(follow)
        return made


def ends(world: World, kind: str, micro_batch: int, steps: int = STEPS) -> str:
    """How a run ends: the line, or "" after its last step."""
    own = (Following if kind == "target network" else Own)(Net, kind)
    sections = {"epochs": 1 + steps // 4, "max_steps": steps, "log": {"every": 8}}
    run = a_run(own, micro_batch, world, optim={}, **sections)
    try:
        train(run, rows_to(run))
    except BadInputError as error:
        assert run.state.step < steps
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "name"), [("buffer", "center"), ("replaced", "center"), ("teacher", "teacher.weight")]
)
def test_what_moves_late_ends_the_run_by_name(ranks: Ranks, kind: str, name: str) -> None:
    assert named(ends(ALONE, kind, 2), name)
    if kind == "buffer":
        assert all(named(line, name) for line in ranks.run(2, ends, kind, 4))


def test_what_moves_seldom_is_met() -> None:
    assert named(ends(ALONE, "seldom", 4, 300), "teacher.weight")


@pytest.mark.parametrize("kind", ["target network", "cache", "limit", "backward"])
def test_what_forward_passes_leave_alone_ends_nothing(kind: str) -> None:
    assert not ends(ALONE, kind, 2)


def test_one_micro_batch_a_step_is_plain_pytorchs() -> None:
    assert not ends(ALONE, "buffer", 8)


def held(**tensors: torch.Tensor) -> nn.Module:
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor)
    return model


def first(model: nn.Module, still: StillTensors, act: Any = lambda _: None, world: World = ALONE) -> int:
    still.look()
    act(model)
    still.compare()
    return int(still.first_moved(world.group))


def first_of_ranks(world: World) -> int:
    model = held(one=torch.zeros(3), other=torch.zeros(3))
    return first(model, StillTensors(model, ["one", "other"]), lambda own: own.other.add_(world.rank), world)


def test_what_moves_on_one_rank_is_known_to_both(ranks: Ranks) -> None:
    assert ranks.run(2, first_of_ranks) == [2, 2]


@pytest.mark.parametrize(
    ("dtype", "at"), [(torch.float32, 0), (torch.int64, 1), (torch.bool, 2), (torch.bfloat16, 3)]
)
def test_one_bit_of_any_tensor_is_seen(dtype: torch.dtype, at: int) -> None:
    model = held(**{f"t{n}": torch.zeros(size, dtype=dtype) for n, size in enumerate((3, 1, 7, 2))})
    still = StillTensors(model, ["t0", "t1", "t2", "t3"])
    assert first(model, still) == 0

    def flip(_: Any) -> None:
        model.get_buffer(f"t{at}").view(torch.uint8)[-1] ^= 1

    assert first(model, still, flip) == at + 1
    with refused(f"t{at}"):
        still.refuse(at + 1)


def test_nothing_moved_where_nan_stays_nan() -> None:
    model = held(a=torch.full((3,), math.nan), b=torch.zeros(()), c=torch.zeros(2, dtype=torch.complex64))
    still = StillTensors(model, ["a", "b", "c"])
    assert first(model, still) == 0
    assert first(model, still, lambda own: own.b.copy_(torch.tensor(-0.0))) == 2


def test_another_shape_is_refused_by_name() -> None:
    model = held(odd=torch.zeros(3))
    with refused("odd"):
        first(model, StillTensors(model, ["odd"]), lambda own: setattr(own, "odd", torch.zeros(4)))
