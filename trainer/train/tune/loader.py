"""Chooses the loader's workers and prefetch: by a short search where the run is long enough to pay for it."""

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from trainer.config.recipe import Recipe
from trainer.data.fit import Loading, by_rule, bytes_needed, fits
from trainer.errors import BadInputError
from trainer.host.limits import Limits, read_limits, threads_per_rank, workers_per_rank
from trainer.tasks import Task
from trainer.train.loading import RULE, forked, sizes, to_choose, words
from trainer.train.resume import Stored
from trainer.train.run import device_kind, make_plan, make_task
from trainer.train.tune import loader_cache as cache
from trainer.train.tune.loader_probe import Prober, Timed, Turn, limit_of
from trainer.train.tune.loader_search import (
    MOST_SETTINGS,
    PREFETCHES,
    REPEATS,
    Found,
    Grid,
    TimeIsUp,
    search,
    worker_counts,
)

_MOST_SECONDS = 30.0
_SHARE_OF_RUN = 0.03
# What a run must be for a first look, which takes three seconds of imports; on a GPU with CUDA's start eight.
_FEWEST_STEPS = 1000
_LEAST_LOADING = {"cpu": 100.0, "cuda": 250.0}  # seconds
_FIRST_LIMIT, _SHORTEST_TURN, _LONGEST_TURN = 2.0, 0.25, 1.0  # seconds

_STRIDE = 7919  # a prime: samples from all over the data set

Say = Callable[[str], None]


@dataclass(frozen=True)
class LoaderChoice:
    """Workers and prefetch of each rank, with lines for people on why."""

    workers: int
    prefetch: int
    evidence: list[str]


def choose_loader(
    recipe: Recipe,
    name: str,  # noqa: ARG001  (as for the micro-batch, whose probes read the recipe again)
    settings: list[str],  # noqa: ARG001
    ranks: int,
) -> LoaderChoice | None:
    """Searches, for as long as a long run would, and keeps what it finds for such runs.

    Returns:
        None if there is nothing to choose: the data is in memory, or both are given.
    """
    task = make_task(recipe)
    if not to_choose(recipe.data, task):
        return None
    limits = read_limits()
    grid = grid_of(recipe, task, limits, ranks)
    found, evidence = _measured(
        recipe, limits, grid, ranks, _threads(recipe, limits, ranks), None, {}, _quiet
    )
    return LoaderChoice(found.choice.workers, found.choice.prefetch, evidence)


def for_ranks(
    recipe: Recipe,
    task: Task,
    ranks: int,
    environment: Mapping[str, str],
    stored: Stored | None = None,
    stop_after: int | None = None,
    say: Say | None = None,
) -> tuple[list[str], dict[str, str]]:
    """What the launcher gives its ranks: settings for what is `auto`, and where they come from.

    Args:
        recipe: What is trained.
        task: Has the data.
        ranks: To be started here.
        environment: Variables that they will get.
        stored: The run that is gone on with: its workers and prefetch are taken, if they fit here.
        stop_after: Steps after which the run stops, if it does before its end.
        say: Tells people that they have to wait.
    """
    if not to_choose(recipe.data, task):
        return [], {}
    limits = read_limits()
    grid = grid_of(recipe, task, limits, ranks)
    if stored is not None:
        setting, source = _as_before(stored, grid)
        return words(recipe.data, setting, source)
    steps = min(make_plan(recipe, task).steps, stop_after or math.inf)
    if steps < _FEWEST_STEPS:
        return words(recipe.data, grid.start, f"{RULE}: {steps:,} steps are too few to search")
    threads = _threads(recipe, limits, ranks)
    folder, key = cache.cache_folder(os.environ), _key(recipe, limits, ranks, threads)
    kept = cache.read(folder, key)
    if kept is not None and grid.fits(kept.setting):
        return words(recipe.data, kept.setting, f"from the search of {kept.date}")
    micro_batches = steps * (recipe.data.global_batch_size // recipe.data.micro_batch_size)
    loading = micro_batches * seconds_to_read(recipe, task) / max(1.0, limits.cpus)
    if loading < _LEAST_LOADING[device_kind(recipe)]:
        source = f"{RULE}: all the loading is {loading:,.0f} s of these CPUs, too little to search"
        return words(recipe.data, grid.start, source)
    found, evidence = _measured(recipe, limits, grid, ranks, threads, int(steps), environment, say or _tell)
    return words(recipe.data, found.choice, evidence[-1])


def search_now(
    recipe: Recipe, limits: Limits, grid: Grid, ranks: int, threads: int
) -> tuple[Found, list[str]]:
    """Searches, for as long as a long run would; the last line of the evidence says how it went."""
    return _measured(recipe, limits, grid, ranks, threads, None, {}, _quiet)


def grid_of(recipe: Recipe, task: Task, limits: Limits, ranks: int) -> Grid:
    """What may be chosen here, from what the rule says."""
    config, size, cheap = recipe.data, sizes(recipe, task), forked(recipe.data)
    start = by_rule(config.workers, config.prefetch, size, limits, ranks, cheap)
    prefetches = sorted({*PREFETCHES, start.prefetch}) if config.prefetch == "auto" else [start.prefetch]
    return Grid(
        start,
        worker_counts(workers_per_rank(limits, ranks, quarters=4), start.workers, config.workers != "auto"),
        prefetches,
        lambda setting: fits(setting, size, limits, ranks, cheap),
        lambda setting: bytes_needed(setting, size, cheap),
    )


def seconds_to_read(recipe: Recipe, task: Task) -> float:
    """What a micro-batch takes to read in this process: the second of two; 0 if it can't be read."""
    dataset, count = task.train_data, recipe.data.micro_batch_size
    out = {name: np.empty((count, *field.shape), field.dtype) for name, field in dataset.fields.items()}
    random = np.full((count, dataset.uniforms), 0.5, np.float32)
    seconds = 0.0
    with suppress(BadInputError, OSError):  # a rank will say it
        for first in (0, count):
            began = time.perf_counter()
            dataset.read(np.arange(first, first + count) * _STRIDE % len(dataset), random, out)
            seconds = time.perf_counter() - began
    return seconds


def turn_for(setting: Loading, per_step: float, gradient_accumulation_steps: int, seconds: float) -> Turn:
    """A turn of about so many seconds: whole rounds of the workers, whose batches come in bursts.

    The clock starts when as many batches were taken as the ring holds: while it fills, a setting that
    prepares more ahead does more work than it delivers, and would seem the slower one.
    """
    burst = max(1, math.ceil(setting.workers / gradient_accumulation_steps))
    bursts = max(math.ceil(2 / burst), round(seconds / (per_step * burst)) if per_step else 0)
    filled = max(burst, math.ceil(setting.workers * setting.prefetch / gradient_accumulation_steps))
    return Turn(setting, filled + 1, burst * bursts, max(_FIRST_LIMIT, 4 * seconds))


def plan_turns(allowed: float, first: Timed) -> tuple[int, float]:
    """How many settings can be measured in so many seconds, and the seconds that are timed of each turn.

    None, 0, if not even two. The best so far takes part in each of the search's three stages.
    """
    per_step = first.seconds / first.steps
    shortest = max(_SHORTEST_TURN, 2 * per_step)
    for settings in range(MOST_SETTINGS, 1, -1):
        seconds = allowed / (REPEATS * (settings + 2)) - first.around
        if seconds >= shortest:
            return settings, min(seconds, max(_LONGEST_TURN, shortest))
    return 0, 0.0


def _measured(
    recipe: Recipe,
    limits: Limits,
    grid: Grid,
    ranks: int,
    threads: int,
    steps: int | None,
    environment: Mapping[str, str],
    say: Say,
) -> tuple[Found, list[str]]:
    """Searches within the time that a run of so many steps can spare; the last line says how it went."""
    began = time.monotonic()
    reasons: dict[Loading, str] = {}
    with Prober(recipe, ranks, threads, environment) as prober:
        gradient_accumulation_steps = max(
            1, recipe.data.global_batch_size // recipe.data.micro_batch_size // ranks
        )
        steps_of_first = 4 * max(1, math.ceil(grid.start.workers / gradient_accumulation_steps))
        turn = turn_for(grid.start, 0.0, gradient_accumulation_steps, 0.0)._replace(steps=steps_of_first)
        first = prober.time(turn, limit_of(turn))
        if isinstance(first, str):
            return Found(grid.start), [f"{RULE}: it could not be measured, {first}"]
        per_step = first.seconds / first.steps
        run_seconds = math.inf if steps is None else steps * per_step
        end = began + min(_MOST_SECONDS, _SHARE_OF_RUN * run_seconds)
        most, seconds = plan_turns(end - time.monotonic(), first)
        if not most:
            return Found(grid.start), [
                f"{RULE}: a search would take more than {_SHARE_OF_RUN:.0%} of about {run_seconds:,.0f} s"
                if run_seconds * _SHARE_OF_RUN < _MOST_SECONDS
                else f"{RULE}: steps of {per_step:.3g} s are too long to search in {_MOST_SECONDS:.0f} s"
            ]
        say(
            f"trainer: looking for workers and prefetch, {end - time.monotonic():.0f} s more at most "
            "(left out where data.workers and data.prefetch are given)"
        )

        def measure(setting: Loading) -> float | None:
            left = end - time.monotonic()
            turn = turn_for(setting, per_step, gradient_accumulation_steps, seconds)
            if left < first.around + seconds:
                raise TimeIsUp
            timed = prober.time(turn, limit_of(turn) if left > limit_of(turn) else left)
            if isinstance(timed, Timed):
                return timed.steps / timed.seconds
            if time.monotonic() >= end:
                raise TimeIsUp
            reasons[setting] = timed
            return None

        found = search(grid, measure, most)
    evidence = _evidence(found, reasons, time.monotonic() - began)
    if len(found.speeds) > 1:
        cache.write(
            cache.cache_folder(os.environ),
            cache.Kept(
                key=_key(recipe, limits, ranks, threads),
                date=time.strftime("%Y-%m-%d"),
                workers=found.choice.workers,
                prefetch=found.choice.prefetch,
                evidence=evidence,
            ),
        )
    return found, evidence


def speed_text(series: list[float]) -> str:
    """Steps per second, with their spread."""
    return f"{statistics.median(series):.3g} steps/s ({min(series):.3g} to {max(series):.3g})"


def _evidence(found: Found, reasons: Mapping[Loading, str], seconds: float) -> list[str]:
    lines = [f"{setting}: {speed_text(series)}" for setting, series in found.speeds.items() if series]
    lines += [f"{setting}: left out, {reason}" for setting, reason in reasons.items()]
    out = f", {len(reasons)} left out" if reasons else ""
    if len(found.speeds) < 2:
        return [*lines, f"{RULE}: the search found no time to compare"]
    speed = speed_text(found.speeds[found.choice])
    return [*lines, f"searched: {len(found.speeds)} settings in {seconds:.0f} s{out}; {speed}"]


def _as_before(stored: Stored, grid: Grid) -> tuple[Loading, str]:
    """What the run was begun with, if this box can hold it."""
    config = stored.config.get("data", {})
    workers, prefetch = config.get("workers"), config.get("prefetch")
    setting = Loading(
        workers if isinstance(workers, int) else grid.start.workers,
        prefetch if isinstance(prefetch, int) else grid.start.prefetch,
    )
    if setting.workers >= 0 and setting.prefetch > 0 and grid.fits(setting):
        return setting, "as the run was begun"
    return grid.start, f"{RULE}: what the run was begun with ({setting}) doesn't fit here"


def _key(recipe: Recipe, limits: Limits, ranks: int, threads: int) -> dict[str, object]:
    return cache.key_of(recipe, limits, ranks, threads, device_kind(recipe) == "cuda")


def _threads(recipe: Recipe, limits: Limits, ranks: int) -> int:
    threads = recipe.parallel.threads
    return threads_per_rank(limits, ranks) if threads == "auto" else threads


def _tell(text: str) -> None:
    with suppress(OSError):  # nobody reads
        print(text, flush=True)


def _quiet(_: str) -> None:
    """Says nothing."""
