"""Promise: a task may bring its optimizer, scheduler, several losses; a resumed run ends as a whole one."""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim import lr_scheduler

from tests.helpers import forked
from tests.helpers.refusals import refusal, refused
from tests.helpers.small_task import Small
from tests.helpers.steps import assert_same_bits
from tests.helpers.toys import build_alone, make_recipe, run_steps
from tests.helpers.world import Ranks
from trainer.checkpoint.tensor_file import put_together, take_apart
from trainer.config import recipe_file
from trainer.config.recipe_file import read_recipe
from trainer.distributed.parallel import World
from trainer.tasks.custom import CustomTask
from trainer.train.components.run import build
from trainer.train.components.task import check_request
from trainer.train.state import Run, load_state, numbers_of, tensors_of
from trainer.train.step import take_metrics, train_step

STEPS = 8


class Classes(Small):
    """Sixteen samples of two numbers, two classes."""

    def data(self) -> Any:
        x = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)
        return (part := {"x": x, "y": (x[:, 0] > 0).astype(np.int64)}), part

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 4), nn.Linear(4, 2))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    def measure(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": Classes.loss(self, model, batch)}


class Noisy(optim.Optimizer):
    """Draws random numbers, as Langevin dynamics does."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad + 0.1 * torch.randn_like(p), alpha=-group["lr"])


class Forgetful(optim.SGD):
    """Counts its updates where nobody looks."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        super().step(closure)


def task_of(**methods: Any) -> CustomTask:
    return CustomTask(type("Mine", (Classes,), methods)(), "mine")


def recipe_of(**sections: Any) -> Any:
    data = {"global_batch_size": 8, "micro_batch_size": 4, **sections.pop("data", {})}
    return make_recipe(epochs=STEPS // 2, task="own", data=data, **sections)


def started(methods: dict[str, Any], **sections: Any) -> Run:
    run = build_alone(recipe_of(**sections), task_of(**methods))
    run.replica.train()
    return run


def go_on(run: Run, steps: range) -> list[list[float]]:
    """Losses, learning rate and updates of each step."""
    batches, rows = run.loader(run.share.batches(steps.start)), []
    for step in steps:
        train_step(run, batches, step)
        rows.append([float(value) for value in take_metrics(run).values()])
        run.state.step = step + 1
    return rows


def by(kind: Callable[..., Any], **keys: Any) -> Callable[..., Any]:
    """A task's method that makes an optimizer of all parameters."""
    return lambda _, model: kind(model.parameters(), **keys)


def in_groups(_: Any, model: Any) -> Any:
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3:].parameters()}]
    return optim.NAdam(groups, 0.01)


def one_cycle(_: Any, optimizer: Any, steps: int) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)


def halved(_: Any, optimizer: Any) -> Any:
    return lr_scheduler.ExponentialLR(optimizer, 0.5)


def in_turns(_: Any, optimizer: Any) -> Any:
    rise = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [rise, lr_scheduler.CosineAnnealingLR(optimizer, 6)], [2])


MUON = {"optim": {"name": "muon", "layer_decay": 0.5}}
FP16 = {"precision": {"mode": "fp16", "initial_scale": 2.0**20, "growth_interval": 3}}
SKIP = {"anomaly": {"nonfinite": "skip"}, "ema": {"decay": 0.9}, "optim": {"max_grad_norm": 1.0}}
FUSED = by(optim.SGD, lr=0.1, momentum=0.9, fused=True)
OWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one-cycle": ({"optimizer": by(optim.AdamW), "scheduler": one_cycle}, {}),
    "in turns": ({"optimizer": by(optim.RMSprop), "scheduler": in_turns}, {}),
    "groups": ({"optimizer": in_groups}, {}),
    "noise": ({"optimizer": by(Noisy, lr=0.1)}, {}),
    "with muon": ({"scheduler": lambda _, o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n)}, MUON),
    "fp16": ({"optimizer": FUSED, "scheduler": halved}, FP16),
    "skip": ({"optimizer": by(optim.AdamW, fused=True), "scheduler": one_cycle}, SKIP),
    "tree": ({"optimizer": by(optim.Adam)}, {"parallel": {"reduction": "tree"}}),
}


@pytest.mark.parametrize("name", OWN)
def test_a_run_that_was_cut_ends_with_the_same_bits(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """After its first step, and before its last."""
    methods, sections = OWN[name]
    check_request(recipe_of(**sections), task_of(**methods), 1)
    assert not capsys.readouterr().err
    whole = started(methods, **sections)
    rows = go_on(whole, range(STEPS))
    for cut in (1, STEPS - 1):
        first = started(methods, **sections)
        begun = go_on(first, range(cut))
        kept = {kind: {n: t.clone() for n, t in ts.items()} for kind, ts in tensors_of(first.state).items()}
        numbers = json.loads(json.dumps(numbers_of(first.state, [0.0])))
        del first
        second = started(methods, **sections)
        load_state(second, cut, kept, numbers)
        assert repr(begun + go_on(second, range(cut, STEPS))) == repr(rows)  # nan is nan
        assert_same_bits(tensors_of(second.state), tensors_of(whole.state))
        assert numbers_of(whole.state, [0.0])["own"] == numbers_of(second.state, [0.0])["own"]


def stepped(_: Any, optimizer: Any, epoch_steps: int, steps: int) -> Any:
    return lr_scheduler.StepLR(optimizer, epoch_steps, 1 / steps)


@pytest.mark.parametrize(("last", "steps"), [("weighted", 12), ("cross", 11)])
def test_a_scheduler_is_told_the_steps_of_an_epoch_and_of_the_run(last: str, steps: int) -> None:
    data = {"global_batch_size": 6, "micro_batch_size": 6, "last_batch": last}
    run = started({"scheduler": stepped}, data=data, optim={"name": "sgd", "lr": 0.1})
    rates = [row[1] for row in go_on(run, range(steps))]
    assert rates == pytest.approx([0.1 / steps ** (done // 3) for done in range(steps)])


def test_a_skipped_update_moves_neither_weights_nor_rate() -> None:
    """The first losses overflow: the scale is halved until one doesn't."""
    methods = {
        "loss": lambda s, m, b: Classes.loss(s, m, b) * 2.0**10,
        "optimizer": by(optim.SGD, lr=0.001, momentum=0.9, fused=True),
        "scheduler": halved,
    }
    run = started(methods, precision={"mode": "fp16", "initial_scale": 2.0**14})
    weight = run.gradients.parameters[0].detach().clone()
    done = 0
    for step in range(STEPS):
        before = run.gradients.parameters[0].detach().clone()
        ((_, rate, updates, *_),) = go_on(run, range(step, step + 1))
        assert torch.equal(before, run.gradients.parameters[0]) == (updates == done)
        assert rate == 0.001 * 0.5**done and (step or not updates), "the first is skipped"
        done = int(updates)
    assert done > 1
    assert bool(run.gradients.parameters[0].isfinite().all()) and not torch.equal(weight, before)


def parts(_: Any, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    right = F.cross_entropy(logits := model(batch["x"]), batch["y"], reduction="none")
    return {"right": right, "small": 0.1 * logits.square().sum(1)}


SEVERAL = {"losses": ("small", "right"), "loss": parts}


def rows_on(world: World, how: str) -> tuple[list[list[float]], Any, list[float]]:
    data = {"micro_batch_size": 2, "last_batch": "weighted"}
    recipe = recipe_of(parallel={"threads": 1, "reduction": how}, data=data)
    run = build(recipe, task_of(**SEVERAL), world, 0)
    run.replica.train()
    rows, batches = [], run.loader(run.share.batches())
    for step in range(STEPS):
        train_step(run, batches, step)
        if step % 2:
            rows.append([float(value) for value in take_metrics(run).values()])
        elif step == STEPS - 2:
            kept = run.reduction.gather_losses(run.state.loss)
    weights = [float(p.detach().sum()) for p in run.state.model.parameters()]
    return rows, numbers_of(run.state, kept.tolist())["losses"], weights


def test_several_losses_are_the_same_on_any_number_of_ranks(ranks: Ranks) -> None:
    alone = ranks.run(1, rows_on, "tree")[0]
    assert ranks.run(2, rows_on, "tree") == [alone] * 2
    assert all(loss == pytest.approx(small + right) for loss, small, right, *_ in alone[0])
    rows, _, _ = ranks.run(2, rows_on, "all_reduce")[0]
    np.testing.assert_allclose(rows, alone[0], rtol=1e-5)


def noisy_on(world: World) -> list[float]:
    run_steps(run := build(recipe_of(), task_of(optimizer=by(Noisy, lr=0.1)), world, 0), 3)
    return [float(p.detach().sum()) for p in run.state.model.parameters()]


def test_random_numbers_of_an_optimizer_are_alike_on_all_ranks(ranks: Ranks) -> None:
    one, other = ranks.run(2, noisy_on)
    assert one == other


def test_the_sums_of_several_losses_go_on_in_the_middle_of_a_row() -> None:
    run, other = started(SEVERAL), started(SEVERAL)
    run_steps(run, 3)
    kept = run.reduction.gather_losses(run.state.loss).tolist()
    load_state(other, 3, tensors_of(run.state), json.loads(json.dumps(numbers_of(run.state, kept))))
    assert torch.equal(other.state.loss, run.state.loss) and len(run.state.loss) == 3
    with pytest.raises(ValueError, match="losses"):
        load_state(other, 3, tensors_of(run.state), numbers_of(run.state, [1.0]))


FILE = """
from tests.tasks.test_own_updates import Classes, by, one_cycle, optim
class Mine(Classes):
    optimizer, scheduler = by(optim.NAdam, lr=0.01), one_cycle
"""


def test_a_schedule_that_is_over_before_the_run_is_refused(tmp_path: Path) -> None:
    """OneCycleLR raises after its last step, which a checkpoint says: an extended run would end with that."""
    (tmp_path / "mine.py").write_text(FILE)
    values = {**recipe_of().model_dump(), **read_recipe(str(tmp_path / "mine.py"))}
    recipe, longer = (recipe_file.make_recipe({**values, "epochs": epochs}) for epochs in (8, 12))
    assert forked.attempt(tmp_path / "run", recipe).code == 0
    told = forked.attempt(tmp_path / "run", longer)
    refusal(told.code, f"{told.line}\n", "step-00000016", 16, "total_steps", 24, "--init-from")


def once(owner: Any, model: nn.Module) -> optim.Optimizer:
    """As a class that makes its optimizer once."""
    owner.kept = getattr(owner, "kept", None) or SGD(owner, model)
    return owner.kept  # type: ignore[no-any-return]


SGD = by(optim.SGD, lr=0.1)
NEED = "torch.optim.Optimizer"
HIDDEN = "state_dict() load_state_dict() param_groups"
ELSEWHERE = optim.SGD([torch.zeros(1)], 0.1)
NUMBER = {"losses": ("right", "small"), "loss": lambda s, m, b: {**parts(s, m, b), "small": 0.5}}
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no optimizer": ({"optimizer": lambda *_: None}, {}, NEED),
    "it raises": ({"optimizer": lambda *_: 1 / 0}, {}, "ZeroDivisionError"),
    "a part of the model": ({"optimizer": lambda s, m: SGD(s, m[0])}, {}, "3.weight 4 6"),
    "a closure": ({"optimizer": by(optim.LBFGS)}, {}, "LBFGS.step() closure"),
    "hidden state": ({"optimizer": by(Forgetful, lr=0.1)}, {}, HIDDEN),
    "the same each time": ({"optimizer": once}, {}, "mine: optimizer twice"),
    "of a metric": ({"scheduler": lambda _, o: lr_scheduler.ReduceLROnPlateau(o)}, {}, "ReduceLROnPlateau"),
    "another's": ({"scheduler": lambda *_: lr_scheduler.StepLR(ELSEWHERE, 1)}, {}, "scheduler optimizer"),
    "keys of ours": ({"optimizer": SGD}, {"optim": {"lr": 0.1}}, "optim.lr=0.1"),
    "a warm-up of ours": ({"scheduler": one_cycle}, {"optim": {"warmup_steps": 3}}, "optim.warmup_steps=3"),
    "losses without names": ({"loss": parts}, {}, "right small"),
    "a loss too many": ({"loss": parts, "losses": ("right",)}, {}, "loss losses"),
    "a loss that is a number": (NUMBER, {}, "small"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name: str) -> None:
    methods, sections, message = WRONG[name]
    with refused(message):
        check_request(recipe_of(**sections), task_of(**methods), 1)


def test_a_state_dict_comes_back_as_it_was() -> None:
    state = {
        0: {"step": torch.tensor(3.0), "none": None},
        "a": [1, (2.5, float("inf")), True],
        "milestones": Counter({3: 1, 5: 2}),
        "lr": np.float64(0.1),
    }
    tensors, plain = take_apart(state, "own")
    assert tensors.keys() == {"own/0/step"}
    again = put_together(json.loads(json.dumps(plain)), tensors)
    assert repr(again) == repr({**state, "lr": 0.1})
    assert again[0]["step"] is not tensors["own/0/step"], "a copy: it will be changed in place"
