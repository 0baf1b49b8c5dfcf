"""`trainer check`: what it holds, what it finds, and what it says."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainer
from tests.helpers import preloaded
from tests.helpers.commands import command
from tests.helpers.refusals import named
from tests.helpers.small_task import Small
from trainer.commands.check import training
from trainer.commands.check.check import check
from trainer.commands.check.compare import compare
from trainer.commands.check.formulas import evaluations
from trainer.commands.check.order import odd_order
from trainer.config.training import EvaluationConfig
from trainer.data.sampling.plan import Plan
from trainer.errors import BadInputError
from trainer.rng import permuted
from trainer.train import step as step_module
from trainer.train.evaluate import next_evaluation

EXAMPLE = Path(trainer.__file__).parent / "tasks" / "example.py"


def verdicts(subject: Any, *only: str) -> list[str]:
    return [row.verdict for row in check(subject, only=only).rows]


def test_the_example_holds_and_code_is_0() -> None:
    told = json.loads(command("check", EXAMPLE, "--only", "order", "--only", "plain", "--json").out)
    assert told["ok"]
    assert [(row["name"], row["verdict"]) for row in told["rows"]] == [("order", "equal"), ("plain", "equal")]
    assert "float64" in told["about"]


def test_a_fault_is_named_by_tensor_and_step_and_code_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = step_module._update

    def wrong(run: Any, step: int, loss: torch.Tensor) -> Any:
        if step == 2:
            next(iter(run.state.model.parameters())).grad *= 1.001
        return usual(run, step, loss)

    monkeypatch.setattr(step_module, "_update", wrong)
    told = command("check", EXAMPLE, "--only", "plain", code=1)
    assert named(told.out, "plain differs model/0.weight step 3")


@pytest.mark.parametrize(
    "settings",
    [
        {"optim.schedule": "step", "optim.milestones": [0.4, 1], "optim.warmup_steps": 1},
        {"optim.name": "muon", "optim.schedule": "wsd", "optim.decay": 0.5, "optim.final_lr": 0.1},
        {"optim.schedule": "one-cycle", "optim.warmup_steps": 0.3, "optim.max_grad_norm": 0.1},
        {"optim.schedule": "cosine", "optim.layer_decay": 0.5, "optim.weight_decay": 0.3},
        {"optim.name": "sgd", "optim.nesterov": False, "optim.weight_decay": 0.3}
        | {"optim.decay_1d": True, "optim.no_decay": ["1", "*.0.bias"]},
        {"optim.name": "muon", "optim.weight_decay": 0.3, "optim.no_decay": ["1.*", "3"]}
        | {"data.last_batch": "weighted", "ema.decay": 0.99, "ema.every": 2},
        {"data.last_batch": "drop", "optim.betas": [0.5, 0.6], "optim.eps": 1e-3},
        {"model.lora.rank": 1, "model.lora.targets": ["0.0", "3"], "model.lora.modules_to_save": ["2.0"]}
        | {"model.lora.dropout": 0.2, "precision.mode": "bf16", "model.frozen_dtype": "bf16"},
        {"model.freeze": ["0.*", "3"], "optim.weight_decay": 0.1, "ema.decay": 0.9},
    ],
    ids=str,
)
def test_optimizers_schedules_and_last_batches(settings: dict[str, Any]) -> None:
    report = check(Deep, {"optim.lr": 0.01, **settings}, only=["plain", "micro-batches-4"])
    assert [row.verdict for row in report.rows] == ["equal", "equal"], str(report)


def test_frozen_batchnorm_is_that_of_a_run() -> None:
    report = check(Normed, {"model.freeze": ["0.weight", "1"]}, ["plain", "micro-batches-2"])
    assert report.ok and report.rows[0].verdict == "equal", str(report)


def test_other_processes_hold(tmp_path: Path) -> None:
    names = ["workers-2", "resume", "ranks-tree"]
    words = ["check", str(EXAMPLE), "--json", *[word for name in names for word in ("--only", name)]]
    done = preloaded.run([sys.executable, "-m", "trainer", *words], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["name"], row["verdict"]) for row in rows] == [(name, "equal") for name in names]
    assert not list(tmp_path.iterdir())


def test_in_a_notebook_what_needs_processes_says_so() -> None:
    assert verdicts(Small, "again", "ranks-ddp", "resume") == ["equal", "not compared", "not compared"]


def test_batchnorm_is_not_compared_over_micro_batches_of_padding() -> None:
    """The last of three steps has four samples: one micro-batch of four and, of two, one with none."""
    own = type("Odd", (Normed,), {"RECIPE": {"epochs": 2, "data": {"last_batch": "weighted"}}})
    assert verdicts(own, "plain", "micro-batches-2") == ["equal", "not compared"]


def test_constants_in_float32_are_the_same_in_both_loops() -> None:
    class Scaled(Small):
        scale = torch.tensor([0.1])

        def loss(self, model: nn.Module, batch: Any) -> Any:
            return super().loss(model, batch) * self.scale.repeat(2).sum()

    assert "samples, float64," in check(Scaled, only=["plain"]).about
    report = check("digits", {"data.jitter": 0.2}, only=["order", "plain", "ema"])
    assert [row.verdict for row in report.rows] == ["equal"] * 3 and "samples, float64," in report.about


def test_compiled_code_draws_the_random_numbers_of_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    def look(*_: Any) -> Any:
        raise BadInputError(f"fallback_random={config.fallback_random}")

    monkeypatch.setattr(training, "build", look)
    (row,) = check(Normed, only=["compile"]).rows
    assert row.detail == "fallback_random=True" and not config.fallback_random


class Normed(Small):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def test_a_variant_whose_subject_did_not_happen_is_not_compared() -> None:
    class Still(Small):
        def optimizer(self, model: nn.Module) -> Any:
            return torch.optim.SGD(model.parameters(), 0.0)

    class Whole(Small):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            with torch.autocast("cpu", enabled=False):
                return super().loss(model, batch)

    assert verdicts(Still, "plain", "ema") == ["not compared"] * 2
    assert verdicts(Whole, "plain", "bf16", "micro-batches-2") == ["equal", "equal", "not compared"]


def test_fp16_skips_an_update_and_makes_a_later_one() -> None:
    (row,) = check(Normed, only=["fp16"]).rows
    assert row.verdict == "equal"
    skipped = int(row.detail.partition(" of 5 updates")[0].rpartition(" ")[2])
    assert 0 < skipped < 5


def test_what_fails_in_plain_pytorch_too_is_not_compared() -> None:
    class Mixed(Small):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            given = model(batch.fields["x"])
            return torch.zeros_like(batch.fields["y"]).index_add(0, torch.arange(len(given)), given)

    assert verdicts(Mixed, "plain", "bf16") == ["equal", "not compared"]


def test_a_crash_of_the_trainer_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(step_module, "_update", broken)
    report = check(Small, only=["plain", "again"])
    assert [row.verdict for row in report.rows] == ["crashed", "crashed"] and not report.ok
    assert "ZeroDivisionError" in report.rows[0].detail


def test_recomputed_code_may_ask_for_float32_and_change_what_it_reads() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.register_buffer("scale", torch.ones(1))

        scale: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner(x).float().square().to(torch.float32) * self.scale.clone()
            self.scale.mul_(0.5).add_(x.detach().mean())
            return y + x

    class Blocks(Small):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Sequential(Wide()), nn.Sequential(Wide()), nn.Linear(2, 1))

    report = check(Blocks, only=["plain", "checkpointing"])
    assert [row.verdict for row in report.rows] == ["equal", "equal"] and "float64" in report.about
    assert "float32" not in report.rows[1].detail  # no second try


def test_an_order_that_always_drops_the_same_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(30, 8, 8, 2, "drop", 0)
    assert odd_order(plan) == ""
    monkeypatch.setattr(Plan, "_sample", lambda _plan, epoch, at: permuted(0, epoch, at, 24))
    assert named(odd_order(plan), "sample 24")
    monkeypatch.setattr(Plan, "_sample", lambda _plan, _epoch, position: position // 2 * 2)
    assert named(odd_order(Plan(10, 4, 2, 1, "cross", 0)), "sample 0 2")


@pytest.mark.parametrize("every", ["1 step", "3 steps", "2 epochs", "end"])
@pytest.mark.parametrize("last", ["cross", "drop", "weighted"])
def test_evaluations_are_those_of_a_run(every: str, last: Any) -> None:
    config = EvaluationConfig(every=every)
    for samples in (8, 21, 24):
        plan, steps = Plan(samples, 8, 8, 4, last, 0), [0]
        while steps[-1] < plan.steps:
            steps.append(next_evaluation(config, plan, steps[-1]))
        assert evaluations(config.interval, plan.steps, plan.epoch_length) == steps[1:]


def test_nan_and_missing_tensors_differ() -> None:
    one, nan = {"a": torch.ones(2)}, {"a": torch.tensor([1.0, float("nan")])}
    assert compare([nan], [nan]).first is None
    assert named(str(compare([nan], [one]).first), "a step 1 nan")
    assert named(str(compare([{}], [one], [one], 1e-7).first), "a step 1 missing")
    assert compare([{"a": torch.zeros(2)}], [{}]).first is None


class Deep(Small):
    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3)), nn.Linear(2, 1))
