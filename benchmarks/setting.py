"""Cost of a setting: a recipe's steps with it and without, in turn, in one process."""

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.conditions import conditions
from benchmarks.options import add_rounds, at_least_one
from benchmarks.paired import interleaved, median_interval
from benchmarks.whole_runs import bench_whole_runs
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override, read_recipe
from trainer.config.section import validated
from trainer.distributed.parallel import World
from trainer.errors import EXIT_DONE, BadInputError
from trainer.host.limits import read_limits, threads_per_rank
from trainer.models.precision import set_matmul_mode
from trainer.train.components.loading import choose_loading
from trainer.train.components.run import build, set_determinism
from trainer.train.components.task import check_request, device_kind, make_task
from trainer.train.state import Run
from trainer.train.step import train_step

_NOT_IN_A_STEP = (
    *("log.", "checkpoint.", "evaluation.", "hooks.", "memory.allocator"),
    *("parallel.threads", "parallel.hang_s", "parallel.cpu_binding"),
)


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    bench.add_argument("recipe", metavar="RECIPE", help="name of a recipe or path of a YAML file")
    bench.add_argument("settings", nargs="+", metavar="KEY=VALUE", help="with --runs also env:NAME=VALUE")
    bench.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all sides")
    add_rounds(bench, 15)
    bench.add_argument("--steps", type=at_least_one, default=10, metavar="N", help="in a round (default: 10)")
    bench.add_argument("--runs", action="store_true", help="whole runs, each in processes of its own")
    bench.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    bench = bench_whole_runs if options.runs else bench_setting
    return bench(options.recipe, options.settings, options.set, rounds=options.rounds, steps=options.steps)


def bench_setting(name: str, settings: Sequence[str], common: Sequence[str], rounds: int, steps: int) -> int:
    """Measures and prints.

    Args:
        name: Of a recipe.
        settings: KEY=VALUE, each compared with the recipe as it is.
        common: KEY=VALUE for all sides.
        rounds: Interleaved rounds.
        steps: In each.

    Returns:
        0.

    Raises:
        BadInputError: If the recipe can't be trained here, or a setting isn't of a step's.
    """
    for setting in settings:
        if setting.startswith(_NOT_IN_A_STEP):
            raise BadInputError(
                f"{setting}: steps alone are timed here, in one process; what is of the process, its rows, "
                "checkpoints and evaluations aren't: add --runs to compare whole runs"
            )
    length = ["epochs=1000000000", f"max_steps={steps * (rounds + 1)}"]
    values = override(read_recipe(name), [*common, *length])
    threads = threads_per_rank(read_limits(), 1)
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads)
        sides = {"as it is": _side(name, values, steps, stack)}
        sides |= {setting: _side(name, override(values, [setting]), steps, stack) for setting in settings}
        seconds = interleaved(list(sides.values()), rounds)
    print(
        f"{conditions()}\n{' '.join([name, *common])}: {rounds} interleaved rounds of {steps} steps, "
        f"{threads} CPU thread{'s' * (threads > 1)}\n"
        "| setting | ms per step | ratio | 95 % interval |\n|---|---|---|---|"
    )
    for side, series in zip(sides, seconds, strict=True):
        pairs = zip(series, seconds[0], strict=True)
        ratio, low, high = median_interval([one / base for one, base in pairs])
        against = " | " if series is seconds[0] else f"{ratio:.3f} | {low:.3f} to {high:.3f}"
        print(f"| {side} | {median_interval(series)[0] / steps * 1e3:,.2f} | {against} |")
    return EXIT_DONE


def _side(name: str, values: dict[str, Any], steps: int, stack: ExitStack) -> Callable[[], float]:
    recipe = validated(Recipe, values, name)
    task = make_task(recipe)
    check_request(recipe, task, 1)
    device = torch.device("cuda", 0) if device_kind(recipe) == "cuda" else torch.device("cpu")
    workers, prefetch = choose_loading(recipe, task, read_limits(), 1).setting
    run = build(recipe, task, World(0, 1, 0, device, None), workers, prefetch=prefetch)
    stack.callback(run.close)
    turn = timed_steps(run, steps, device)

    def with_its_settings() -> float:
        # They are the process's, and the sides take turns.
        set_matmul_mode(recipe.precision)
        set_determinism(recipe, device)
        return turn()

    return with_its_settings


def timed_steps(run: Run, steps: int, device: torch.device) -> Callable[[], float]:
    """Returns a function that runs the next steps of a run and returns the seconds."""
    batches, done = run.loader(run.share.batches()), 0

    def turn() -> float:
        nonlocal done
        began = now(device)
        for _ in range(steps):
            train_step(run, batches, done)
            done += 1
        return now(device) - began

    return turn


def now(device: torch.device) -> float:
    """Seconds of a clock, once a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
