"""Promise: what measures, exports or asks a run's model takes that run's weights, and no other's."""

import shutil
from pathlib import Path

import pytest

from tests.helpers.forked import attempt, small
from tests.helpers.refusals import named, refused
from trainer.train.model_of_run import open_run


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A run that was stopped after step 5; among its checkpoints is a newer one of a like run, of step 10."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert attempt(ours, stop_after=5).code == attempt(theirs, small(seed=1), stop_after=10).code == 75
    shutil.copytree(theirs / "checkpoints/step-00000010", ours / "checkpoints/step-00000010")
    return ours


def test_the_newest_of_the_run_itself_is_taken(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert open_run(mixed).weights == "checkpoints/step-00000005/ema.safetensors"
    assert named(capsys.readouterr().err, "step-00000010")
    with refused("step-00000010"):
        open_run(mixed, checkpoint="10")
    assert open_run(mixed, checkpoint="5").weights == "checkpoints/step-00000005/ema.safetensors"


def test_where_there_is_no_other_it_holds_none(mixed: Path) -> None:
    shutil.rmtree(mixed / "checkpoints/step-00000005")
    with refused("weights"):
        open_run(mixed)
