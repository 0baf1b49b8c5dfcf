"""Promise: what a forward pass changes or makes doesn't depend on micro-batches or ranks, or is refused.

What it moves late ends a run of several micro-batches by name. And modes that the user set for parts of a
model stay as they were set.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.helpers.refusals import named, refused
from tests.helpers.steps import ALONE, State, assert_same_bits, go, train_some
from tests.helpers.toys import make_recipe, rows_to
from tests.helpers.world import Ranks
from trainer.config.recipe import Recipe
from trainer.distributed.parallel import World
from trainer.errors import BadInputError, DivergedError
from trainer.models.buffers import StillTensors
from trainer.observe.checksums import Checksums
from trainer.tasks.custom import CustomTask
from trainer.train.components.run import build
from trainer.train.evaluate import shown_to_hooks
from trainer.train.loop import train
from trainer.train.recording import other_ranks_checksums
from trainer.train.state import Run
from trainer.train.step import train_step

F64 = torch.float64
SAMPLES = 32
LR = 1 / 128  # exact in float32, too


class Base(nn.Module):
    """A student, and what a kind adds to it."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.student, self.teacher = nn.Linear(4, 3, dtype=F64), nn.Linear(4, 3, dtype=F64)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(kind == "trained teacher")
        self.register_buffer("center", torch.zeros(3, dtype=F64))
        self.register_buffer("at", torch.zeros((), dtype=torch.int64))

    center: torch.Tensor
    at: torch.Tensor

    @torch.no_grad()
    def change(self, x: torch.Tensor) -> None:  # noqa: PLR0912
        match self.kind:
            case "follows" | "trained teacher":
                for theirs, ours in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    theirs.lerp_(ours, 0.1)
            case "follows by data":
                for theirs, ours in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    theirs.data = 0.9 * theirs.data + 0.1 * ours.data
            case "learns from samples":
                self.teacher.bias.lerp_(self.student(x).mean(0), 0.1)
            case "center":
                self.center.lerp_(self.student(x).mean(0), 0.1)
            case "starts from samples":
                if not self.at:
                    self.student.weight.div_(x.abs().mean(0))
                    self.at.fill_(1)
            case "clips":
                self.student.weight.clamp_(-0.1, 0.1)
            case "clips by data":
                self.student.weight.data = self.student.weight.data.clamp(-0.1, 0.1)
            case "decays":
                self.student.weight.mul_(0.99)
            case "replaces":
                self.student.weight = nn.Parameter(self.student.weight.detach() * 1)
            case _:
                pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # What is used is that of the step before.
        late = self.kind in ("learns from samples", "center")
        if self.training and not late:
            self.change(x)
        with torch.no_grad():
            wanted = self.teacher(x + 0.1) - self.center
        if self.training and late:
            self.change(x)
        made = self.student(x)
        loss: torch.Tensor = (made - wanted).square().sum(1) + made[:, 0].sub(1).square()
        return loss


class Squared(nn.Module):
    """A loss as a module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().sum(1)


class Own:
    """A task of somebody's own, whose model has the same weights each time."""

    def __init__(self, make: Callable[..., nn.Module], *arguments: Any) -> None:
        self.make, self.arguments = make, arguments

    def data(self) -> Any:
        x = np.random.default_rng(0).normal(1, 1, (SAMPLES, 4))
        return {"x": x}, {"x": x[:10]}

    def model(self) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(7)
            return self.make(*self.arguments)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        result: torch.Tensor = model(batch.fields["x"])
        return result

    def measure(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": self.loss(model, batch)}


def recipe_of(micro_batch: int, **sections: Any) -> Recipe:
    optim = {"name": "sgd", "lr": LR, "schedule": "constant", "warmup_steps": 0, "momentum": 0.0}
    data = {"global_batch_size": 8, "micro_batch_size": micro_batch}
    return make_recipe(**{"epochs": 2, "data": data, "optim": optim, **sections})


def a_run(own: Any, micro_batch: int, world: World = ALONE, **sections: Any) -> Run:
    return build(recipe_of(micro_batch, **sections), CustomTask(own, "own"), world, 0)


def trained(world: World, kind: str, micro_batch: int, steps: range = range(8), state: Any = None) -> State:
    """A run's tensors after some steps."""
    recipe, task = recipe_of(micro_batch, ema={"decay": 0.9}), CustomTask(Own(Base, kind), "own")
    return train_some(recipe, task, steps, state, world)[0]


def by_hand(kind: str, steps: int = 8) -> dict[str, torch.Tensor]:
    """The same with plain PyTorch, the whole batch at once."""
    own = Own(Base, kind)
    run, model = a_run(own, 8), own.model().train()
    weights = [p for p in model.parameters() if p.requires_grad]
    matrices: Any = {"params": [p for p in weights if p.ndim >= 2], "weight_decay": 0.01}
    others: Any = {"params": [p for p in weights if p.ndim < 2]}
    optimizer = torch.optim.SGD([matrices, others], lr=LR)
    for _, batch in zip(range(steps), run.loader(run.share.batches()), strict=False):
        optimizer.zero_grad()
        (model(batch.fields["x"]).sum() / 8).backward()
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("kind", ["follows", "follows by data", "learns from samples", "center", "clips"])
def test_what_a_forward_pass_moves_is_that_of_plain_pytorch(ranks: Ranks, kind: str) -> None:
    wanted, alone = by_hand(kind), [trained(ALONE, kind, size) for size in (8, 2)]
    first, second = ranks.run(2, trained, kind, 1)
    assert_same_bits({"model": first["model"]}, {"model": second["model"]})
    for state in (*alone, first):
        assert_close(state["model"], wanted, rtol=1e-9, atol=1e-12)
        assert_close(state["ema"], alone[0]["ema"], rtol=1e-9, atol=1e-12)
    begun = trained(ALONE, kind, 2, range(3))
    assert_same_bits(trained(ALONE, kind, 2, range(3, 8), begun), alone[1])


def test_the_average_follows_weights_that_a_forward_pass_gives_other_memory() -> None:
    run = a_run(Own(Base, "clips by data"), 8, ema={"decay": 0.5})
    student: Any = run.state.model.student
    average, batches = run.state.average, run.loader(run.share.batches())
    assert average is not None
    for step in range(3):
        before = average.tensors["student.weight"].clone()
        train_step(run, batches, step)
        wanted = torch.lerp(before, student.weight.detach(), max(0.5, 9 / (10 + step)))
        assert torch.allclose(average.tensors["student.weight"], wanted, rtol=1e-9)
    own = student.weight.detach().clone()
    with average.in_place():
        assert torch.equal(student.weight, wanted)
    assert torch.equal(student.weight, own)


def test_a_batchnorm_whose_statistics_are_replaced_is_refused_by_name() -> None:
    def model() -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 3, dtype=F64), nn.BatchNorm1d(3, dtype=F64), Squared())
        net[1].register_forward_hook(halve)
        return net

    def halve(layer: Any, *_: Any) -> None:
        layer.running_mean = layer.running_mean * 0.5

    with refused("1.running_mean"):
        a_run(Own(model), 4)
    a_run(Own(model), 8)


MOVED = {"starts from samples": "student.weight", "decays": "student.weight"}
MOVED |= {"trained teacher": "teacher.weight, teacher.bias"}


@pytest.mark.parametrize(("kind", "names"), MOVED.items())
def test_trained_parameters_that_samples_move_are_refused_by_name(kind: str, names: str) -> None:
    with refused(f"{names} 2"):
        a_run(Own(Base, kind), 4)
    assert_close(trained(ALONE, kind, 8)["model"], by_hand(kind), rtol=1e-9, atol=1e-12)


def test_a_parameter_that_is_replaced_is_refused() -> None:
    with refused("student.weight"):
        a_run(Own(Base, "replaces"), 8)


class Lazy(nn.Module):
    """Makes something in its first forward pass, where `when` says."""

    def __init__(self, what: str, when: str = "") -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1, dtype=F64)
        self.what, self.when = what, when

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "made") and (not self.when or self.training == (self.when == "training")):
            value = torch.ones(4, dtype=F64)
            match self.what:
                case "parameter":
                    self.made = nn.Parameter(value)
                case "module":
                    self.made = nn.Linear(4, 4, dtype=F64)  # type: ignore[assignment]
                case _:
                    self.register_buffer("made", value, persistent=self.what == "buffer")
        return self.linear(x).sum(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("what", "when", "name"),
    [("buffer", "", "made"), ("parameter", "training", "made"), ("module", "evaluation", "made.bias")],
)
def test_what_a_forward_pass_makes_is_refused_by_name(what: str, when: str, name: str) -> None:
    with refused(name):
        CustomTask(Own(Lazy, what, when), "own").check()


def test_a_cache_may_be_made_in_a_forward_pass() -> None:
    CustomTask(Own(Lazy, "cache"), "own").check()


class Counts(nn.Module):
    """Counts in evaluation mode, too."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2, dtype=F64)
        self.register_buffer("scale", torch.ones(4, dtype=F64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.mul_(0.9).add_(0.1 * x.abs().mean(0))
        return self.linear(x / self.scale.clone()).square().sum(1)  # type: ignore[no-any-return]


def looped(own: Any, every: str, **sections: Any) -> Run:
    """A whole run, evaluated so often."""
    run = a_run(own, 4, optim={"lr": 0.01}, evaluation={"every": every}, **sections)
    train(run, rows_to(run))
    return run


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a task's trial warns of."""
    lines: list[str] = []
    monkeypatch.setattr("trainer.tasks.custom_trial.warn", lines.append)
    return lines


def test_an_evaluation_leaves_what_the_training_changes(said: list[str]) -> None:
    CustomTask(Own(Counts), "own").check()
    assert len(said) == 1 and named(said[0], "measure scale")
    often, seldom = (dict(looped(Own(Counts), n).state.model.state_dict()) for n in ("1 steps", "end"))
    assert_same_bits({"model": often}, {"model": seldom})


def test_a_hook_that_calls_the_model_leaves_what_the_training_changes() -> None:
    run = looped(Own(Counts), "end")
    model: Any = run.state.model
    before = model.scale.clone()
    with shown_to_hooks(run):
        model(torch.ones(2, 4, dtype=F64))
    assert torch.equal(model.scale, before)


class Polishes(Own):
    """Its measure changes a weight."""

    def measure(self, model: nn.Module, batch: Any) -> Any:
        with torch.no_grad():
            model.student.weight.mul_(0.9)  # type: ignore[union-attr, operator]
        return super().measure(model, batch)


def test_a_measure_that_changes_a_weight_is_named(said: list[str]) -> None:
    CustomTask(Polishes(Base), "own").check()
    assert len(said) == 1 and named(said[0], "measure student.weight")


class Beside(Own):
    """Keeps something that learns beside the model; `copied` in the first pass."""

    def __init__(self, copied: bool) -> None:
        super().__init__(Base)
        self.shadow = {} if copied else {"weight": torch.zeros(3, 4, dtype=F64)}

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            weight: Any = model.student.weight  # type: ignore[union-attr]
            self.shadow.setdefault("weight", weight.clone()).lerp_(weight, 0.1)
        return super().loss(model, batch)


@pytest.mark.parametrize("copied", [False, True])
def test_what_learns_beside_the_model_is_named(copied: bool, said: list[str]) -> None:
    CustomTask(Beside(copied), "own").check()
    assert len(said) == 1 and "self.shadow['weight']" in said[0]


class Modes(nn.Module):
    """Tells in which modes its parts were when it was trained."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4, dtype=F64), nn.Dropout(0.5)
        self.linear = nn.Linear(4, 2, dtype=F64)
        self.seen: list[tuple[bool, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.seen.append(tuple(m.training for m in (self, self.norm, self.drop, self.linear)))
        return self.linear(self.drop(self.norm(x))).square().sum(1)  # type: ignore[no-any-return]


def set_modes(how: str) -> nn.Module:
    model = Modes()
    if how == "parts":
        model.norm.eval()
        model.drop.eval()
    else:
        model.eval()
        model.linear.train(how == "all but one")
    return model


MODES = {"parts": (True, False, False, True), "all": (True,) * 4, "all but one": (False, False, False, True)}


@pytest.mark.parametrize(("how", "wanted"), MODES.items())
def test_modes_stay_as_they_were_set(how: str, wanted: tuple[bool, ...]) -> None:
    run = looped(Own(set_modes, how), "1 steps", log={"every": 1})
    model: Any = run.state.model
    assert set(model.seen) == {wanted}
    assert tuple(m.training for m in (model, model.norm, model.drop, model.linear)) == wanted
    assert bool(model.norm.running_mean.any()) is wanted[1]
    told = [named(note, "norm, drop") for note in run.notes if "in evaluation mode" in note]
    assert told == [True] * (how != "all")


def drifting(world: World, name: str, strategy: str = "ddp") -> tuple[str, list[str]]:
    """Lets a rank change a tensor in step 5 as the others don't; gives how the run ends, and what is said."""
    said, parallel = list[str](), {"threads": 1, "strategy": strategy}
    run = a_run(Own(Base), 2, world, log={"every": 2}, parallel=parallel)

    def nudge(done: int) -> None:
        if done == 5 and name:
            run.state.model.state_dict()[name].add_(1e-9 * world.rank)

    checksums: Checksums | None = other_ranks_checksums(run)
    assert checksums is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.train.recording.warn", said.append)
        try:
            train(run, rows_to(run, checksums=checksums, each_step=[nudge]))
        except DivergedError as error:
            return f"step {run.state.step}: {error}", said
    return "", said


def test_ranks_whose_weights_drift_apart_end_the_run_one_record_later(ranks: Ranks) -> None:
    for ended, _ in ranks.run(2, drifting, "student.weight"):
        assert ended.startswith("step 8: ") and named(ended, "6 4 student.weight")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_buffers_that_differ_are_told_once_by_one_rank(ranks: Ranks, strategy: str) -> None:
    """And rows of a sharded model are no drift."""
    for name in ("", "center"):
        (ended, said), (other, nothing) = ranks.run(2, drifting, name, strategy)
        assert not ended and not other and not nothing
        assert [named(line, "center 6") for line in said] == [True] * bool(name)


def test_a_frozen_batchnorm_computes_as_in_plain_pytorch() -> None:
    def make() -> nn.Module:
        model = set_modes("parts")
        model.norm.running_mean += 3  # type: ignore[union-attr, operator]
        return model

    own = Own(make)
    run, alone = a_run(own, 2), own.model()
    go(run, range(1))
    batch = next(iter(a_run(own, 8).loader(run.share.batches())))
    (alone(batch.fields["x"]).sum() / 8).backward()
    torch.optim.SGD(alone.linear.parameters(), lr=0.01).step()
    assert torch.equal(run.state.model.get_buffer("norm.running_mean"), torch.full((4,), 3.0, dtype=F64))


STEPS = 140


class Late(nn.Module):
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
    own = (Following if kind == "target network" else Own)(Late, kind)
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


def test_padding_moves_nothing() -> None:
    data = {"global_batch_size": 12, "last_batch": "weighted"}
    a_run(Own(Base, "center"), 8, data={**data, "micro_batch_size": 12})
    with refused("data.last_batch=weighted center"):
        a_run(Own(Base, "center"), 8, data={**data, "micro_batch_size": 4})


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
