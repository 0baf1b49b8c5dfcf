"""`trainer train`: checks the whole request once, then starts the ranks; or is one of them."""

import argparse
import json
import math
import os
import sys
from pathlib import Path

import torch

from trainer.attempt import train_rank
from trainer.config import config_hash, describe, override, read_recipe, validated
from trainer.errors import BadInputError
from trainer.gpus import chosen_gpus
from trainer.launch import launch
from trainer.limits import read_limits, threads_per_rank
from trainer.manifest import COMMAND_VARIABLE, command
from trainer.precision import check_precision
from trainer.rank import is_rank, run_rank
from trainer.recipe import Recipe
from trainer.redact import redact_text
from trainer.resume import RUNS, check_resumable, ended, newest_run, read_stored
from trainer.run import check_request, data_of, device_kind, make_task
from trainer.run_folder import claim_folder, new_folder, remove_unused, shown
from trainer.tune.loader import for_ranks

_FOLDER = "TRAINER_RUN_FOLDER"


def start(options: argparse.Namespace, output: int | None = None) -> int:
    """Does what `trainer train` was asked for; returns the exit code.

    Args:
        options: Of the command.
        output: A file descriptor that takes the standard output of the ranks, or None.
    """
    if options.help_config:
        _show_keys(options.recipe, options.set)
        return 0
    recipe = load_recipe(options.recipe, options.set)
    if is_rank(os.environ):
        return run_rank(
            lambda: train_rank(
                recipe,
                options.recipe,
                _folder_of_rank(options, recipe),
                options.resume,
                options.stop_after,
                options.profile,
            )
        )
    return _launch(options, recipe, output)


def load_recipe(name: str, settings: list[str]) -> Recipe:
    """Reads a recipe and applies settings.

    Raises:
        BadInputError: For the first thing that is wrong with them.
    """
    return validated(Recipe, override(read_recipe(name), settings), name)


def _launch(options: argparse.Namespace, recipe: Recipe, output: int | None) -> int:
    ranks, environment = _ranks(options, recipe)
    task = make_task(recipe)
    check_request(recipe, task, ranks)
    if options.max_restarts < 0:
        raise BadInputError(f"--max-restarts {options.max_restarts}: give a number from 0 on")
    if not 0 < options.grace < math.inf:
        raise BadInputError(f"--grace {options.grace}: give a number of seconds above 0")
    if options.stop_after is not None and options.stop_after < 1:
        raise BadInputError(f"--stop-after {options.stop_after}: give a number of windows from 1 on")
    threads = recipe.parallel.threads
    threads = threads_per_rank(read_limits(), ranks) if threads == "auto" else threads
    wanted = options.out or (newest_run(RUNS, options.recipe) if options.resume == "newest" else None)
    stored = None if wanted is None else read_stored(wanted)
    if wanted is not None and stored is not None:
        config = recipe.model_dump(mode="json")
        check_resumable(wanted, stored, config, device_kind(recipe), data_of(task), options.resume)
        if over := ended(shown(wanted), stored, options.resume):
            print(over[0])
            return over[1]
    # Threads that spin while they wait make a small model many times slower on a machine that is busy.
    environment.setdefault("OMP_WAIT_POLICY", os.environ.get("OMP_WAIT_POLICY", "PASSIVE"))
    # Before there is a folder: a signal ends a search at once, and leaves nothing behind.
    loading, told = for_ranks(recipe, task, ranks, environment, stored, options.stop_after)
    environment |= told
    made = False
    if wanted is not None and stored is not None:
        folder = wanted
    elif wanted is not None:
        folder, made = wanted, claim_folder(wanted)
    else:
        folder, made = new_folder(RUNS, options.recipe, recipe), True
    # The ranks take the folder from here, so that it stays the same through restarts.
    environment[_FOLDER] = str(folder.absolute())
    environment[COMMAND_VARIABLE] = command(os.environ, sys.argv)
    arguments = [
        "train",
        options.recipe,
        "--resume",
        options.resume,
        *(word for setting in [*options.set, *loading] for word in ("--set", setting)),
        *([] if options.stop_after is None else ["--stop-after", str(options.stop_after)]),
        *({"torch": ["--profile"], "nvtx": ["--nvtx"]}.get(options.profile, [])),
    ]
    try:
        return launch(
            arguments,
            processes=ranks,
            threads=threads,
            environment=environment,
            max_restarts=options.max_restarts,
            grace_seconds=options.grace,
            output=output,
        )
    finally:
        if made:
            remove_unused(folder)


def _ranks(options: argparse.Namespace, recipe: Recipe) -> tuple[int, dict[str, str]]:
    """How many ranks to start here, and the environment that gives them their GPUs."""
    if device_kind(recipe) == "cpu":
        check_precision(recipe.precision, torch.device("cpu"))
        if options.gpus is not None:
            why = "device=cpu is set" if recipe.device == "cpu" else "no usable GPU was found"
            raise BadInputError(
                f"--gpus {options.gpus}: {why}; leave it out, or use --ranks N for N CPU processes"
            )
        if options.ranks is not None and options.ranks < 1:
            raise BadInputError(f"--ranks {options.ranks}: give a number from 1 on")
        return options.ranks or 1, {}
    there = torch.cuda.device_count()
    if options.ranks is not None:
        raise BadInputError("--ranks is for machines without GPUs; use --gpus N")
    if options.gpus is None:
        return there, {}
    # Indices count what CUDA_VISIBLE_DEVICES leaves, and never widen it.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(there)))).split(",")[:there]
    chosen = chosen_gpus(options.gpus, visible)
    return len(chosen), {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}


def _folder_of_rank(options: argparse.Namespace, recipe: Recipe) -> Path:
    """The launcher's choice, or --out, or (started by torchrun itself) one for torchrun's run."""
    if _FOLDER in os.environ:
        return Path(os.environ[_FOLDER])
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if options.out is not None:
        if not restarted and os.environ["RANK"] == "0" and read_stored(options.out) is None:
            claim_folder(options.out)
        return Path(options.out)
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    marker = RUNS / f".{Path(options.recipe).stem}-{config_hash(recipe)[:8]}-{run_id}"
    if restarted and marker.exists():
        return Path(marker.read_text())
    if options.resume == "newest":
        return newest_run(RUNS, options.recipe)
    if os.environ["RANK"] != "0":
        return RUNS  # only rank 0 writes
    folder = new_folder(RUNS, options.recipe, recipe)
    marker.write_text(str(folder))
    return folder


def _show_keys(name: str, settings: list[str]) -> None:
    recipe = load_recipe(name, settings).model_dump(mode="json")
    for key in describe(Recipe):
        value = recipe
        for part in key.name.split("."):
            value = value[part]
        shown = redact_text(value if isinstance(value, str) else json.dumps(value))
        here = "" if shown == key.default else f" ({name}: {shown})"
        print(f"{key.name:<26} {key.type:<34} {key.default:<14} {key.description}{here}")
