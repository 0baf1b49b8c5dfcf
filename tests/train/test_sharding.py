"""Promise: a sharded model learns what the whole one learns, and each rank keeps its rows of it only."""

from typing import Any

import pytest
import torch
from torch import distributed as dist, nn

from tests.helpers.digits_steps import DIGITS
from tests.helpers.refusals import refused
from tests.helpers.toys import TokenTask, make_recipe
from tests.helpers.world import Ranks
from tests.train.test_accumulation import Case, expected_gradient, expected_steps, initial_model
from trainer.config.recipe import Recipe
from trainer.config.section import validated
from trainer.distributed.parallel import World
from trainer.distributed.sharding import check_sharding, weights
from trainer.train.components.run import build
from trainer.train.components.task import make_task
from trainer.train.evaluate import evaluate, shown_to_hooks
from trainer.train.state import Run, gather_tensors, tensors_of, whole_model
from trainer.train.step import train_step

FSDP: dict[str, Any] = {"strategy": "fsdp"}
HSDP: dict[str, Any] = {"strategy": "hsdp", "shard": 2}
GPT: dict[str, Any] = {
    "task": "language",
    "data": {"name": "synthetic", "samples": 64, "global_batch_size": 8, "micro_batch_size": 4},
    "language": {"layers": 3, "heads": 2, "width": 32, "sequence_length": 16},
    "model": {},
}


class Tied(TokenTask):
    """Two blocks that share a matrix, one that lends its own to the head, and a frozen one."""

    def model(self) -> nn.Module:
        model: Any = super().model()
        first, second, third, fourth = (block.inner[0] for block in model[2])
        second.weight = first.weight
        model[3] = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)).double()
        model[3][0].weight = third.weight
        fourth.weight.requires_grad_(False)
        return model  # type: ignore[no-any-return]


def the_task(kind: str, case: Case) -> TokenTask:
    return (Tied if kind == "tied" else TokenTask)(case.samples, case.ragged, blocks=4)


class Gathered:
    """In the optimizer's place: keeps the whole gradients, changes nothing."""

    def __init__(self, run: Run) -> None:
        self.run, self.gradients = run, list[torch.Tensor]()

    def step(self) -> None:
        model, rows = self.run.state.model, self.run.state.rows
        whole = []
        for name, own in weights(model).items():
            if own.grad is not None:
                shape = model.get_parameter(name).shape
                one = own.grad if rows is None else rows.gather(own.grad, shape)
                whole += [] if one is None else [one.flatten()]
        self.gradients += [torch.cat(whole).clone()] if whole else []


def sharded_gradients(
    world: World, case: Case, parallel: dict[str, Any], kind: str
) -> tuple[list[torch.Tensor], float]:
    """Whole gradients of each step, on rank 0; and the last gradient norm."""
    data = {
        "global_batch_size": case.micro_batch_size * case.gradient_accumulation_steps * case.world,
        "micro_batch_size": case.micro_batch_size,
        "resident": case.resident,
        "last_batch": case.last,
    }
    recipe = make_recipe(epochs=case.epochs, data=data, parallel={"threads": 1, **parallel})
    run = build(recipe, the_task(kind, case), world, workers=0)
    assert (run.state.rows is not None) == (world.size > 1)
    optimizer: Any = Gathered(run)
    run.state.optimizer = optimizer
    batches = run.loader(run.share.batches())
    for step in range(run.plan.steps):
        train_step(run, batches, step)
    return optimizer.gradients, float(run.state.norm)


@pytest.mark.parametrize(
    ("kind", "case", "parallel"),
    [
        ("plain", Case(17, 3, 3, 2, "weighted", 2, True, True), FSDP),
        ("plain", Case(15, 1, 2, 4, "drop", 1, False, False), FSDP),
        ("tied", Case(24, 2, 3, 2, "cross", 1, True, True), FSDP),
        ("tied", Case(24, 2, 3, 4, "cross", 1, True, True), HSDP),
    ],
)
def test_every_step_is_the_concatenated_batch(
    ranks: Ranks, kind: str, case: Case, parallel: dict[str, Any]
) -> None:
    """Also of parameters that are tied or frozen, and where groups of ranks share a model each."""
    steps = expected_steps(case)
    gradients, _ = ranks.run(case.world, sharded_gradients, case, parallel, kind)[0]
    task = the_task(kind, case)
    model = initial_model(task)
    assert len(gradients) == len(steps) > 0
    for number, samples in enumerate(steps):
        wanted = expected_gradient(task, model, samples)
        error = (gradients[number] - wanted).norm() / wanted.norm()
        assert error <= 1e-12, f"step {number}: relative error {error}"


def test_the_gradient_norm_is_that_of_all_rows(ranks: Ranks) -> None:
    case = Case(24, 2, 1, 2, "cross", 1, True, True)
    norms = [norm for _, norm in ranks.run(2, sharded_gradients, case, FSDP, "plain")]
    task = TokenTask(24, blocks=4)
    wanted = float(expected_gradient(task, initial_model(task), expected_steps(case)[-1]).norm())
    assert norms == pytest.approx([wanted, wanted], rel=1e-12)


def time_limits(world: World) -> list[float]:
    """Seconds of the groups that a sharded model sums and gathers in."""
    recipe = make_recipe(
        data={"global_batch_size": 8, "micro_batch_size": 2},
        parallel={"threads": 1, "timeout_s": 77, **HSDP},
    )
    made, new = list[Any](), getattr(dist, "new_subgroups_by_enumeration")  # noqa: B009  (untyped)

    def noted(*arguments: Any, **named: Any) -> Any:
        group, others = new(*arguments, **named)
        made.append(group)
        return group, others

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_subgroups_by_enumeration", noted)
        run = build(recipe, TokenTask(16, blocks=1), world, workers=0)
    assert run.state.rows is not None and run.state.rows.group is made[1]
    assert [dist.get_process_group_ranks(group) for group in made] == [
        [world.rank % 2, world.rank % 2 + 2],
        [world.rank // 2 * 2, world.rank // 2 * 2 + 1],
    ]
    return [one._get_backend(torch.device("cpu")).options._timeout.total_seconds() for one in made]


def test_groups_of_ranks_have_the_runs_time_limit(ranks: Ranks) -> None:
    assert ranks.run(4, time_limits) == [[77.0, 77.0]] * 4


def trained(world: World, values: dict[str, Any], parallel: dict[str, Any]) -> dict[str, Any] | None:
    """Steps of the digits with an evaluation between them, and what a checkpoint would hold; rank 0's."""
    recipe = make_recipe(**values, parallel={"threads": 1, **parallel})
    task = make_task(recipe)
    run = build(recipe, task, world, 0)
    batches, losses, metrics = run.loader(run.share.batches()), [], []
    run.replica.train()
    for step in range(4):
        before = run.state.loss.clone()
        train_step(run, batches, step)
        losses.append(float(run.state.loss - before))
        if step == 2:
            arguments = run.evaluation_loader, run.evaluation_share, world, recipe.precision
            metrics.append(evaluate(task, run.state.model, *arguments))
            with shown_to_hooks(run):  # one rank may call it alone, also several times
                fields = next(run.evaluation_loader(range(1)))
                own = [task.measure(run.state.model, fields)["loss"] for _ in range(2 * (world.rank == 0))]
                assert own[1:] == own[:1] and not run.state.model.training
            kept = [hasattr(one, "to_local") for one in run.state.model.parameters()]
            assert set(kept) == {run.state.rows is not None}, "what it gathered it has let go of"
    whole = {
        kind: {name: one.clone() for name, one in gather_tensors(run.state, kind, tensors).items()}
        for kind, tensors in tensors_of(run.state).items()
    }
    run.close()
    return {"losses": losses, "metrics": metrics, "state": whole, "norm": float(run.state.norm)}


@pytest.mark.parametrize(
    "sections",
    [
        {
            "optim": {"name": "sgd", "lr": 0.05, "weight_decay": 2.0, "decay_1d": True, "no_decay": ["stem"]},
            "anomaly": {"nonfinite": "skip"},
        },
        {"precision": {"mode": "bf16"}, **GPT, "optim": {"schedule": "constant"}},
        {"model": {"width": 8, "dropout": 0.2, "norm": "group"}, "memory": {"checkpointing": "blocks"}},
    ],
    ids=["sgd", "gathered in bf16", "checkpointed"],
)
def test_it_learns_what_ddp_learns(ranks: Ranks, sections: dict[str, Any]) -> None:
    values = {**DIGITS, **sections}
    whole = ranks.run(2, trained, values, {})[0]
    sharded = ranks.run(2, trained, values, FSDP)[0]
    rough = 3e-2 if sections.get("precision") else 1e-4
    assert sharded["losses"] == pytest.approx(whole["losses"], rel=rough)
    assert sharded["norm"] == pytest.approx(whole["norm"], rel=rough, nan_ok=True)
    for one, other in zip(sharded["metrics"], whole["metrics"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=rough)
    assert sharded["state"].keys() == whole["state"].keys()
    for kind, tensors in whole["state"].items():
        assert sharded["state"][kind].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert sharded["state"][kind][name].shape == tensor.shape
            assert sharded["state"][kind][name].dtype == tensor.dtype
    assert int(sharded["state"]["optimizer"]["updates"]) == int(whole["state"]["optimizer"]["updates"])


def overflowing(world: World) -> tuple[float, bool]:
    """An update where the rows of the last rank alone overflow: updates made, and whether weights changed."""
    recipe = make_recipe(
        data={"global_batch_size": 8, "micro_batch_size": 4},
        precision={"mode": "fp16"},
        parallel={"threads": 1, **FSDP},
    )
    run = build(recipe, TokenTask(16, dtype=torch.float32, blocks=2), world, workers=0)
    before = [one.detach().clone() for one in weights(run.state.model).values()]
    finish = run.reduction.finish

    def finish_with_an_overflow() -> torch.Tensor:
        loss = finish()
        if world.rank == world.size - 1:
            run.gradients.present()[0].fill_(torch.inf)
        return loss

    run.reduction.finish = finish_with_an_overflow  # type: ignore[method-assign]
    train_step(run, run.loader(run.share.batches()), 0)
    after = weights(run.state.model).values()
    changed = any(not torch.equal(one, was) for one, was in zip(after, before, strict=True))
    return float(run.state.lr.updates), changed


def test_an_overflow_in_one_ranks_rows_skips_the_update_of_all(ranks: Ranks) -> None:
    assert ranks.run(2, overflowing) == [(0.0, False), (0.0, False)]


def with_other_weights(world: World) -> list[torch.Tensor]:
    """The model's tensors where each rank drew others."""

    class Drawn(TokenTask):
        def model(self) -> nn.Module:
            model = super().model()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(world.rank)
            return model

    recipe = make_recipe(data={"global_batch_size": 8, "micro_batch_size": 4}, parallel=FSDP)
    run = build(recipe, Drawn(16, blocks=1), world, workers=0)
    return list(whole_model(run.state).values())


def test_all_ranks_begin_with_the_first_ones_weights(ranks: Ranks) -> None:
    model = initial_model(TokenTask(16, blocks=1))
    for one, other in zip(ranks.run(2, with_other_weights)[0], model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"parallel": {"strategy": "hsdp"}}, "parallel.strategy=hsdp parallel.shard"),
        ({"parallel": {**FSDP, "reduction": "tree"}}, "parallel.reduction=tree"),
        ({"parallel": {**FSDP, "compress": "bf16"}}, "parallel.compress DDP"),
        ({"parallel": FSDP, "optim": {"name": "muon"}}, "optim.name=muon"),
        ({"parallel": FSDP, "model": {"channels_last": True}}, "model.channels_last"),
        ({"parallel": FSDP, "compile": {"mode": "default", "scope": "model"}}, "compile.scope=blocks"),
    ],
)
def test_what_does_not_go_with_it_is_refused(sections: dict[str, Any], line: str) -> None:
    with refused(line):
        validated(Recipe, {"epochs": 1, **sections}, "a recipe")


@pytest.mark.parametrize(
    ("parallel", "ranks", "own", "line"),
    [
        (HSDP, 3, False, "3 2"),
        (HSDP, 2, False, "2"),
        (FSDP, 2, True, "optimizer parameters"),
    ],
)
def test_what_cannot_be_sharded_is_refused(
    parallel: dict[str, Any], ranks: int, own: bool, line: str
) -> None:
    config = make_recipe(parallel=parallel).parallel
    with refused(line):
        check_sharding(config, nn.Linear(2, 2), ranks, own)


def test_parameters_that_have_no_rows_or_several_types_are_refused() -> None:
    config, model = make_recipe(parallel=FSDP).parallel, nn.Linear(2, 2)
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    with refused("scale"):
        check_sharding(config, model, 2)
    with refused("float32 float64"):
        check_sharding(config, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), 2)
