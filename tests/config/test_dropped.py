"""Promise: keys that are gone are refused with what replaces each, and the recipe is printed without them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.refusals import named
from trainer.cli import main
from trainer.config.dropped import DROPPED, DroppedKeysError
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import make_recipe
from trainer.config.section import describe

GONE = {"parallel": {"static_graph": False}, "memory": {"history": False, "names": []}}


def nested(key: str, value: Any) -> dict[str, Any]:
    section, _, name = key.rpartition(".")
    return {section: {name: value}} if section else {name: value}


@pytest.mark.parametrize("key", DROPPED)
def test_each_is_refused_from_a_recipe_and_from_settings(key: str) -> None:
    with pytest.raises(DroppedKeysError) as raised:
        make_recipe({"epochs": 1, **nested(key, "given")}, source="mine.yaml")
    assert named(str(raised.value), "mine.yaml", key, DROPPED[key])
    assert yaml.safe_load(raised.value.recipe) == {"epochs": 1}
    with pytest.raises(DroppedKeysError) as raised:
        make_recipe({"epochs": 1}, [f"{key}={json.dumps('given')}"])
    assert named(str(raised.value), key) and not raised.value.recipe


def test_none_of_them_is_a_key_of_today() -> None:
    assert not DROPPED.keys() & {key.name for key in describe(Recipe)}


def test_a_line_for_each_and_the_recipe_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"data": {"name": "digits", "limit": 64}, "model": {"width": 4}, "max_steps": 1, "epochs": 1}
    file = tmp_path / "old.yaml"
    file.write_text(yaml.safe_dump({**small, **GONE}))
    assert main(["train", str(file), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 2 and not (tmp_path / "run").exists()
    assert named(said.err, file, "parallel.static_graph", "memory.history")
    assert yaml.safe_load(said.out) == {**small, "memory": {"names": []}}
