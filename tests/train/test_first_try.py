"""Promise: a first try of a recipe is one step and one evaluation that leave nothing."""

import os
import sys
from pathlib import Path

import pytest

from tests.helpers import preloaded
from tests.helpers.refusals import refusal
from trainer.cli import main
from trainer.config.recipe_file import load_recipe, recipe_names
from trainer.train.options import fast_settings


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_can_be_tried(name: str) -> None:
    whole = load_recipe(name, [])
    tried = load_recipe(name, fast_settings(whole))
    assert (tried.max_steps, tried.data.limit) == (1, whole.data.global_batch_size)


def test_a_fast_try_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    words = ["train", "digits", "--fast-dev-run", "parallel.threads=1", "seed=4"]
    ended = preloaded.run(
        [sys.executable, "-m", "trainer", *words],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
    )
    assert ended.returncode == 0, ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]
    assert not [path for path in (tmp_path / "tmp").iterdir() if path.name.startswith("trainer-try")]


@pytest.mark.parametrize(
    ("typed", "meant"), [("--fast_dev_run=1", "--fast-dev-run"), ("--ckpt_path", "--resume")]
)
def test_the_flags_of_others_lead_to_ours(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits", typed])
    refusal(int(str(ended.value)), capsys.readouterr().err, meant)


def test_of_a_run_that_stays_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["train", "digits", "--fast-dev-run", "--out", "x"])
    refusal(code, capsys.readouterr().err, "--fast-dev-run --out")
