"""Promise: the code that tests/gpu runs with NCCL on one rank is right with gloo on one rank."""

from pathlib import Path

import pytest
import torch

from tests.helpers.one_rank import check_abort, check_life

CPU = torch.device("cpu")


@pytest.mark.parametrize("way", ["ddp-fp16", "tree", "fsdp-average"])
def test_a_life_in_a_group_of_one(way: str, tmp_path: Path) -> None:
    check_life(CPU, way, tmp_path)


def test_a_group_is_left_and_another_joined() -> None:
    check_abort(CPU)
