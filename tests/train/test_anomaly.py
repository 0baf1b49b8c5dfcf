"""Promise: bad numbers are found, told and survived as the recipe says, by all ranks alike."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from tests.chaos import ending
from tests.helpers.forked import attempt, small
from tests.helpers.poison import SEED, Harm, infinite_slope, poison
from tests.helpers.refusals import named, refused
from tests.helpers.rows import read_rows
from tests.helpers.run_folders import manifest
from tests.helpers.toys import SMALL, make_recipe, rows_to
from tests.helpers.world import Ranks
from trainer.checkpoint.store import newest_good
from trainer.config.recipe import Recipe
from trainer.config.training import AnomalyConfig
from trainer.distributed.parallel import World
from trainer.train.anomaly import AnomalyDetector, Finding, judge_step, median_and_deviation, read_anomalies
from trainer.train.components.run import build
from trainer.train.components.task import make_plan, make_task
from trainer.train.loop import train


def watched(**keys: Any) -> Recipe:
    return small(**SEED, anomaly=keys)


def samples_of(recipe: Recipe, step: int) -> list[int]:
    plan = make_plan(recipe, make_task(recipe))
    micro_batches = np.arange(step * plan.micro_batches, (step + 1) * plan.micro_batches)
    samples: list[int] = plan.read(micro_batches).sample.flatten().tolist()
    return samples


@pytest.mark.parametrize(("harm", "clip"), [("loss", 1.0), ("gradient", 0.0)])
def test_stop(tmp_path: Path, harm: Harm, clip: float) -> None:
    folder = tmp_path / "run"
    recipe = small(**SEED | {"optim": {**SEED["optim"], "max_grad_norm": clip}}, checkpoint={"every": 1})
    stopped = attempt(folder, recipe, before=poison([7], harm), code=1)
    assert named(stopped.line, f"8 {harm} optim.lr") and "Traceback" not in stopped.said
    assert manifest(folder)["status"] == "diverged"
    (anomaly,) = read_anomalies(folder)
    assert (anomaly["number"], anomaly["step"], anomaly["kind"]) == (1, 8, "nonfinite")
    assert anomaly["samples"] == samples_of(recipe, 7)
    assert math.isnan(float(anomaly["loss"])) == (harm == "loss")
    # Nothing that was written lies behind the anomaly.
    newest, _ = newest_good(folder / "checkpoints")
    assert newest is not None and newest.step == 7
    assert all(tensor.isfinite().all() for tensor in newest.tensors["model"].values())
    again = attempt(folder, recipe, code=1)
    assert named(again.said, "--resume force")
    attempt(folder, recipe, "force", code=0)
    assert read_anomalies(folder) == []


def scaled(scale: float) -> Recipe:
    return small(**SEED, precision={"mode": "fp16", "initial_scale": scale}, max_steps=12)


# A recipe, what goes bad where, names in the line; step, kind and policy of each anomaly.
ENDS: dict[str, tuple[Recipe, Sequence[int], Harm, str, list[tuple[int, str, str]]]] = {
    "no row": (small(**SEED, log={"every": 50}), [15], "gradient", "16", [(16, "nonfinite", "stop")]),
    "leap": (watched(spike="stop", spike_history=10), [12], "leap", "13", [(13, "spike", "stop")]),
    "too many": (
        *(watched(nonfinite="skip", most=2), [0, 6, 9], "gradient", "7 anomaly.most=2"),
        [(1, "nonfinite", "skip"), (7, "nonfinite", "stop")],
    ),
    "off": (watched(nonfinite="off"), [3], "gradient", "evaluation finite", []),
    # Gradients that are bad whatever the scale, and a loss.
    "fp16": (scaled(4.0), range(16), "gradient", "4 gradient", [(4, "nonfinite", "stop")]),
    "fp16 loss": (scaled(4.0), [2], "loss", "3 loss", [(3, "nonfinite", "stop")]),
}


@pytest.mark.parametrize("what", ENDS)
def test_it_ends_the_run(what: str, tmp_path: Path) -> None:
    recipe, steps, harm, names, wanted = ENDS[what]
    assert named(attempt(tmp_path / "run", recipe, before=poison(steps, harm), code=1).line, names)
    found = read_anomalies(tmp_path / "run")
    assert [(one["step"], one["kind"], one["policy"]) for one in found] == wanted
    assert all(one["samples"] == samples_of(recipe, one["step"] - 1) for one in found)
    assert (tmp_path / "run" / "model.safetensors").exists() == (not wanted)


SKIPPED = [3, 7, 8]


@pytest.fixture(scope="module")
def skipped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs some of whose steps had a bad loss, or a bad gradient."""
    root, harms = tmp_path_factory.mktemp("skipped"), tuple[Harm, ...](("loss", "gradient"))
    for harm in harms:
        attempt(root / harm, watched(nonfinite="skip"), before=poison(SKIPPED, harm), code=0)
    return {harm: root / harm for harm in harms}


def test_means_are_over_the_steps_that_were_made(skipped: dict[str, Path], tmp_path: Path) -> None:
    """A step that was left out has no loss and no norm, and counts nothing in a longer row."""
    recipe = watched(nonfinite="skip")
    recipe.log.every = 1
    attempt(tmp_path / "1", recipe, before=poison(SKIPPED, "loss"), code=0)
    each = read_rows(tmp_path / "1", ("train",))
    losses = [row["loss"] for row in each]
    for name in ("loss", "grad_norm"):
        assert [step for step, row in enumerate(each) if row[name] is None] == SKIPPED
    for row in read_rows(skipped["loss"], ("train",)):
        made = [loss for loss in losses[row["step"] - 2 : row["step"]] if loss is not None]
        assert row["loss"] == sum(made) / len(made)


@pytest.mark.parametrize("harm", ["loss", "gradient"])
def test_skip(skipped: dict[str, Path], harm: Harm) -> None:
    folder = skipped[harm]
    assert [one["step"] for one in read_anomalies(folder)] == [4, 8, 9]
    assert read_rows(folder, ("train",))[-1]["updates"] == 13
    newest, _ = newest_good(folder / "checkpoints")
    assert newest is not None
    assert all(t.isfinite().all() for ts in newest.tensors.values() for t in ts.values())


def test_cut_between_the_anomalies_it_ends_the_same(skipped: dict[str, Path], tmp_path: Path) -> None:
    """And tells each once. Steps with a bad loss or a bad gradient leave the weights of those without."""
    cut, recipe = tmp_path / "cut", watched(nonfinite="skip")
    for stop_at, code in ((6, 75), (None, 0)):
        attempt(cut, recipe, stop_at=stop_at, before=poison(SKIPPED, "loss"), code=code)
    assert [one["step"] for one in read_anomalies(cut)] == [4, 8, 9]
    weights = ending(cut).weights
    assert all(ending(folder).weights == weights for folder in skipped.values())


def test_fp16_looks_for_its_scale_undisturbed(tmp_path: Path) -> None:
    """An overflow is no anomaly while the scale can be its cause."""
    attempt(tmp_path / "run", scaled(2.0**60), code=0)


def trained(
    world: World, bad_rank: int, harm: Harm, policy: str, reduction: str
) -> tuple[Finding | None, list[Any]]:
    """What ends a run of which a rank's micro-batch goes bad in step 4, and its weights."""
    parallel = {"threads": 1, "reduction": reduction}
    recipe = make_recipe(**SMALL, anomaly={"nonfinite": policy}, parallel=parallel)
    task: Any = make_task(recipe)
    run, original = build(recipe, task, world, 0), task.loss

    def harmed(model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = original(model, batch)
        if run.state.step != 3 or world.rank != bad_rank:
            return loss
        return loss + (math.nan if harm == "loss" else infinite_slope(model))

    task.loss = harmed
    assert run.recent is not None
    detector = AnomalyDetector(recipe.anomaly, run.recent, run.reduction.loss_group, 0, run.state.history)
    ended = train(run, rows_to(run), detector)
    return ended.finding, [one.tolist() for one in run.gradients.parameters]


def test_ranks_agree(ranks: Ranks) -> None:
    """One rank's micro-batch goes bad; both do the same about it."""
    for found, _ in ranks.run(2, trained, 1, "gradient", "stop", "all_reduce"):
        assert found is not None and (found.step, found.kind) == (3, "nonfinite")
    first, second = ranks.run(2, trained, 1, "loss", "skip", "tree")
    assert first == second and first[0] is None
    assert ranks.run(2, trained, 0, "gradient", "skip", "tree") == [first, first], "whatever was bad"


CONFIG = AnomalyConfig(nonfinite="stop", spike="stop", spike_deviations=5.0, spike_history=10)


def test_a_leap_is_judged_by_what_was_before() -> None:
    history: list[float] = []
    for step in range(30):
        assert judge_step(CONFIG, step, 1.0 + 0.1 * (step % 2), 1.0, history) is None
    assert len(history) == 10
    kept = list(history)
    found = judge_step(CONFIG, 30, 1.5, 1.0, history)
    assert found is not None and (found.kind, found.policy, found.median) == ("spike", "stop", 1.05)
    assert history == kept, "a leap is no part of what the next is measured by"
    assert judge_step(CONFIG, 31, 1.4, 1.0, history) is None, "1.05 + 5 x 1.4826 x 0.05 is 1.42"
    assert judge_step(CONFIG, 32, -9.0, 1.0, history) is None, "a loss that falls is no leap"
    median = median_and_deviation(history)
    assert all(judge_step(CONFIG, 33 + step, 0.0, 0.0, history) is None for step in range(9))
    assert median_and_deviation(history) == median, "a step without valid items is nothing to compare with"


def test_there_is_no_leap_without_a_history() -> None:
    history: list[float] = []
    assert all(judge_step(CONFIG, step, 10.0**step, 1.0, history) is None for step in range(10))


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf)])
def test_what_is_not_finite_goes_before_a_leap(loss: float, norm: float) -> None:
    history = [1.0] * 10
    found = judge_step(CONFIG, 3, loss, norm, history)
    assert found is not None and (found.kind, found.policy) == ("nonfinite", "stop")
    assert history == [1.0] * 10


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=50))
def test_the_deviation_is_that_of_a_normal_distribution(values: list[float]) -> None:
    median, deviation = median_and_deviation(values)
    assert median == float(np.median(values))
    wanted = 1.4826 * float(np.median(np.abs(np.array(values) - median)))
    assert deviation == pytest.approx(max(wanted, 0.01 * abs(median)))


@pytest.mark.parametrize("text", ["{}\n", "{\n"])
def test_an_odd_list_of_anomalies_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "anomalies.jsonl").write_text(text)
    with refused("anomalies"):
        read_anomalies(tmp_path)
