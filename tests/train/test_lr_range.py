"""Promise: `trainer tune --lr` trains the run's own first steps while the rate rises, and writes nothing."""

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import preloaded
from tests.helpers.toys import TokenTask, build_alone, make_recipe
from tests.helpers.world import Ranks
from trainer.cli import main
from trainer.commands.tune.lr import lines, picture
from trainer.config.recipe import Recipe
from trainer.distributed.parallel import World
from trainer.errors import BadInputError
from trainer.optim.optimizers import LRScheduler
from trainer.train.build import build
from trainer.train.step import train_step
from trainer.train.tune.lr_range import Step, has_diverged, judge, ramp, ramp_recipe, smooth
from trainer.train.tune.lr_rank import losses_of

DATA = {"global_batch_size": 8, "micro_batch_size": 2, "workers": 0}


def test_a_ramp_rises_by_one_factor() -> None:
    rates = ramp(1e-4, 1.0, 5)
    assert rates == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0])


def test_a_smoothed_loss_is_a_mean_without_bias() -> None:
    assert smooth([3.0] * 4) == pytest.approx([3.0] * 4)
    assert smooth([1.0, 2.0])[1] == pytest.approx((0.09 * 1 + 0.1 * 2) / 0.19)


def valley() -> list[Step]:
    """A loss that falls fastest at 1e-2, is lowest near 1e-1 and then leaves all bounds."""
    rates = ramp(1e-4, 10.0, 200)
    return [Step(lr, 2.0 - 1 / (1 + (1e-2 / lr) ** 2) + (lr / 0.6) ** 3) for lr in rates]


def test_the_suggestion_is_a_tenth_of_the_lowest() -> None:
    steps = valley()
    stop = next(n for n in range(1, 200) if has_diverged([step.loss for step in steps[:n]]))
    curve = judge(steps[:stop])
    assert curve.diverged
    assert curve.smoothed[curve.lowest] == min(curve.smoothed)
    assert curve.suggestion == steps[curve.lowest].lr / 10
    assert curve.steepest is not None and 0.009 < steps[curve.steepest].lr < 0.03
    told = "\n".join(lines(curve))
    assert f"suggestion: optim.lr={curve.suggestion:.2g}, a tenth of the rate with the lowest" in told
    assert "at which the loss diverged" in told
    assert picture(curve).count("<circle") == len(curve.steps)


def test_a_loss_that_only_rises_gives_no_suggestion() -> None:
    curve = judge([Step(lr, 1.0 + n) for n, lr in enumerate(ramp(1e-3, 1.0, 20))])
    assert curve.suggestion is None
    assert "never fell" in "\n".join(lines(curve))
    picture(curve)


def test_a_loss_that_is_not_finite_ends_it() -> None:
    assert has_diverged([1.0, math.nan]) and has_diverged([math.inf])
    assert not has_diverged([1.0, 0.5, 1.0])
    curve = judge([*valley()[:100], Step(1.0, math.nan)])
    assert curve.diverged and len(curve.steps) == 100
    with pytest.raises(BadInputError, match="isn't finite already"):
        judge([Step(1.0, math.nan)])


def test_the_steps_are_the_trainings_own() -> None:
    """The same samples, randomness and arithmetic as of the run's first steps, with another rate in each."""
    recipe = make_recipe(epochs=2, data=DATA, optim={"name": "sgd", "lr": 0.05}, seed=3)
    task = TokenTask(24, ragged=False, blocks=1, dropout=0.3)
    rates = ramp(1e-3, 1.0, 6)
    test = build_alone(Recipe.model_validate(ramp_recipe(recipe, 6)), task)
    told = losses_of(test, rates)
    run = build_alone(recipe, task)
    assert isinstance(run.state.lr, LRScheduler)
    run.state.lr.follow(rates)
    run.replica.train()
    batches = run.loader(run.share.batches())
    losses = []
    for step in range(6):
        train_step(run, batches, step)
        losses.append(run.state.loss.item())
        run.state.loss.zero_()
    assert told is not None
    assert [loss for _, loss in told] == losses
    assert [lr for lr, _ in told] == torch.tensor(rates).tolist()
    for one in (test, run):
        one.close()


def test_slower_groups_follow_too() -> None:
    scheduler = LRScheduler([1.0], torch.device("cpu"), (1.0, 0.5))
    scheduler.follow([0.2, 0.4])
    assert (scheduler.of(1.0).item(), scheduler.of(0.5).item()) == pytest.approx((0.2, 0.1))
    scheduler.advance()
    assert scheduler.of(0.5).item() == pytest.approx(0.2)


def _told(world: World, recipe: dict[str, Any]) -> Any:
    run = build(Recipe.model_validate(recipe), TokenTask(24, ragged=False, blocks=1), world, 0)
    try:
        return losses_of(run, ramp(1e-3, 1e4, 40))
    finally:
        run.close()


def test_all_ranks_end_after_the_same_step(ranks: Ranks) -> None:
    parallel = {"threads": 1, "reduction": "tree"}
    recipe = make_recipe(data=DATA, optim={"name": "sgd"}, parallel=parallel)
    alone, two = (ranks.run(count, _told, ramp_recipe(recipe, 40)) for count in (1, 2))
    assert two[0] == two[1]
    assert len(alone[0]) < 40
    assert [loss for _, loss in two[0]][:-1] == [loss for _, loss in alone[0]][:-1]


def test_the_command_says_what_to_paste_and_leaves_nothing(tmp_path: Path) -> None:
    words = ["digits", "--lr", "--lr-steps", "30", "--lr-high", "100", "--plot", "curve.svg"]
    words += ["parallel.threads=1", "data.workers=0", "model.width=4", "optim.lr=5", "device=cpu"]
    done = preloaded.run([sys.executable, "-m", "trainer", "tune", *words], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.search(r"suggestion: optim\.lr=(\S+), ", done.stdout)
    assert found is not None
    *_, last = done.stdout.strip().splitlines()
    assert last.strip() == (
        f"trainer train digits parallel.threads=1 data.workers=0 model.width=4 device=cpu optim.lr={found[1]}"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["curve.svg"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lr", "--lr-low", "1", "--lr-high", "0.1"], "the lower one first"),
        (["--lr", "--lr-steps", "2"], "give 10 to 100,000"),
        (["--lr", "--check"], "leave --check and --tuned out"),
        (["--lr", "--plot", "curve.png"], "ends in .svg"),
        (["--lr", "--plot", "nowhere/curve.svg"], "no such folder"),
        (["--lr", "data.micro_batch_size=auto"], "give data.micro_batch_size=N"),
        (["--plot", "curve.svg"], "--plot is for --lr"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, capsys: Any) -> None:
    assert main(["tune", "digits", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
