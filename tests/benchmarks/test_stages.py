"""Promise: each stage that is timed does its work."""

from pathlib import Path

import pytest
import torch

from benchmarks.stages import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_each_stage_runs(kind: str, tmp_path: Path) -> None:
    with torch.inference_mode():
        stages = KINDS[kind](tmp_path)
        assert len(stages) > 1
        for stage in stages.values():
            stage()
