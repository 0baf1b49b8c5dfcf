"""Promise: a first try of a recipe is one step and one evaluation that leave nothing; a Mac's GPU isn't used
without a word; a bar is drawn unless it is unwanted.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import preloaded
from tests.helpers.refusals import named, refusal, refused
from trainer.cli import main
from trainer.config.recipe_file import load_recipe, recipe_names
from trainer.observe import console
from trainer.train.options import fast_settings
from trainer.train.start import checks as start_checks
from trainer.train.start.checks import Start


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
    assert "64 samples, 1 steps of 64" in ended.stdout
    assert "accuracy" in ended.stdout
    assert named(ended.stdout.rstrip(), "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]
    assert not [path for path in (tmp_path / "tmp").iterdir() if path.name.startswith("trainer-try")]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--out", "x"], "--fast-dev-run --out"),
        (["--resume", "latest"], "--fast-dev-run --resume"),
        (["--nnodes", "2"], "--fast-dev-run --nnodes"),
    ],
)
def test_of_a_run_that_stays_is_none(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "digits", "--fast-dev-run", *words]) == 2
    refusal(2, capsys.readouterr().err, named)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--fast_dev_run", "--fast-dev-run"),
        ("--fast_dev_run=1", "--fast-dev-run"),
        ("--dry-run", "--fast-dev-run"),
        ("--enable_progress_bar=False", "--no-progress"),
        ("--no-progress-bar", "--no-progress"),
        ("--overfit_batches=1", "data.limit=N"),
        ("--limit_train_batches", "data.limit=N"),
        ("--ckpt_path", "--resume RUN"),
    ],
)
def test_the_flags_of_others_lead_to_ours(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits", typed])
    refusal(int(str(ended.value)), capsys.readouterr().err, meant)


@pytest.mark.parametrize(("typed", "names"), [("--from", "--from --init-from"), ("--name", "--name --out")])
def test_a_flag_that_went_names_what_replaces_it(
    typed: str, names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits", typed, "a"])
    refusal(int(str(ended.value)), capsys.readouterr().err, names)


def test_a_macs_gpu_is_not_used_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with refused("device=mps GPU MPS device=cpu"):
        load_recipe("digits", ["device=mps"])
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for device, told in (("auto", 1), ("cpu", 0)):
        start_checks._no_mps(Start(load_recipe("digits", [f"device={device}"]), *[None] * 3))  # type: ignore[arg-type]
        assert capsys.readouterr().out.count("a Mac's GPU isn't used") == told


@pytest.mark.parametrize("bars", [True, False])
def test_no_bar_where_none_is_wanted(bars: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setattr(console._Log, "bars", True)
    if not bars:
        console.without_bars()
    assert console.told_here().bars == bars
    bar = console.ProgressBar(3)
    try:
        assert (bar._bar is not None) == bars
    finally:
        bar.close()


@pytest.mark.parametrize("named", ["RUN", "RUN/manifest.json"])
def test_a_runs_configuration_is_a_recipe_and_is_named(
    named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("epochs: 2\n")
    (tmp_path / "manifest.json").write_text("{}")
    assert load_recipe(str(tmp_path / "config.yaml"), []).epochs == 2
    assert main(["train", named.replace("RUN", str(tmp_path))]) == 2
    assert str(tmp_path / "config.yaml") in capsys.readouterr().err
