"""Promise: sets are mixed in the proportion of their weights, as arithmetic of the position."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.helpers.chat_folders import chat_folder
from tests.helpers.refusals import refused
from tests.helpers.small_gpt import SMALL
from tests.helpers.toys import make_recipe
from trainer.config.recipe import Recipe
from trainer.data.sampling.mix_order import mixed
from trainer.data.sampling.plan import Plan
from trainer.train.components.task import data_of, make_plan, make_task


def test_shares_are_small_whole_numbers() -> None:
    for weights, shares in {(3, 1): (3, 1), (0.75, 0.25): (3, 1), (3.14159, 2.71828): (67, 58)}.items():
        assert mixed([*"ab"], [9] * 2, weights).shares == shares
    assert mixed([*"abc"], [9] * 3, (0.1, 0.7, 0.2)).shares == (1, 7, 2)


@pytest.mark.parametrize(("weights", "sizes"), [((1, 2000), (5, 5)), ((1e-9, 1), (5, 5)), ((1, 1), (5, 0))])
def test_what_could_not_be_drawn(weights: tuple[float, ...], sizes: tuple[int, ...]) -> None:
    with refused("data.mix"):
        mixed([*"ab"], sizes, weights)


@pytest.mark.parametrize("sizes", [(7, 30), (1, 1500), (40, 3)])
def test_each_block_has_its_shares_and_each_set_its_epochs(sizes: tuple[int, int]) -> None:
    draws = mixed("ab", sizes, (3, 1))
    samples = sum(sizes)
    position = np.arange(40 * samples)
    found = draws.drawn(5, position // samples, position % samples)
    of_b = found >= sizes[0]
    assert (of_b.reshape(-1, 4).sum(1) == 1).all(), "of four in a row one is of the second"
    assert len({tuple(row) for row in of_b.reshape(-1, 4).tolist()}) == 4, "not always the same one"
    for blocks in (1, 2, 9, 50):
        counts = np.bincount(found[: 4 * blocks], minlength=samples)
        for part in (counts[: sizes[0]], counts[sizes[0] :]):
            assert part.max() - part.min() <= 1, "all of a set come once before one comes again"
    first = [found[begin : begin + 4].tolist() for begin in range(0, 40 * samples, 4 * samples)]
    assert len({tuple(one) for one in first}) > 5, "another order in each epoch"


@pytest.mark.parametrize("last", ["cross", "drop", "weighted"])
def test_any_part_of_a_plan_is_that_of_the_whole(last: Any) -> None:
    plan = Plan(29, 8, 2, 50, last, seed=3, draws=mixed("ab", (9, 20), (1, 2)))
    whole = plan.read(np.arange(60)).sample
    assert all(np.array_equal(plan.read(np.array([n])).sample[0], whole[n]) for n in (0, 7, 33, 59))
    other = Plan(29, 8, 2, 50, last, seed=4, draws=plan.draws).read(np.arange(60)).sample
    assert not np.array_equal(whole, other)


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chat_folder(tmp_path / "chat")
    for name, count, text in (("a", 30, "the cat"), ("b", 9, "four")):
        rows = [json.dumps({"prompt": f"{n}:", "completion": f" {text} {n}"}) for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    return tmp_path


def recipe_of(folder: Path, mix: Any, **data: Any) -> Recipe:
    sets = {name if ":" in name else f"{folder}/{name}.jsonl": one for name, one in mix.items()}
    sizes = {"name": "conversations", "global_batch_size": 8, "micro_batch_size": 4}
    language = {**SMALL, "tokenizer": str(folder / "chat")}
    return make_recipe(task="language", language=language, data={**sizes, "mix": sets, **data})


def test_sets_of_conversations_are_mixed(sets: Path) -> None:
    recipe = recipe_of(sets, {"a": 1, "b": 3})
    task = make_task(recipe)
    plan = make_plan(recipe, task)
    assert plan.draws is not None and f"3 of {sets}/b.jsonl" in plan.draws.told()
    labels = cast(Any, task.train_data.arrays)["label"][plan.read(np.arange(40)).sample.reshape(-1)]
    assert labels.reshape(-1, 4).sum(1).tolist() == [3] * 40
    assert len(task.evaluation_data) > 1
    limited = recipe_of(sets, {"a": 1, "b": 3}, limit=4)
    draws = make_plan(limited, make_task(limited)).draws
    assert draws is not None and "4 draws" in draws.told()


def test_a_mix_is_known_by_its_content_and_weights_not_by_the_place_of_its_files(sets: Path) -> None:
    def known(folder: Path, weight: float = 3) -> dict[str, str]:
        recipe = recipe_of(folder, {"a": 1, "b": weight})
        return data_of(recipe, make_task(recipe))

    before, elsewhere = known(sets), sets / "elsewhere"
    elsewhere.mkdir()
    for file in (*sets.glob("*.jsonl"), sets / "chat"):
        file.rename(elsewhere / file.name)
    assert known(elsewhere) == before
    other = known(elsewhere, 1)
    assert {name for name in before if other[name] != before[name]} == {"order"}


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ({"path": "a.jsonl"}, "data.path data.mix"),
        ({"class_weights": "balanced"}, "data.class_weights data.mix"),
        ({"mix": {"a": 0}}, "data.mix a"),
        ({"mix": {"https://example.org/a": 1}}, "data.mix https://example.org/a"),
        ({"name": "stdlib"}, "data.mix data.name=conversations"),
    ],
)
def test_what_does_not_go_with_a_mix(data: Any, names: str, tmp_path: Path) -> None:
    with refused(names, by=ValueError):
        recipe_of(tmp_path, **{"mix": {"a": 1}, **data})
