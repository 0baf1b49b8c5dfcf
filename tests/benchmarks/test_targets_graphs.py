"""Promise: replayed graphs overwrite nothing that a step still needs, and their target has a command."""

import contextlib
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from inspect import getclosurevars
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.func import functional_call

from benchmarks import targets, targets_graphs
from benchmarks.targets_graphs import SmallTask, graphs, small_recipe
from tests.helpers.rows import read_rows
from tests.helpers.toys import TokenTask, make_recipe
from trainer.distributed.parallel import World
from trainer.errors import BadInputError
from trainer.models.compiling import missing_for_compiling
from trainer.observe.checksums import read_checksums
from trainer.train import outputs
from trainer.train.anomaly import AnomalyDetector
from trainer.train.components.model import prepare_model
from trainer.train.components.run import build
from trainer.train.reduction import FixedGradients
from trainer.train.state import Run
from trainer.train.step import train_step

CPU = torch.device("cpu")


class Replayed(nn.Module):
    """A model as CUDA graphs give it: what it hands out lies in one place each time and doesn't last."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.places: dict[object, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> Any:
        for place in self.places.values():
            place.fill_(math.nan)  # a new iteration: what the last one handed out is gone
        return _Replay.apply(self, x, *self.model.parameters())  # type: ignore[no-untyped-call]

    def put(self, name: object, value: torch.Tensor) -> torch.Tensor:
        place = self.places.setdefault(name, torch.empty_like(value))
        return place.copy_(value).detach()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owner: Replayed, x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        names = [name for name, _ in owner.model.named_parameters()]
        ctx.owner, ctx.own = owner, [value.detach().requires_grad_() for value in values]
        with torch.enable_grad():
            ctx.out = functional_call(owner.model, dict(zip(names, ctx.own, strict=True)), (x,))
        return owner.put("out", ctx.out.detach())

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        gradients = torch.autograd.grad(ctx.out, ctx.own, given)
        return None, None, *(ctx.owner.put(number, one) for number, one in enumerate(gradients))


def trained(
    replayed: bool, micro_batch_size: int, group: dist.ProcessGroup | None = None, **sections: Any
) -> tuple[Run, list[torch.Tensor]]:
    recipe = make_recipe(
        epochs=3,
        data={"global_batch_size": 8, "micro_batch_size": micro_batch_size},
        ema={"decay": 0.9},
        **sections,
    )

    def as_graphs(*arguments: Any) -> Any:
        prepared = prepare_model(*arguments)
        return replace(prepared, call=Replayed(prepared.model), cuda_graphs=True) if replayed else prepared

    with mock.patch("trainer.train.components.run.prepare_model", as_graphs):
        run = build(recipe, TokenTask(40), World(0, 1, 0, CPU, group), 0)
    batches, state = run.loader(run.share.batches()), run.state
    for step in range(run.plan.steps):
        train_step(run, batches, step)
    assert state.average is not None
    return run, [state.loss, state.norm, *state.model.parameters(), *state.average.tensors.values()]


def keeps_gradients(run: Run) -> bool:
    return isinstance(run.gradients, FixedGradients)


@pytest.mark.parametrize("micro_batch_size", [8, 4, 2])
@pytest.mark.parametrize(
    "sections",
    [
        {"optim": {"lr": 0.01, "max_grad_norm": 1.0}},
        {"optim": {"lr": 0.01}, "anomaly": {"nonfinite": "skip"}},
        {"optim": {"lr": 0.01, "max_grad_norm": 1.0}, "parallel": {"threads": 1, "reduction": "tree"}},
    ],
    ids=["clip", "skip", "tree"],
)
def test_what_a_replay_overwrites_is_not_needed_any_more(
    sections: dict[str, Any], micro_batch_size: int
) -> None:
    _, expected = trained(False, micro_batch_size, **sections)
    run, got = trained(True, micro_batch_size, **sections)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    # One shard's gradients are used where the graph has put them; several are added up elsewhere.
    assert keeps_gradients(run) == (micro_batch_size < 8)
    assert all((p.grad is not None) == keeps_gradients(run) for p in run.gradients.parameters)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("micro_batch_size", [8, 4])
def test_ddp_has_its_own_place_for_gradients(group: dist.ProcessGroup, micro_batch_size: int) -> None:
    """So even those of a single shard are added to tensors that stay."""
    optim = {"lr": 0.01, "max_grad_norm": 1.0}
    alone, expected = trained(False, micro_batch_size, optim=optim)
    eager, _ = trained(False, micro_batch_size, group, optim=optim)
    run, got = trained(True, micro_batch_size, group, optim=optim)
    assert (keeps_gradients(alone), keeps_gradients(eager), keeps_gradients(run)) == (False, False, True)
    assert all(p.grad is not None and not p.grad.any() for p in run.gradients.parameters)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_the_emulation_overwrites_gradients() -> None:
    """Otherwise the test above would show nothing: torch takes a graph's gradient over, without a copy."""
    model = nn.Linear(2, 1, bias=False)
    replayed = Replayed(model)
    replayed(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.data_ptr() == replayed.places[0].data_ptr()
    replayed(torch.ones(1, 2))
    assert model.weight.grad.isnan().all()


def test_both_loops_run_without_a_gpu() -> None:
    found = graphs("none", 2, 3)
    assert (found["mode"], found["rounds"], found["steps"], found["measured"]) == ("none", 2, 3, False)
    assert all(found[name] > 0 for name in ("ratio", "trainer_us", "by_hand_us", "eager_us"))
    assert found["low"] <= found["ratio"] <= found["high"]


@pytest.mark.slow
@pytest.mark.skipif(missing_for_compiling(CPU) is not None, reason="nothing to compile with")
def test_both_loops_run_compiled() -> None:
    torch._dynamo.reset()
    assert graphs(rounds=1, steps=2)["mode"] == "default"


def test_both_loops_do_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many updates with the same rates, clipping and decay: they end with the same weights."""
    original = SmallTask.model

    def model(self: SmallTask) -> nn.Module:
        torch.manual_seed(0)
        return original(self)

    monkeypatch.setattr(SmallTask, "model", model)
    task = SmallTask(4, 8)
    task.x[:], task.y[:] = task.x[:1], task.y[:1]  # all samples alike, so that their order says nothing
    recipe = small_recipe("none", 4, 20)
    with contextlib.ExitStack() as stack:
        ours = targets_graphs.by_trainer(task, recipe, CPU, 20, tmp_path, stack)
        ours()
    hand = targets_graphs.by_hand(task, recipe, CPU, 20, compiled=False)
    hand()
    training, own = (getclosurevars(turn).nonlocals for turn in (ours, hand))
    run: Run = training["run"]
    assert run.state.average is not None
    weights, average = list(run.state.model.parameters()), list(run.state.average.tensors.values())
    theirs = list(zip(own["params"], own["average"], strict=True))
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, (b, _) in zip(weights, theirs, strict=True))
    # By how much the average lags behind: little beside the weights, which would hide a difference.
    lags = zip(weights, average, theirs, strict=True)
    assert all(torch.allclose(w - a, x - b, rtol=1e-2, atol=1e-6) for w, a, (x, b) in lags)


def test_the_trainers_loop_is_the_one_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed are rows, fingerprints, explanations, the watching thread and what comes between steps."""
    monkeypatch.setattr(outputs, "_PAUSE_S", 0.0)
    looked: list[int] = []
    original = AnomalyDetector.look

    def look(self: AnomalyDetector, done: int, now: bool = False) -> Any:
        looked.append(done)
        return original(self, done, now)

    monkeypatch.setattr(AnomalyDetector, "look", look)
    watching = threads("machine")
    with contextlib.ExitStack() as stack:
        recipe = small_recipe("none", 4, 100)
        turn = targets_graphs.by_trainer(SmallTask(4, 8), recipe, CPU, 50, tmp_path, stack)
        for _ in range(2):
            turn()
        assert threads("machine") == watching + 1
        rows = read_rows(tmp_path, ())
    assert threads("machine") == watching
    figures = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in figures] == [50, 100] and looked == list(range(1, 101))
    assert all(row.keys() >= {"loss", "time/wall", "time/gc", "samples_per_s"} for row in figures)
    assert [row["step"] for row in rows if row["kind"] == "memory"] == [
        0,
        64,
        64,
    ]  # start, and the end of an epoch
    trace, names, bad = read_checksums(tmp_path / "checksums.jsonl")
    assert not bad and [(row.step, len(row.tensors)) for row in trace if row.kind == "train"] == [
        (50, len(names)),
        (100, len(names)),
    ]
    (events,) = tmp_path.glob("events.out.tfevents.*")
    assert b"train/loss" in events.read_bytes()


def threads(name: str) -> int:
    return [thread.name for thread in threading.enumerate()].count(name)


def test_an_allocator_that_cannot_hold_graphs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"memory\.allocator=async can't serve CUDA graphs"):
        make_recipe(memory={"allocator": "async"}, compile={"mode": "reduce-overhead"})
    make_recipe(memory={"allocator": "async"}, compile={"mode": "default"})


def test_without_a_compiler_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets_graphs, "missing_for_compiling", lambda _: "no compiler was found")
    with pytest.raises(BadInputError, match=r"compile\.mode=reduce-overhead: no compiler was found"):
        graphs()


@pytest.mark.parametrize(
    ("changed", "met"),
    [
        ({}, True),
        ({"high": 1.06}, None),
        ({"low": 1.06, "high": 1.08}, False),
        ({"measured": False}, None),
        ({"skipped": 2}, None),
        ({"mode": "none"}, None),
    ],
)
def test_what_is_concluded(changed: dict[str, Any], met: bool | None) -> None:
    found: dict[str, Any] = {
        "ratio": 1.02,
        "low": 1.01,
        "high": 1.03,
        "trainer_us": 510,
        "by_hand_us": 500,
        "eager_us": 1500,
    }
    found |= {"skipped": 0, "measured": True, "mode": "reduce-overhead"} | changed
    (judge,) = (one.judge for one in targets.TARGETS if one.what == "small model's step with CUDA graphs")
    said, verdict = judge({"graphs": found})
    assert verdict is met and said.startswith("1.020 x (")
    assert ("torch gave up 2 graphs" in said) == ("skipped" in changed)
