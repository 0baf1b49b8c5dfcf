"""Workers and prefetch: the whole grid against what the search at the start of a run would take."""

import sys
from collections.abc import Sequence

from trainer.commands.bench.paired import median_interval
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override, read_recipe
from trainer.config.section import validated
from trainer.data.fit import Loading, estimate
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_NOT_MEASURED
from trainer.host.limits import read_limits, threads_per_rank
from trainer.observe.conditions import conditions
from trainer.train.loading import forked, sizes, to_choose
from trainer.train.run import check_request, make_task
from trainer.train.tune.loader import grid_of, search_now, turn_for
from trainer.train.tune.loader_probe import Prober, Timed, limit_of

_SECONDS = 2.0  # of a turn


def bench_workers(name: str, settings: Sequence[str], repeats: int) -> int:
    """Measures and prints.

    Args:
        name: Of a recipe.
        settings: KEY=VALUE.
        repeats: Interleaved turns of each setting.

    Returns:
        0 if the search's choice lies within the spread of the grid's best, 1 if not, 3 if nothing could be
        measured.

    Raises:
        BadInputError: If the recipe can't be trained here.
    """
    recipe = validated(Recipe, override(read_recipe(name), settings), name)
    task = make_task(recipe)
    check_request(recipe, task, 1)
    if repeats < 1 or not to_choose(recipe.data, task):
        print("nothing measured: the data is in memory, workers and prefetch are given, or --repeats below 1")
        return EXIT_NOT_MEASURED
    limits = read_limits()
    threads = recipe.parallel.threads
    threads = threads_per_rank(limits, 1) if threads == "auto" else threads
    grid = grid_of(recipe, task, limits, 1)
    found, evidence = search_now(recipe, limits, grid, 1, threads)
    print("\n".join([conditions(), " ".join([name, *settings]), *evidence]), flush=True)
    speeds = grid_speeds(recipe, threads, grid.all(), repeats)
    if not speeds.get(found.choice):
        print("nothing measured: see above")
        return EXIT_NOT_MEASURED
    intervals = {setting: median_interval(series) for setting, series in speeds.items()}
    best = max(intervals, key=lambda setting: intervals[setting][0])
    size, cheap = sizes(recipe, task), forked(recipe.data)
    print(
        f"\n{repeats} interleaved turns of about {_SECONDS:g} s each\n"
        "| setting | steps/s | 95 % interval | |\n|---|---|---|---|"
    )
    for setting in grid.all():
        if setting not in intervals:
            print(f"| {setting} | left out | | |")
            continue
        median, low, high = intervals[setting]
        marks = {"best": best, "rule": grid.start, "chosen": found.choice}
        which = ", ".join(mark for mark, other in marks.items() if other == setting)
        print(f"| {setting} | {median:.3g} | {low:.3g} to {high:.3g} | {which} |")
    within = intervals[found.choice][2] >= intervals[best][1]
    lost = 1 - intervals[found.choice][0] / intervals[best][0]
    print(
        f"\nchosen: {estimate(found.choice, size, limits, 1, cheap)}\n"
        f"within the spread of the best: {'yes' if within else 'NO'} ({lost:.1%} slower by the medians)"
    )
    return EXIT_DONE if within else EXIT_FAILED


def grid_speeds(
    recipe: Recipe, threads: int, settings: Sequence[Loading], repeats: int, seconds: float = _SECONDS
) -> dict[Loading, list[float]]:
    """Steps per second of each setting, in turns of so many seconds; what fails is left out."""
    speeds: dict[Loading, list[float]] = {setting: [] for setting in settings}
    accumulation = recipe.data.global_batch_size // recipe.data.micro_batch_size
    per_step = dict.fromkeys(settings, 0.0)
    with Prober(recipe, 1, threads, {}) as prober:
        for number in range(repeats + 1):  # the first is to size turns
            # Not a progress bar: its thread would keep the probe from being forked.
            print(f"round {number} of {repeats}", file=sys.stderr, flush=True)
            for offset in range(len(settings)):
                setting = settings[(number + offset) % len(settings)]
                if setting not in speeds:
                    continue
                turn = turn_for(setting, per_step[setting] or seconds / 4, accumulation, seconds)
                timed = prober.time(turn, limit_of(turn))
                if not isinstance(timed, Timed):
                    print(f"{setting}: left out, {timed}", flush=True)
                    del speeds[setting]
                    continue
                per_step[setting] = timed.seconds / timed.steps
                if number:
                    speeds[setting].append(timed.steps / timed.seconds)
    return {setting: series for setting, series in speeds.items() if series}
