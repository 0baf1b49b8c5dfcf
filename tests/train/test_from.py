"""Promise: a run begins from another's checkpoint with its very bits, says what differs, needs it once."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.helpers.forked import attempt, replace, small
from tests.helpers.marked import flip
from tests.helpers.refusals import refusal, refused
from tests.helpers.rows import read_rows
from tests.helpers.run_folders import changed, manifest, rewrite, same, with_state
from tests.helpers.steps import State, assert_same_bits, saved
from tests.helpers.toys import before_each_step_ends
from trainer.checkpoint.folder import read
from trainer.cli import main
from trainer.config.recipe import Recipe
from trainer.runs.folder import KEPT
from trainer.train.components.checkpoint_choice import chosen_checkpoint
from trainer.train.start import rank as trainer
from trainer.train.state import numbers_of

# The schedule stays where it is, so that only what is taken over decides.
CONSTANT: dict[str, Any] = {"optim": {"schedule": "constant", "warmup_steps": 0.0}}


def recipe(**sections: Any) -> Recipe:
    return small(**{**CONSTANT, **sections})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints of steps 15 and 16, and the best."""
    folder = tmp_path_factory.mktemp("from") / "source"
    attempt(folder, recipe(checkpoint={"best": True}), code=0)
    return folder


def checkpoint_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def at_step_0(folder: Path, of: Recipe, source: str) -> tuple[State, dict[str, Any]]:
    """The state that a run begins with: its tensors, and its numbers."""
    file = folder.with_suffix(".begun")

    def look() -> None:
        def stop_there(run: Any, *_: Any, **__: Any) -> None:
            torch.save((saved(run), {**numbers_of(run.state, []), "step": run.state.step}), file)
            os._exit(0)

        replace(trainer, "train", stop_there)

    attempt(folder, of, before=look, source=source, code=0)
    return torch.load(file)  # type: ignore[no-any-return]


def test_a_run_begins_with_the_very_bits(tmp_path: Path, source: Path) -> None:
    """All but the counts: these are a new run's."""
    tensors, numbers = at_step_0(tmp_path / "run", recipe(), str(source))
    there = read(checkpoint_of(source, 16)).tensors
    zero = torch.zeros(1, dtype=torch.int64)
    optimizer = {**there["optimizer"], "updates": zero, "ema/moved_at": zero}
    assert tensors.keys() == {"model", "optimizer", "ema"}
    assert_same_bits(tensors, {**there, "optimizer": optimizer})
    assert (numbers["step"], numbers["best"], numbers["no_better"]) == (0, None, 0)
    assert numbers["averaged_before"] == 16, "the average has found its pace"


def test_killed_before_its_first_checkpoint_it_goes_on_without_the_other_run(
    tmp_path: Path, source: Path
) -> None:
    """Then from what it keeps."""
    whole, folder, gone = tmp_path / "whole", tmp_path / "killed", tmp_path / "gone"
    attempt(whole, recipe(seed=1), source=str(source), code=0)
    assert not same(whole, source)

    def die() -> None:
        before_each_step_ends(lambda done: os.kill(os.getpid(), signal.SIGKILL) if done == 3 else None)

    shutil.copytree(source, gone)
    beside = checkpoint_of(gone, 16)  # nothing of what lies there besides is taken
    (beside / ".snapshot").mkdir()
    (beside / "link").symlink_to(whole / "config.yaml")
    assert attempt(folder, recipe(seed=1), source=str(gone), before=die).code == -signal.SIGKILL
    assert not {".snapshot", "link"} & {path.name for path in (folder / KEPT).rglob("*")}
    shutil.rmtree(gone)
    attempt(folder, recipe(seed=1), source=str(gone), code=0)
    assert same(folder, whole)
    assert read_rows(folder, ("train", "eval"))[0]["loss"] == read_rows(whole)[0]["loss"]


@pytest.mark.parametrize(
    ("sections", "kind"),
    [({"optim": {"name": "sgd", "lr": 0.01}}, "optimizer"), ({"ema": {"decay": 0}}, "ema")],
)
def test_what_does_not_fit_is_left(tmp_path: Path, source: Path, sections: dict[str, Any], kind: str) -> None:
    tensors, _ = at_step_0(tmp_path / "run", recipe(**sections), str(source))
    there = read(checkpoint_of(source, 16)).tensors
    assert {name for name in there if name != kind} == {name for name in tensors if name != kind}
    assert_same_bits({"model": tensors["model"]}, {"model": there["model"]})
    assert not any(tensor.any() for tensor in tensors.get(kind, {}).values()), "nothing of the other"


def test_an_optimizer_without_state_leaves_none(tmp_path: Path) -> None:
    plain = recipe(optim={"name": "sgd", "momentum": 0, "nesterov": False}, max_steps=5)
    attempt(tmp_path / "source", plain, code=0)
    tensors, _ = at_step_0(tmp_path / "run", recipe(), str(tmp_path / "source"))
    assert_same_bits(tensors["model"], read(checkpoint_of(tmp_path / "source", 5)).tensors["model"])
    assert not any(tensor.any() for tensor in tensors["optimizer"].values())


@pytest.fixture
def place(here: Path, source: Path) -> Path:
    """The current folder, with the recipe, and the run as `a`."""
    values = recipe(checkpoint={"best": True}).model_dump(mode="json", exclude_none=True)
    (here / "mine.yaml").write_text(yaml.safe_dump(values))
    shutil.copytree(source, here / "a")
    return here


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("mine.yaml --init-from none", "--init-from none manifest.json"),
        ("mine.yaml --init-from a@x", "--init-from a@x best last"),
        ("mine.yaml --init-from a@7", "7 16"),
        ("mine.yaml --init-from a model.width=8", "stem.weight"),
        ("mine.yaml --init-from a model.pretrained=x.safetensors", "model.pretrained"),
        ("mine.yaml --init-from a --out a", "a --init-from"),
        ("mine.yaml --init-from torn", "step-00000016 model.safetensors SHA256SUMS RUN@STEP"),
        ("--resume a seed=4", "seed 0 4"),
        ("--resume secret", "data.path --set data.path="),
    ],
)
def test_what_it_cannot_begin_from_is_one_line(
    place: Path, capfd: pytest.CaptureFixture[str], words: str, names: str
) -> None:
    shutil.copytree("a", "torn")
    flip(checkpoint_of(place / "torn", 16) / "model.safetensors", -1, 0)
    facts = manifest(place / "a")
    facts["config"]["data"]["path"] = "https://***@host/data"
    Path("secret").mkdir()
    Path("secret", "manifest.json").write_text(json.dumps(facts))
    refusal(main(["train", *words.split()]), capfd.readouterr().err, names)
    assert not (place / "runs").exists() or not list((place / "runs").iterdir()), "nothing was begun"


def test_a_checkpoint_is_chosen_by_its_step_or_as_the_best(tmp_path: Path, source: Path) -> None:
    best = read(checkpoint_of(source, 16)).state["best"][1]
    for which, step in (("15", 15), ("best", best), ("last", 16)):
        assert chosen_checkpoint(source, which, "--init-from") == (step, checkpoint_of(source, step))
    for number, odd in enumerate((5, [1.0, "x"], [1.0, 99])):
        run = changed(tmp_path / f"{number}", source)
        rewrite(run, with_state(best=odd))
        with refused("step-00000016 state.json"):
            chosen_checkpoint(run, "best", "--init-from a@best")


@pytest.mark.usefixtures("place")
def test_the_same_command_goes_on_with_the_run_that_it_began(capfd: pytest.CaptureFixture[str]) -> None:
    """With the other run's recipe, as none is given; and what it needs of that run it keeps."""
    words = ["train", "--init-from", "a@15", "--out", "b", "seed=5", "max_steps=3"]
    assert main([*words, "--stop-after", "1"]) == 75
    capfd.readouterr()
    refusal(main([*words[:2], "a@16", *words[3:]]), capfd.readouterr().err, "15")
    assert main(words) == 0
    shutil.rmtree("a")
    assert main(["verify", "b"]) == 0


def test_a_run_is_resumed_with_its_own_recipe(place: Path) -> None:
    """No recipe and no settings again, but those that are changed."""
    assert main(["train", "--resume", "a", "epochs=3", "log.every=4"]) == 0
    config, before = manifest(place / "a")["config"], recipe()
    assert (config["seed"], config["optim"]["lr"]) == (before.seed, before.optim.lr)
    assert (config["log"]["every"], manifest(place / "a")["steps_done"]) == (4, 24)
