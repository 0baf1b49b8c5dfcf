"""Promise: what measures, exports or asks a run's model takes that run's weights, and no other's."""

import shutil
from pathlib import Path

import pytest

from tests.helpers.forked import attempt, small
from tests.helpers.refusals import named, refused
from tests.helpers.run_folders import changed
from trainer.train.model_of_run import open_run


def test_the_newest_of_the_run_itself_is_taken(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Among its checkpoints is a newer one of a like run, of step 10."""
    mixed, theirs = changed(tmp_path / "ours", stopped), tmp_path / "theirs"
    attempt(theirs, small(seed=1), stop_after=10, code=75)
    shutil.copytree(theirs / "checkpoints/step-00000010", mixed / "checkpoints/step-00000010")
    assert open_run(mixed).weights == "checkpoints/step-00000008/ema.safetensors"
    assert named(capsys.readouterr().err, "step-00000010")
    with refused("step-00000010"):
        open_run(mixed, checkpoint="10")
    assert open_run(mixed, checkpoint="5").weights == "checkpoints/step-00000005/ema.safetensors"
    for step in (5, 8):
        shutil.rmtree(mixed / f"checkpoints/step-0000000{step}")
    with refused("weights"):
        open_run(mixed)
