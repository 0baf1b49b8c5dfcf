"""Promise: whatever a recipe says, a run that was stopped anywhere ends with the bits of one that wasn't.

`python -m tests.recorded` compares 60 of these recipes with what was recorded; `make nightly` plays others.
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.recorded.__main__ import RECORD, SEEDS as RECORDED, differences
from tests.recorded.draw import BATCH, KINDS, draw
from tests.recorded.files import left_out
from tests.recorded.play import Workplace, WrongError, compare, play
from tests.recorded.refusals import REFUSALS

SEEDS = range(100, 110)  # one of each kind


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("place"))


@pytest.mark.slow  # `.ci/run` plays recorded ones
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


def test_the_record_is_whole() -> None:
    record = json.loads(RECORD.read_text())
    cases = {int(seed): one["case"] for seed, one in record["recipes"].items()}
    assert sorted(cases) == [*RECORDED] and not record["commit"].endswith("+")
    assert {case["kind"] for case in cases.values()} == set(KINDS)
    assert sum(case["recipe"]["data"]["micro_batch_size"] == BATCH for case in cases.values()) >= 20
    assert all(one["weights"] and one["order"] for one in record["recipes"].values())
    found = {words: (one["code"], one["names"]) for words, one in record["refusals"].items()}
    assert found == {one.words: (2, [*one.names]) for one in REFUSALS}
    assert len(REFUSALS) == 40 and set(record["machine"]) >= {"flags", "threads", "torch", "python"}


def _run(folder: Path, weight: float, loss: float) -> Path:
    folder.mkdir()
    save_file({"head.weight": np.full(3, weight, np.float32)}, folder / "model.safetensors")
    speed = {"samples_per_s": time.monotonic(), "time/wall": time.time()}
    row = {"kind": "train", "step": 1, "loss": loss, **speed}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def test_a_weight_or_a_record_that_differs_is_seen(tmp_path: Path) -> None:
    whole, same = _run(tmp_path / "whole", 1.0, 0.5), _run(tmp_path / "same", 1.0, 0.5)
    compare(whole, same)  # speeds are no part of it
    for odd in (_run(tmp_path / "weight", 1 + 2**-23, 0.5), _run(tmp_path / "loss", 1.0, 0.5 + 2**-40)):
        with pytest.raises(WrongError):
            compare(whole, odd)
    (same / "hooks.jsonl").write_text('{"step": 1, "figure": 0.5}\n')
    with pytest.raises(WrongError):
        compare(whole, same)
    (tmp_path / "empty").mkdir()
    with pytest.raises(WrongError):
        compare(tmp_path / "empty", tmp_path / "empty")


@pytest.mark.parametrize(
    ("found", "at"),
    [
        ({"a": {"b": [1.0, 2.0]}, "c": 3}, ""),
        ({"a": {"b": [1.0, 2.5]}, "c": 3}, "a.b[1]"),
        ({"a": {"b": [1.0]}, "c": 3}, "a.b"),
        ({"a": {"b": [1.0, 2.0]}}, "c"),
        ({"a": {"b": [1.0, 2.0]}, "c": 3, "d": None}, "d"),
        ({"a": {"b": [1.0, None]}, "c": 3}, "a.b[1]"),
    ],
)
def test_what_differs_from_the_record_is_named(found: Any, at: str) -> None:
    named = [line.partition(":")[0] for line in differences({"a": {"b": [1.0, 2.0]}, "c": 3}, found)]
    assert named == [at] * bool(at)
