"""Promise: whoever starts a run decides by one function, and each check runs where the list says."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.manifests import least_manifest
from tests.helpers.refusals import refused
from tests.helpers.toys import make_recipe
from trainer.config.section import config_hash
from trainer.runs.folder import lock
from trainer.runs.manifest import BegunFrom, Manifest, update_manifest
from trainer.train.components.task import data_of, make_plan, make_task
from trainer.train.request import Request
from trainer.train.start import prepare as preparing
from trainer.train.start.decision import Finished, From, New, Resume, decide
from trainer.train.start.rank import words_to_resume

RECIPE = make_recipe()
TASK = make_task(RECIPE)
SOURCE = BegunFrom(folder="runs/a", run_id="2", step=3, hash="0", differs=[])


def decided(folder: Path | None, resume: Any = "auto", source: Any = None) -> Any:
    return decide(RECIPE, folder, TASK, pretrained=None, resume=resume, source=source)


def stored(folder: Path, status: str) -> Path:
    config, steps = RECIPE.model_dump(mode="json"), make_plan(RECIPE, TASK).steps
    more = {"fingerprint": data_of(RECIPE, TASK), "config_hash": config_hash(RECIPE), "planned_steps": steps}
    update_manifest(folder, Manifest.model_validate(least_manifest(config=config, status=status, **more)))
    return folder


def test_where_there_is_no_run_one_begins(tmp_path: Path) -> None:
    for folder in (None, tmp_path, tmp_path / "none"):
        assert decided(folder) == New()
        assert decided(folder, source=SOURCE) == From(SOURCE)


def test_a_run_that_is_not_through_goes_on(tmp_path: Path) -> None:
    found = decided(stored(tmp_path, "failed"), source=SOURCE)
    assert isinstance(found, Resume) and found.stored.status == "failed"
    with refused(tmp_path):
        decided(tmp_path, "never")


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("diverged", 1)])
def test_a_run_that_is_through_is_told_with_its_code(tmp_path: Path, status: str, code: int) -> None:
    found = decided(stored(tmp_path, status))
    assert isinstance(found, Finished) and found.code == code
    assert isinstance(decided(tmp_path, "force"), Finished if status == "finished" else Resume)


def test_what_another_process_trained_meanwhile_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the folder and its lock."""

    def late(folder: Path) -> int:
        stored(folder, "finished")
        return lock(folder)

    monkeypatch.setattr(preparing, "lock", late)
    with ExitStack() as stack:
        prepared, _ = preparing.prepare(Request(RECIPE, "digits", tmp_path / "run"), 1, stack, TASK)
    assert prepared.ended is not None and prepared.ended[1] == 0


def test_gpus_that_pytorch_cannot_use_are_refused(tmp_path: Path) -> None:
    """Else each would be a rank on the CPU."""
    request = Request(RECIPE, "digits", tmp_path / "run", gpus=2)
    with ExitStack() as stack, refused("2 device=cpu"):
        preparing.prepare(request, 2, stack, TASK)
    assert not (tmp_path / "run").exists()


def test_a_stop_says_what_the_same_command_lacks() -> None:
    for typed, flag in (("digits", "newest"), ("digits --out a --resume=never", "never")):
        assert f"--resume {flag}" in words_to_resume(f"trainer train {typed}")
    assert not words_to_resume("trainer train digits --out a") + words_to_resume("trainer train --resume a")
