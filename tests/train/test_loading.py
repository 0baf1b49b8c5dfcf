"""Promise: workers and prefetch fit the box."""

from pathlib import Path

import pytest

from tests.helpers.few_pictures import recipe_of, write_pictures
from tests.helpers.refusals import named
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
from trainer.host.limits import Limits
from trainer.train.components.loading import choose_loading
from trainer.train.components.task import make_task

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
    assert named(text, "3 9.6 MB 87")
    assert named(text, "1,074 MB")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures"))


def test_a_rank_loads_as_configured_or_by_rule(pictures: Path) -> None:
    recipe = recipe_of(pictures)
    chosen = choose_loading(recipe, make_task(recipe), box(4), 1)
    assert chosen.setting == Loading(3, 4)
    assert chosen.bytes > 0
    assert named(chosen.line, "3 4 0.0 MB")
    assert chosen.line.endswith("(by rule)")
    given = recipe_of(pictures, workers=2, prefetch=1)
    chosen = choose_loading(given, make_task(given), box(4), 1)
    assert chosen.setting == Loading(2, 1)
    assert chosen.line.endswith("(as configured)")
    none = (recipe_of(pictures, workers=0), Recipe.model_validate({"epochs": 1}))  # asked for, or not needed
    for recipe in none:
        assert choose_loading(recipe, make_task(recipe), box(4), 1) == (Loading(0, 1), 0, "")
