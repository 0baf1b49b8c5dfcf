"""Promise: workers and prefetch fit the box, and a short search for them never fails or delays a run."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, strategies as st

from tests.helpers.few_pictures import recipe_of, write_pictures
from trainer.config.recipe import Recipe
from trainer.data.fit import Loading, Sizes, by_rule, bytes_needed, estimate, memory_budget, prefetch_by_size
from trainer.host.limits import Limits
from trainer.train.loading import SOURCE_VARIABLE, WORKERS_VARIABLE, settle, words
from trainer.train.resume import Stored
from trainer.train.run import make_task
from trainer.train.tune import loader as tuned, loader_cache as cache
from trainer.train.tune.loader import choose_loader, for_ranks, plan_turns, turn_for
from trainer.train.tune.loader_probe import Timed, Turn
from trainer.train.tune.loader_search import (
    MOST_SETTINGS,
    REPEATS,
    Found,
    Grid,
    TimeIsUp,
    choose,
    search,
    worker_counts,
)

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


def make_grid(
    start: Loading,
    most: int = 16,
    budget: float = float("inf"),
    cost: Callable[[Loading], float] | None = None,
) -> Grid:
    needs = cost or (lambda s: s.workers * s.prefetch + s.workers)
    return Grid(
        start,
        worker_counts(most, start.workers, given=False),
        sorted({1, 2, 4, start.prefetch}),
        lambda s: needs(s) <= budget,
        lambda s: int(needs(s)),
    )


SURFACES = st.tuples(
    st.floats(0.5, 20),  # steps per second of the computing
    st.floats(0.1, 8),  # batches per second of a worker
    st.floats(0, 0.2),  # of the computing, what each worker takes away
    st.sampled_from([{1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}, {1: 0.7, 2: 0.9, 3: 1.0, 4: 1.0}]),
    st.floats(0, 0.05),  # noise
    st.integers(0, 2**32),
)


def speed_of(surface: tuple[Any, ...], setting: Loading, noise: random.Random | None = None) -> float:
    compute, load, contention, by_prefetch, spread, _ = surface
    alone = compute / (1 + contention * setting.workers)
    loaded = setting.workers * load * by_prefetch[setting.prefetch]
    speed = min(alone, loaded) if setting.workers else 1 / (1 / compute + 1 / load)
    return float(speed * (1 + (noise.uniform(-spread, spread) if noise else 0.0)))


@given(SURFACES, st.sampled_from([2, 4, 8, 16, 64]), st.floats(2, 1000))
def test_the_search_is_short_within_the_budget_and_near_the_best(
    surface: tuple[Any, ...], cpus: int, budget: float
) -> None:
    start = Loading(max(1, cpus * 3 // 4), 3)
    while start.workers * start.prefetch + start.workers > budget:
        start = (
            start._replace(prefetch=start.prefetch - 1)
            if start.prefetch > 1
            else Loading(start.workers - 1, 1)
        )
    grid = make_grid(start, cpus, budget)
    noise = random.Random(surface[-1])
    measured: list[Loading] = []

    def measure(setting: Loading) -> float:
        measured.append(setting)
        return speed_of(surface, setting, noise)

    found = search(grid, measure)
    assert len(set(measured)) <= MOST_SETTINGS
    assert all(grid.fits(setting) for setting in {*measured, found.choice})
    best = max(speed_of(surface, setting) for setting in grid.all())
    # Three stages, each of which may lose the noise of a turn above and below.
    assert speed_of(surface, found.choice) >= best * (1 - 2 * surface[4]) ** 3 * 0.98


def test_what_is_as_fast_is_left_at_the_rule() -> None:
    grid = make_grid(Loading(12, 3))
    assert search(grid, lambda _: 1.0).choice == (12, 3)
    slow = {
        Loading(12, 3): [1.0, 1.2, 1.1],
        Loading(16, 3): [1.15, 1.3, 1.2],
        Loading(4, 3): [1.16, 1.2, 1.2],
    }
    assert choose(grid, slow) == (16, 3), "the rule's is outside the spread, 16 are nearer than 4"
    wide = {Loading(12, 3): [1.0, 0.9, 0.9], Loading(16, 3): [0.5, 1.3, 1.2]}
    assert choose(grid, wide) == (16, 3), "a spread so wide says nothing"
    two = make_grid(Loading(8, 2), cost=lambda s: s.prefetch)
    assert choose(two, {Loading(8, 4): [1.0, 1.1], Loading(8, 1): [1.0, 1.1]}) == (8, 1), "a tie: the cheaper"


def test_settings_take_turns_so_that_drift_does_not_decide() -> None:
    grid, clock = make_grid(Loading(3, 3), 4), iter(range(1, 1000))
    # A machine that gets slower all the time: who is measured last would lose.
    found = search(grid, lambda s: (2.0 if s.workers == 2 else 1.5) / next(clock) ** 0.1)
    assert found.choice.workers == 2
    assert all(len(series) >= REPEATS for series in found.speeds.values())


def test_what_fails_is_left_out_and_time_ends_a_search() -> None:
    grid = make_grid(Loading(12, 3))
    found = search(grid, lambda s: None if s.workers == 12 else float(s.workers))
    assert found.choice.workers == 16
    assert all(setting.workers == 12 for setting in found.failed)
    assert found.failed
    assert search(grid, lambda _: None).choice == grid.start
    turns = iter(range(8))

    def until(setting: Loading) -> float:
        if next(turns, None) is None:
            raise TimeIsUp
        return float(setting.workers)

    assert search(grid, until) == Found(grid.start), "one round has no spread"


def test_a_turn_is_whole_rounds_of_the_workers() -> None:
    assert turn_for(Loading(3, 2), 0.1, 1, 1.0)[1:3] == (7, 9)
    assert turn_for(Loading(3, 2), 5.0, 1, 1.0).steps == 3
    assert turn_for(Loading(0, 2), 0.5, 4, 1.0)[1:3] == (2, 2)
    assert turn_for(Loading(8, 2), 0.1, 4, 1.0)[1:3] == (5, 10)
    settings, seconds = plan_turns(29.0, Timed(4, 0.4, 0.1))
    assert settings == MOST_SETTINGS
    assert seconds == pytest.approx(0.867, abs=0.01)
    assert plan_turns(5.0, Timed(4, 0.4, 0.1))[0] == 2
    assert plan_turns(2.0, Timed(4, 0.4, 0.1)) == (0, 0.0)
    assert plan_turns(29.0, Timed(2, 6.0, 1.0)) == (0, 0.0)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures"))


def stored_of(recipe: Recipe) -> Stored:
    return Stored.model_validate(
        {
            "config": recipe.model_dump(mode="json"),
            "threads": 1,
            "device": {"kind": "cpu"},
            "world_size": 1,
            "status": "stopped",
        }
    )


def never(*_: object) -> Any:
    raise AssertionError("a probe was started")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trainer" / "loader"


def test_going_on_takes_what_was_stored_if_it_fits(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "Prober", never)
    monkeypatch.setattr(tuned, "read_limits", lambda: box(4))
    recipe = recipe_of(pictures)
    task = make_task(recipe)
    stored = stored_of(recipe_of(pictures, workers=2, prefetch=1))
    settings, told = for_ranks(recipe, task, 1, {}, stored)
    assert settings == ["data.workers=2", "data.prefetch=1"]
    assert told == {SOURCE_VARIABLE: "as the run was begun", WORKERS_VARIABLE: "auto"}
    # Begun on a larger machine.
    stored = stored_of(recipe_of(pictures, workers=24, prefetch=4))
    assert for_ranks(recipe, task, 1, {}, stored)[0] == ["data.workers=3", "data.prefetch=4"]
    # By a trainer that did not store them.
    old = stored_of(recipe)
    assert for_ranks(recipe, task, 1, {}, old)[0] == ["data.workers=3", "data.prefetch=4"]
    # What the user gives now is not touched.
    mixed = recipe_of(pictures, workers=1)
    assert for_ranks(mixed, task, 1, {}, stored)[0] == ["data.prefetch=4"]
    assert for_ranks(recipe_of(pictures, workers=1, prefetch=2), task, 1, {}, stored) == ([], {})


def test_no_probe_for_short_runs_resident_data_or_given_values(
    pictures: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    monkeypatch.setattr(tuned, "Prober", never)
    recipe = recipe_of(pictures).model_copy(update={"epochs": 3})
    settings, told = for_ranks(recipe, make_task(recipe), 1, {})
    assert len(settings) == 2
    assert told[SOURCE_VARIABLE] == "by rule: 15 steps are too few to search"
    long = recipe_of(pictures)
    assert "7 steps" in for_ranks(long, make_task(long), 1, {}, stop_after=7)[1][SOURCE_VARIABLE]
    digits = Recipe.model_validate({"epochs": 10**6})
    assert for_ranks(digits, make_task(digits), 1, {}) == ([], {})
    assert choose_loader(digits, "digits", [], 1) is None
    monkeypatch.setattr(tuned, "seconds_to_read", lambda *_: 1e-5)
    monkeypatch.setattr(tuned, "read_limits", lambda: box(2))
    settings, told = for_ranks(long, make_task(long), 1, {})
    assert told[SOURCE_VARIABLE] == "by rule: all the loading is 2 s of these CPUs, too little to search"
    assert not own_cache.exists()


def test_reading_is_timed_and_bad_data_left_to_the_ranks(pictures: Path, tmp_path: Path) -> None:
    recipe = recipe_of(pictures)
    assert 0 < tuned.seconds_to_read(recipe, make_task(recipe)) < 1
    for part in ("train", "val"):
        (tmp_path / part / "0").mkdir(parents=True)
        (tmp_path / part / "0" / "bad.png").write_bytes(b"nothing")
    recipe = recipe_of(tmp_path)
    assert tuned.seconds_to_read(recipe, make_task(recipe)) == 0


def test_a_plain_torchrun_goes_by_the_rule(pictures: Path) -> None:
    recipe = recipe_of(pictures)
    settled, workers, (line,) = settle(recipe, make_task(recipe), box(4), 1, {})
    assert (settled.data.workers, workers, settled.data.prefetch) == ("auto", 3, 4)
    assert line.startswith("loader: 3 workers x prefetch 4 x 0.0 MB")
    assert line.endswith("(by rule)")
    # The launcher's choice leaves the evaluation at two workers, as `auto` does; the user's does not.
    settings, told = words(recipe.data, Loading(3, 2), "searched")
    assert settings == ["data.workers=3", "data.prefetch=2"]
    chosen = recipe_of(pictures, workers=3, prefetch=2)
    settled, workers, (line,) = settle(chosen, make_task(chosen), box(4), 1, told)
    assert (settled.data.workers, workers, settled.data.prefetch) == ("auto", 3, 2)
    assert line.endswith("(searched)")
    assert settle(chosen, make_task(chosen), box(4), 1, {})[0].data.workers == 3
    alone = recipe_of(pictures, workers=0)
    assert settle(alone, make_task(alone), box(4), 1, {}) == (alone, 0, [])


class FakeProber:
    """Speeds by a table, without any process."""

    speeds: ClassVar[dict[int, float]] = {}
    broken: ClassVar[frozenset[int]] = frozenset()
    turns: ClassVar[int] = 0

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> "FakeProber":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def time(self, turn: Turn, within: float) -> Timed | str:
        assert within > 0
        type(self).turns += 1
        if turn.setting.workers in self.broken:
            return "ended with exit code -9"
        return Timed(turn.steps, turn.steps / self.speeds[turn.setting.workers], 0.01)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeProber]:
    class Fake(FakeProber):
        speeds: ClassVar[dict[int, float]] = {0: 50.0, 1: 60.0, 2: 90.0, 3: 70.0, 4: 40.0}

    monkeypatch.setattr(tuned, "Prober", Fake)
    monkeypatch.setattr(tuned, "seconds_to_read", lambda *_: 0.01)
    monkeypatch.setattr(tuned, "read_limits", lambda: box(4))
    return Fake


def test_a_search_is_kept_and_the_next_run_takes_it(
    pictures: Path, fake: type[FakeProber], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(pictures)
    task = make_task(recipe)
    said: list[str] = []
    settings, told = for_ranks(recipe, task, 1, {}, say=said.append)
    assert settings[0] == "data.workers=2"
    assert told[SOURCE_VARIABLE].startswith("searched: ")
    assert len(said) == 1
    (file,) = own_cache.iterdir()
    kept = json.loads(file.read_text())
    assert any(line.startswith("2 workers x prefetch 4: 90 steps/s") for line in kept["evidence"])

    turns = fake.turns
    again, told = for_ranks(recipe.model_copy(update={"seed": 5, "epochs": 99_999}), task, 1, {})
    assert (again, fake.turns) == (settings, turns), "neither seed nor length matter"
    assert told[SOURCE_VARIABLE] == f"from the search of {kept['date']}"
    for_ranks(recipe_of(pictures, image_size=24), task, 1, {}, say=said.append)
    assert fake.turns > turns, "another batch"
    turns = fake.turns
    monkeypatch.setattr(tuned, "read_limits", lambda: box(3))
    for_ranks(recipe, task, 1, {}, say=said.append)
    assert fake.turns > turns, "another box"


DAMAGES: dict[str, Callable[[dict[str, Any]], str]] = {
    "empty": lambda _: "",
    "torn": lambda kept: json.dumps(kept)[:-20],
    "not JSON": lambda _: "\x80\x04K\x01.",
    "deep": lambda _: "[" * 50_000,
    "another key": lambda kept: json.dumps({**kept, "key": {**kept["key"], "cpus": 999}}),
    "no number": lambda kept: json.dumps({**kept, "workers": "3"}),
    "absurd": lambda kept: json.dumps({**kept, "workers": 10**6}),
    "does not fit": lambda kept: json.dumps({**kept, "workers": 1000}),
    "other fields": lambda kept: json.dumps({**kept, "more": 1}),
    "huge": lambda kept: json.dumps({**kept, "evidence": ["x" * 100_000]}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_searched_anew(
    pictures: Path, fake: type[FakeProber], own_cache: Path, damage: str
) -> None:
    recipe = recipe_of(pictures)
    task = make_task(recipe)
    for_ranks(recipe, task, 1, {}, say=lambda _: None)
    (file,) = own_cache.iterdir()
    good = file.read_text()
    file.write_text(DAMAGES[damage](json.loads(good)))
    turns = fake.turns
    assert for_ranks(recipe, task, 1, {}, say=lambda _: None)[0][0] == "data.workers=2"
    assert fake.turns > turns
    assert json.loads(file.read_text()) | {"evidence": 0} == json.loads(good) | {"evidence": 0}


@pytest.mark.usefixtures("fake")
def test_a_cache_that_cannot_be_written_or_read_fails_nothing(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    recipe = recipe_of(pictures)
    assert for_ranks(recipe, make_task(recipe), 1, {}, say=lambda _: None)[0][0] == "data.workers=2"
    assert cache.cache_folder({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/trainer/loader")


def test_a_run_that_is_over_soon_is_not_searched_for(
    pictures: Path, fake: type[FakeProber], own_cache: Path
) -> None:
    fake.speeds = dict.fromkeys(range(5), 10_000.0)
    recipe = recipe_of(pictures)
    settings, told = for_ranks(recipe, make_task(recipe), 1, {})
    assert settings[0] == "data.workers=3"
    assert told[SOURCE_VARIABLE] == "by rule: a search would take more than 3% of about 50 s"
    assert fake.turns == 1
    fake.speeds = dict.fromkeys(range(5), 0.1)
    assert "steps of 10 s are too long" in for_ranks(recipe, make_task(recipe), 1, {})[1][SOURCE_VARIABLE]
    assert not own_cache.exists()


@pytest.mark.usefixtures("own_cache")
def test_a_probe_that_fails_is_left_out_with_the_reason(pictures: Path, fake: type[FakeProber]) -> None:
    fake.broken = frozenset({2})
    recipe = recipe_of(pictures)
    choice = choose_loader(recipe, "x", [], 1)
    assert choice is not None
    assert choice.workers == 3
    assert "2 workers x prefetch 4: left out, ended with exit code -9" in choice.evidence
    assert "1 left out" in choice.evidence[-1]
    fake.broken = frozenset(range(5))
    choice = choose_loader(recipe, "x", [], 1)
    assert choice is not None
    assert (choice.workers, choice.evidence) == (
        3,
        ["by rule: it could not be measured, ended with exit code -9"],
    )
