"""Promise, on one GPU: NCCL, with gloo beside it, is called as it wants to be. What isn't run is the wire."""

from pathlib import Path

import pytest

from tests.gpu import GPU, MARKS
from tests.helpers.one_rank import WAYS, check_abort, check_life

pytestmark = MARKS


@pytest.mark.parametrize("way", WAYS)
def test_a_life_in_a_group_of_one(way: str, tmp_path: Path) -> None:
    check_life(GPU, way, tmp_path)


def test_a_group_is_left_and_another_joined() -> None:
    check_abort(GPU)
