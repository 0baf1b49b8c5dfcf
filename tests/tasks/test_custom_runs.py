"""Promise: a custom task in ten minutes, with all of the trainer behind it: runs, resumes, exports."""

import os
import pickle
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trainer
from tests.helpers import forked, preloaded
from tests.helpers.refusals import refusal, refused
from tests.helpers.small_task import Small
from tests.helpers.steps import assert_same_bits
from trainer.cli import main
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import read_recipe
from trainer.config.section import validated
from trainer.tasks.example import Spirals

WALK = Path(__file__).parents[2] / "docs" / "your-own-task.md"


def recipe_of(path: Path, **sections: Any) -> Recipe:
    return validated(Recipe, {**read_recipe(str(path)), **sections}, str(path))


def test_an_existing_file_stays_as_it_is(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.py").write_text("mine = 1\n")
    refusal(main(["new", "mine.py"]), capsys.readouterr().err, "mine.py")
    assert (here / "mine.py").read_text() == "mine = 1\n"


def test_an_edited_file_is_another_task_and_a_moved_one_the_same(here: Path) -> None:
    main(["new", "mine.py"])
    more = {"epochs": 1, "log": {"to": ["jsonl"]}, "parallel": {"threads": 1}}
    recipe = recipe_of(here / "mine.py", **more)
    assert forked.attempt(here / "run", recipe, stop_after=5).code == 75
    text = (here / "mine.py").read_text()
    (here / "mine.py").write_text(text.replace('reduction="none"', 'reduction="none", label_smoothing=0.1'))
    told = forked.attempt(here / "run", recipe)
    refusal(told.code, f"{told.line}\n", "method loss")
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / "yours.py").write_text(f"# A comment.\n{text}\n# Another.\n")
    assert forked.attempt(here / "run", recipe_of(here / "elsewhere" / "yours.py", **more)).code == 0


@pytest.mark.compat
@pytest.mark.usefixtures("here")
def test_fit_in_this_process() -> None:
    state = torch.get_rng_state()
    sizes = {"data.global_batch_size": 64, "data.micro_batch_size": 32, "parallel.threads": 1}
    run = trainer.fit(Spirals, {"epochs": 3, "optim.lr": 0.01, **sizes})
    assert torch.equal(torch.get_rng_state(), state), "fit leaves the caller's random numbers alone"
    assert run.metrics["accuracy"] > 0.7
    assert run.folder.parent.name == "runs"
    assert [row["step"] for row in run.rows()] == sorted(row["step"] for row in run.rows())
    points, labels = (torch.from_numpy(Spirals().data()[1][name]) for name in ("point", "label"))
    right = (run.model()(points).argmax(1) == labels).float().mean()
    assert float(right) == pytest.approx(run.metrics["accuracy"])


class Sparse(Small):
    """Most samples have nothing that counts."""

    def data(self) -> Any:
        x = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)
        return (both := {"x": x, "y": x[:, :1], "counts": np.arange(64) < 3}), both

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch), batch["counts"][:, None]


@pytest.mark.usefixtures("here")
def test_a_step_without_any_unit_trains_nothing_and_is_no_divergence() -> None:
    """Nor does it make the next one with items a leap."""
    sizes = {"data.global_batch_size": 8, "data.micro_batch_size": 4, "log.every": 1, "parallel.threads": 1}
    run = trainer.fit(Sparse, {"epochs": 6, **sizes, "anomaly.spike": "stop", "anomaly.spike_history": 10})
    losses = [row["loss"] for row in run.rows("train")]
    assert len(losses) == 48 and losses.count(0.0) > 24, "steps without any unit"
    assert max(losses) > 0


class Masking(Small):
    """As SpecAugment of wav2vec2, which draws from numpy; and from random."""

    def loss(self, model: Any, batch: Any) -> Any:
        factor = 1 + (np.random.rand() + random.random() if model.training else 0)
        return factor * torch.nn.functional.mse_loss(model(batch["x"]), batch["y"], reduction="none").sum(1)


def test_what_a_loss_draws_from_numpy_and_python_is_keyed(here: Path) -> None:
    """So a run that is resumed has the same bits; and the process has its generators' states back."""
    preloaded.call(keyed, cwd=here)  # without pytest's threads


def keyed() -> None:
    settings = {"epochs": 4, "data.global_batch_size": 4, "data.micro_batch_size": 2, "parallel.threads": 1}
    whole = trainer.fit(Masking, settings)
    np.random.seed(7)
    random.seed(7)
    before = pickle.dumps(np.random.get_state()), random.getstate()

    class Half:
        def after_step(self, row: dict[str, Any]) -> None:
            if row["step"] == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Masking, {**settings, "checkpoint.every": 3}, out="half", hooks=[Half])
    half = trainer.fit(Masking, {**settings, "checkpoint.every": 3}, out="half")
    assert (pickle.dumps(np.random.get_state()), random.getstate()) == before
    assert [row["loss"] for row in half.rows()] == [row["loss"] for row in whole.rows()]
    assert_same_bits({**half.model().state_dict()}, {**whole.model().state_dict()})


@pytest.mark.usefixtures("here")
def test_beside_another_thread_it_is_refused() -> None:
    """That may draw from the same generators, which nobody seeds under it."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int)  # a thread that waits for more
        with refused("Masking", "numpy"):
            trainer.fit(Masking, {"epochs": 2})


def test_the_walk_through(here: Path) -> None:
    """Every Python block of docs/your-own-task.md, one after another."""
    blocks = re.findall(r"^```python\n(.*?)^```$", WALK.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    (here / "walk.py").write_text("\n".join(blocks))
    done = preloaded.run([sys.executable, "walk.py"], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr


COUNTED = """
import itertools
from tests.helpers.small_task import Small
_numbers = itertools.count()
class Counted(Small):
    def __init__(self):
        self.number = next(_numbers)
    def loss(self, model, batch):
        with open(__file__ + ".numbers", "a") as file:
            print(self.number, file=file)
        return super().loss(model, batch)
"""


def test_a_trial_leaves_nothing_in_the_task_that_is_trained(here: Path) -> None:
    (here / "counted.py").write_text(COUNTED)
    data = {"workers": 0, "global_batch_size": 4, "micro_batch_size": 4}
    sections = {
        "epochs": 1,
        "max_steps": 2,
        "data": data,
        "log": {"to": ["jsonl"]},
        "parallel": {"threads": 1},
    }
    assert forked.attempt(here / "run", recipe_of(here / "counted.py", **sections)).code == 0
    tried, *_, trained = (here / "counted.py.numbers").read_text().split()
    assert (tried, trained) == ("0", "1")
