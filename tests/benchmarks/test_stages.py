"""Promise: each stage that is timed does its work."""

from pathlib import Path

import pytest
import torch

from benchmarks.stages import KINDS, bench_stages
from trainer.errors import BadInputError


@pytest.mark.parametrize("kind", KINDS)
def test_each_stage_runs(kind: str, tmp_path: Path) -> None:
    with torch.inference_mode():
        stages = KINDS[kind](tmp_path)
        assert len(stages) > 1
        for stage in stages.values():
            stage()


def test_no_rounds_are_no_measurement() -> None:
    with pytest.raises(BadInputError, match="--rounds"):
        bench_stages(0)
