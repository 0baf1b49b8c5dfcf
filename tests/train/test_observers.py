"""Promise: whatever observes a training changes no bit of it."""

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.helpers.steps import assert_same_bits, saved
from tests.helpers.toys import build_alone, rows_to
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override, read_recipe
from trainer.observe.checksums import Checksums, fingerprints_of
from trainer.observe.phases import PHASE_TIMER
from trainer.observe.profile import Profile, ProfileKind
from trainer.train import loop
from trainer.train.components.task import make_task
from trainer.train.loop import train
from trainer.train.outputs import metric_sources

CPU = torch.device("cpu")

_FEW = ["data.name=synthetic", "data.samples=8", "data.global_batch_size=2", "data.micro_batch_size=1"]
_LESS = ["language.layers=1", "language.width=48", "language.heads=3", "language.sequence_length=32"]
_SMALL = ["data.global_batch_size=4", "data.micro_batch_size=2"]
# One of each task, which is what observers ask; compiled code is the subject of others.
SMALLEST: dict[str, list[str]] = {
    "digits": [*_SMALL, "model.width=4"],
    "digits-detection": _SMALL,
    "dtmf": [*_SMALL, "model.width=4"],
    "gpt-char": [*_FEW, *_LESS],
}


@pytest.fixture(autouse=True)
def little_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("boxes", "dtmf"):
        monkeypatch.setattr(f"trainer.data.builtin.{module}.TRAIN", 8)
        monkeypatch.setattr(f"trainer.data.builtin.{module}.TEST", 2)


def trained(recipe: Recipe, task: Any, folder: Path, kind: ProfileKind | None = None) -> tuple[Any, Any]:
    """The state after two steps, all or nothing observing them; and what was drawn before, and counted."""
    precision = recipe.precision.model_copy(update={"debug": kind is not None})
    recipe = recipe.model_copy(update={"precision": precision})
    PHASE_TIMER.reset()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1)
    run, count = build_alone(recipe, task), None
    with ExitStack() as stack:
        stack.callback(run.close)
        if kind is None:
            out = rows_to(run, lambda _: None)
        else:
            checksums = Checksums(fingerprints_of(run.state.model), lambda *_: None)
            profile = Profile(folder, run.state.model, CPU, kind=kind, skip=1, warm_up=0, active=1)
            stack.callback(profile.close)
            sources = metric_sources(stack, run)
            count = sources.count
            more: Any = {"checksums": checksums, "sources": sources, "each_step": [profile.step_done]}
            out = rows_to(run, lambda _: None, **more)
        drawn = (torch.rand(2).tolist(), random.random(), np.random.rand())
        with mock.patch.object(loop, "next_evaluation", lambda *_: 0):
            train(run, out, until=min(2, run.plan.steps))
        return saved(run), (drawn, count)


@pytest.mark.parametrize(("name", "kind"), [("digits", "nvtx"), *((name, "torch") for name in SMALLEST)])
def test_no_observer_changes_a_bit(name: str, kind: ProfileKind, tmp_path: Path) -> None:
    words = ["parallel.threads=1", "data.workers=0", "compile.mode=none", *SMALLEST[name]]
    recipe = Recipe.model_validate(override(read_recipe(name), words))
    task = make_task(recipe)
    torch.set_num_threads(1)
    bare, (drawn, _) = trained(recipe, task, tmp_path)
    observed, (drawn_too, count) = trained(recipe, task, tmp_path, kind)
    assert_same_bits(bare, observed)
    assert drawn == drawn_too
    assert count is not None and count.per_sample > 0
