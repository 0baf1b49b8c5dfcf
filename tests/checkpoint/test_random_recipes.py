"""Promise: whatever a recipe says, a run that was stopped anywhere ends with the bits of one that wasn't.

`python -m tests.recorded` compares 60 of these recipes with what was recorded; `make nightly` plays others.
"""

import pytest

from tests.recorded.draw import KINDS, draw
from tests.recorded.files import left_out
from tests.recorded.play import Workplace, play

SEEDS = range(100, 110)  # one of each kind


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("place"))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_recipe_is_played(seed: int, place: Workplace) -> None:
    case = draw(seed)
    if why := left_out(case.kind):
        pytest.skip(why)
    play(case, place)


def test_a_seed_gives_the_same_recipe_and_others_give_all_kinds() -> None:
    cases = [draw(seed) for seed in range(30)]
    assert [draw(seed) for seed in range(30)] == cases
    assert {case.kind for case in cases[:10]} == set(KINDS)
    alone = [case for case in cases if case.recipe["data"]["micro_batch_size"] == 8]
    assert [case.seed for case in alone] == [*range(0, 30, 3)]
    assert {case.ranks for case in alone} == {1}
