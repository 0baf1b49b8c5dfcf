"""Promise: a key that is gone is left out at its old default, and else refused with what replaces it."""

import json
from typing import Any

import pytest

from tests.helpers.refusals import named, refused
from trainer.config.dropped import DROPPED, without_dropped
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import make_recipe
from trainer.config.section import describe
from trainer.errors import BadInputError
from trainer.runs.differences import differences


def nested(key: str, value: Any) -> dict[str, Any]:
    section, _, name = key.rpartition(".")
    return {section: {name: value}}


@pytest.mark.parametrize("key", DROPPED)
def test_a_stored_configuration_with_its_default_is_todays(key: str) -> None:
    stored = nested(key, DROPPED[key].default)
    recipe = make_recipe({"epochs": 1, **stored})
    assert recipe == make_recipe({"epochs": 1})
    values = recipe.model_dump(mode="json")
    section, _, name = key.rpartition(".")
    values[section][name] = DROPPED[key].default
    assert differences(values, recipe.model_dump(mode="json")) == []


@pytest.mark.parametrize("key", DROPPED)
def test_another_value_is_one_line_with_the_remedy(key: str) -> None:
    with pytest.raises(BadInputError) as raised:
        make_recipe({"epochs": 1, **nested(key, "given")}, source="mine.yaml")
    assert named(str(raised.value), f"mine.yaml {key} {DROPPED[key].instead}")
    with refused(f"{key}"):
        make_recipe({"epochs": 1}, [f"{key}={json.dumps('given')}"])


def test_none_of_them_is_a_key_of_today() -> None:
    assert not DROPPED.keys() & {key.name for key in describe(Recipe)}


def test_only_the_key_itself_is_left_out() -> None:
    values = {"parallel": {"static_graph": False, "threads": 1}, "static_graph": False}
    assert without_dropped(values) == {"parallel": {"threads": 1}, "static_graph": False}
