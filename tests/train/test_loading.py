"""Promise: workers and prefetch fit the box; `trainer tune` takes another setting only where it is faster."""

import os
from pathlib import Path

import pytest

from tests.helpers import preloaded
from tests.helpers.few_pictures import recipe_of, write_pictures
from trainer.config.recipe import Recipe
from trainer.data.workers import (
    Loading,
    Sizes,
    by_rule,
    bytes_needed,
    estimate,
    memory_budget,
    prefetch_by_size,
)
from trainer.errors import BadInputError
from trainer.host.limits import Limits
from trainer.launch.launcher import LocalRanks
from trainer.train.components.loading import choose_loading, settings_to_try
from trainer.train.components.task import make_task
from trainer.train.start.tune.job import Job, time_loading
from trainer.train.start.tune.search import fastest

GIB = 1 << 30
IMAGE = 224 * 224 * 3


def box(cpus: float = 16, memory: int = 64 * GIB, pids: int | None = None) -> Limits:
    return Limits(cpus, memory, 1 << 26, pids)


@pytest.mark.parametrize(
    ("sample", "micro_batch_size", "prefetch"),
    [
        (64, 64, 4),  # digits
        (2 * 1025, 32, 4),  # tokens
        (96 * 96 * 3, 64, 4),
        (IMAGE, 64, 3),
        (IMAGE, 256, 2),
        (512 * 512 * 3, 8, 3),
        (16 * IMAGE, 1, 1),  # video
    ],
)
def test_prefetch_by_the_size_of_a_sample(sample: int, micro_batch_size: int, prefetch: int) -> None:
    assert prefetch_by_size(Sizes(sample, sample * micro_batch_size)) == prefetch


@pytest.mark.parametrize(
    ("limits", "ranks", "expected"),
    [
        (box(16), 1, Loading(12, 3)),
        (box(16), 4, Loading(3, 3)),
        (box(2), 1, Loading(1, 3)),
        (box(0.5), 1, Loading(0, 3)),
        (box(16, pids=96), 1, Loading(8, 3)),
        # 512 MiB: spare slots, evaluation and processes leave room for one batch of each of six workers.
        (box(16, 2 * GIB), 1, Loading(6, 1)),
        (box(16, 256 << 20), 1, Loading(0, 1)),
        (box(16, 0), 1, Loading(12, 3)),  # nobody tells the memory
    ],
)
def test_the_rule_keeps_within_cpus_memory_and_pids(limits: Limits, ranks: int, expected: Loading) -> None:
    sizes = Sizes(IMAGE, 64 * IMAGE, 64 * IMAGE)
    setting = by_rule("auto", "auto", sizes, limits, ranks)
    assert setting == expected
    if setting.workers:
        assert bytes_needed(setting, sizes) <= memory_budget(limits, ranks)


def test_what_was_given_stays() -> None:
    sizes = Sizes(IMAGE, 64 * IMAGE, 64 * IMAGE)
    assert by_rule(12, 4, sizes, box(2, GIB), 1) == (12, 4)
    assert by_rule(2, "auto", sizes, box(2, GIB), 1) == (2, 1)
    assert by_rule("auto", 8, sizes, box(8), 1) == (6, 8)


def test_the_estimate_is_workers_times_prefetch_times_bytes() -> None:
    text = estimate(Loading(3, 3), Sizes(IMAGE, 64 * IMAGE, 0), box(4, 4 * GIB), 1)
    assert text.startswith("3 workers x prefetch 3 x 9.6 MB = 87 MB; ")
    assert text.endswith(" of the 1,074 MB that they may take")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures"))


def test_a_rank_loads_as_configured_or_by_rule(pictures: Path) -> None:
    recipe = recipe_of(pictures)
    chosen = choose_loading(recipe, make_task(recipe), box(4), 1)
    assert chosen.setting == Loading(3, 4)
    assert chosen.bytes > 0
    assert chosen.line.startswith("loader: 3 workers x prefetch 4 x 0.0 MB")
    assert chosen.line.endswith("(by rule)")
    given = recipe_of(pictures, workers=2, prefetch=1)
    chosen = choose_loading(given, make_task(given), box(4), 1)
    assert chosen.setting == Loading(2, 1)
    assert chosen.line.endswith("(as configured)")
    none = (recipe_of(pictures, workers=0), Recipe.model_validate({"epochs": 1}))  # asked for, or not needed
    for recipe in none:
        assert choose_loading(recipe, make_task(recipe), box(4), 1) == (Loading(0, 1), 0, "")


def test_what_is_tried_fits_and_begins_with_the_rules(pictures: Path) -> None:
    def tried(limits: Limits, **data: int) -> list[Loading]:
        recipe = recipe_of(pictures, **data)
        return settings_to_try(recipe, make_task(recipe), limits, 1)

    first, *others = tried(box(16))
    assert first == Loading(12, 4)
    assert set(others) == {(0, 4), (1, 4), (8, 4), (16, 4), (12, 1), (12, 2)}
    assert tried(box(2), workers=1) == [(1, 4), (1, 1), (1, 2)]
    assert tried(box(2), prefetch=3) == [(1, 3), (0, 3), (2, 3)]
    assert tried(box(2), workers=1, prefetch=3) == tried(box(2), workers=0) == []
    assert max(tried(box(16, GIB))) <= (3, 4), "a quarter of the memory holds no more"
    digits = Recipe.model_validate({"epochs": 1})
    assert settings_to_try(digits, make_task(digits), box(16), 1) == []


def test_the_rules_setting_stays_unless_another_is_clearly_faster() -> None:
    assert fastest([[10.0, 10.1, 9.9], [10.3, 10.4, 10.5]]) == 0
    assert fastest([[10.0, 10.1, 9.9], [10.3, 10.4, 10.5], [11.0, 11.5, 12.0]]) == 2
    assert fastest([[10.0, 10.1, 9.9], [9.0, 99.0, 9.0]]) == 0, "one turn says little"
    assert fastest([[10.0], [20.0]]) == 0
    assert fastest([[], [], []]) == 0


SHORT_TURNS = """
import os
if "RANK" in os.environ:
    from trainer.train.start.tune import trial
    trial._TURN_SECONDS = 0.05
"""


def test_settings_are_timed_in_one_job(pictures: Path, tmp_path: Path) -> None:
    for part in ("train", "val"):
        (tmp_path / "bad" / part / "0").mkdir(parents=True)
        (tmp_path / "bad" / part / "0" / "bad.png").write_bytes(b"nothing")
    for name in ("tmp", "code"):
        (tmp_path / name).mkdir()
    (tmp_path / "code" / "sitecustomize.py").write_text(SHORT_TURNS)
    path = f"{tmp_path / 'code'}:{Path(__file__).parents[2]}"
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": path}
    preloaded.call(_timed, pictures, tmp_path / "bad", timeout=300, env=environment)
    assert list((tmp_path / "tmp").iterdir()) == []


def _timed(pictures: str, spoiled: str) -> None:
    local = LocalRanks(2, 1, {"OMP_WAIT_POLICY": "PASSIVE"})
    recipe = recipe_of(Path(pictures), start_method="fork", global_batch_size=8)
    speeds = time_loading(Job(recipe, local), [Loading(1, 2), Loading(0, 1)], 600.0)
    assert [len(series) for series in speeds] == [3, 3]
    assert all(speed > 0 for series in speeds for speed in series)
    with pytest.raises(BadInputError, match=r"bad\.png"):
        time_loading(Job(recipe_of(Path(spoiled)), local._replace(ranks=1)), [Loading(1, 2)], 600.0)
