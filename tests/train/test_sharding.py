"""Promise: a sharded model learns what the whole one learns, and each rank keeps its rows of it only."""

from typing import Any

import pytest
import torch
from torch import distributed as dist, nn

from tests.helpers.digits_steps import DIGITS
from tests.helpers.refusals import refused
from tests.helpers.steps import go
from tests.helpers.toys import TokenTask, make_recipe
from tests.helpers.world import Ranks
from tests.train.test_accumulation import Case, check_gradients, initial_model, step_gradients
from trainer.config.recipe import Recipe
from trainer.config.section import validated
from trainer.distributed.parallel import World
from trainer.distributed.sharding import check_sharding, weights
from trainer.train.components.run import build
from trainer.train.components.task import make_task
from trainer.train.evaluate import evaluate, shown_to_hooks
from trainer.train.state import Run, gather_tensors, tensors_of, whole_model

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


@pytest.mark.parametrize(
    ("make", "case", "parallel"),
    [
        (TokenTask, Case(17, 3, 3, 2, "weighted", 2, True, True), FSDP),
        (TokenTask, Case(15, 1, 2, 4, "drop", 1, False, False), FSDP),
        (Tied, Case(24, 2, 3, 2, "cross", 1, True, True), FSDP),
        (Tied, Case(24, 2, 3, 4, "cross", 1, True, True), HSDP),
    ],
)
def test_every_step_is_the_concatenated_batch(ranks: Ranks, make: Any, case: Case, parallel: Any) -> None:
    """Also of parameters that are tied or frozen, and where groups of ranks share a model each."""
    answers = ranks.run(case.world, step_gradients, case, make, parallel, 4)
    check_gradients(make(case.samples, case.ragged, blocks=4), case, answers[:1])


def test_the_gradient_norm_is_that_of_all_rows(ranks: Ranks) -> None:
    case = Case(24, 2, 1, 2, "cross", 1, True, True)
    first, second = ranks.run(2, step_gradients, case, TokenTask, FSDP, 4)
    assert [first.norm, second.norm] == pytest.approx([float(first.gradients[-1].norm())] * 2, rel=1e-12)


def small(world: World, task: TokenTask, **sections: Any) -> Run:
    recipe = make_recipe(data={"global_batch_size": 8, "micro_batch_size": 2}, **sections)
    return build(recipe, task, world, workers=0)


def time_limits(world: World) -> list[float]:
    """Seconds of the groups that a sharded model sums and gathers in."""
    made, new = list[Any](), getattr(dist, "new_subgroups_by_enumeration")  # noqa: B009  (untyped)

    def noted(*arguments: Any, **named: Any) -> Any:
        group, others = new(*arguments, **named)
        made.append(group)
        return group, others

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_subgroups_by_enumeration", noted)
        run = small(world, TokenTask(16, blocks=1), parallel={"threads": 1, "timeout_s": 77, **HSDP})
    assert run.state.rows is not None and run.state.rows.group is made[1]
    first, pair = world.rank % 2, world.rank // 2 * 2
    members = [dist.get_process_group_ranks(group) for group in made]
    assert members == [[first, first + 2], [pair, pair + 1]]
    return [one._get_backend(torch.device("cpu")).options._timeout.total_seconds() for one in made]


def test_groups_of_ranks_have_the_runs_time_limit(ranks: Ranks) -> None:
    assert ranks.run(4, time_limits) == [[77.0, 77.0]] * 4


def trained(world: World, values: dict[str, Any], parallel: dict[str, Any]) -> dict[str, Any] | None:
    """Steps of the digits with an evaluation between them, and what a checkpoint would hold; rank 0's."""
    recipe = make_recipe(**values, parallel={"threads": 1, **parallel})
    task = make_task(recipe)
    run = build(recipe, task, world, 0)
    losses, model = go(run, range(3)), run.state.model
    metrics = evaluate(task, model, run.evaluation_loader, run.evaluation_share, world, recipe.precision)
    with shown_to_hooks(run):  # one rank may call it alone, also several times
        fields = next(run.evaluation_loader(range(1)))
        own = [task.measure(model, fields)["loss"] for _ in range(2 * (world.rank == 0))]
        assert own[1:] == own[:1] and not model.training
    kept = {hasattr(one, "to_local") for one in model.parameters()}
    assert kept == {run.state.rows is not None}, "what it gathered it has let go of"
    losses += go(run, range(3, 4))
    whole = {
        kind: {name: one.clone() for name, one in gather_tensors(run.state, kind, tensors).items()}
        for kind, tensors in tensors_of(run.state).items()
    }
    run.close()
    return {"losses": losses, "loss": metrics["loss"], "state": whole, "norm": float(run.state.norm)}


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
    whole, sharded = (ranks.run(2, trained, {**DIGITS, **sections}, how)[0] for how in ({}, FSDP))
    states = sharded.pop("state"), whole.pop("state")
    for name, wanted in whole.items():
        rough = 3e-2 if sections.get("precision") else 1e-4
        assert sharded[name] == pytest.approx(wanted, rel=rough, nan_ok=name == "norm"), name
    kinds = [
        {kind: {name: (t.shape, t.dtype) for name, t in part.items()} for kind, part in state.items()}
        for state in states
    ]
    assert kinds[0] == kinds[1]
    assert int(states[0]["optimizer"]["updates"]) == int(states[1]["optimizer"]["updates"])


def overflowing(world: World) -> tuple[float, bool]:
    """An update where the rows of the last rank alone overflow: updates made, and whether weights changed."""
    task = TokenTask(16, dtype=torch.float32, blocks=2)
    run = small(world, task, precision={"mode": "fp16"}, parallel={"threads": 1, **FSDP})
    before = [one.detach().clone() for one in weights(run.state.model).values()]
    finish = run.reduction.finish

    def finish_with_an_overflow() -> torch.Tensor:
        loss = finish()
        if world.rank == world.size - 1:
            run.gradients.present()[0].fill_(torch.inf)
        return loss

    run.reduction.finish = finish_with_an_overflow  # type: ignore[method-assign]
    go(run, range(1))
    after = weights(run.state.model).values()
    return float(run.state.lr.updates), not all(map(torch.equal, after, before))


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

    return list(whole_model(small(world, Drawn(16, blocks=1), parallel=FSDP).state).values())


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


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = nn.Parameter(torch.ones(()))


PLAIN = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("parallel", "ranks", "own", "model", "line"),
    [
        (HSDP, 3, False, PLAIN, "3 2"),
        (HSDP, 2, False, PLAIN, "2"),
        (FSDP, 2, True, PLAIN, "optimizer parameters"),
        (FSDP, 2, False, Scaled(), "scale"),
        (FSDP, 2, False, nn.Sequential(PLAIN, nn.Linear(2, 2).double()), "float32 float64"),
    ],
    ids=["uneven", "one group", "own optimizer", "no rows", "several types"],
)
def test_what_cannot_be_sharded_is_refused(
    parallel: Any, ranks: int, own: bool, model: Any, line: str
) -> None:
    with refused(line):
        check_sharding(make_recipe(parallel=parallel).parallel, model, ranks, own)
