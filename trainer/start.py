"""`trainer train`: checks the whole request once, then starts the ranks; or is one of them."""

import argparse
import json
import math
import os
import sys
from pathlib import Path

from trainer.attempt import train_rank
from trainer.config import config_hash, describe, override, read_recipe, validated
from trainer.errors import EXIT_FAILED, BadInputError
from trainer.launch import launch
from trainer.local_ranks import plan_local_ranks
from trainer.manifest import COMMAND_VARIABLE, command
from trainer.observe.console import warn
from trainer.rank import is_rank, run_rank
from trainer.recipe import Recipe
from trainer.redact import redact_text
from trainer.resume import RUNS, Stored, check_resumable, ended, newest_run, read_stored
from trainer.run import check_request, data_of, device_kind, make_task
from trainer.run_folder import claim_folder, new_folder, remove_unused, shown
from trainer.tune.auto import chosen_setting, for_ranks, provisional, stored_setting
from trainer.tune.job import Interrupted, Job
from trainer.tune.loader import for_ranks as loader_for_ranks
from trainer.tune.tuned import check_tuned, read_tuned, settings_of

_FOLDER = "TRAINER_RUN_FOLDER"


def start(options: argparse.Namespace, output: int | None = None) -> int:
    """Does what `trainer train` was asked for; returns the exit code.

    Args:
        options: Of the command.
        output: A file descriptor that takes the standard output of the ranks, or None.
    """
    if options.tuned is not None:  # its settings come first, so that --set wins
        tuned = settings_of(read_tuned(options.tuned))
        options = argparse.Namespace(**{**vars(options), "set": [*tuned, *options.set]})
    recipe, auto = provisional(options.recipe, options.set)
    if options.help_config:
        _show_keys(options.recipe, recipe, auto)
        return 0
    return run_rank(lambda: _rank(options)) if is_rank(os.environ) else _launch(options, recipe, output)


def load_recipe(name: str, settings: list[str]) -> Recipe:
    """Reads a recipe and applies settings.

    Raises:
        BadInputError: For the first thing that is wrong with them.
    """
    return validated(Recipe, override(read_recipe(name), settings), name)


def _rank(options: argparse.Namespace) -> int:
    recipe, auto = provisional(options.recipe, options.set)
    if auto:
        recipe = load_recipe(options.recipe, [*options.set, for_ranks(_stored(options))])
    _check_tuned(options, recipe, int(os.environ["WORLD_SIZE"]))
    folder = _folder_of_rank(options, recipe)
    return train_rank(recipe, options.recipe, folder, options.resume, options.stop_after, options.profile)


def _check_tuned(options: argparse.Namespace, recipe: Recipe, ranks: int) -> None:
    if options.tuned is not None:
        check_tuned(read_tuned(options.tuned), options.tuned, recipe, ranks, device_kind(recipe))


def _launch(options: argparse.Namespace, recipe: Recipe, output: int | None) -> int:
    ranks, threads, environment = plan_local_ranks(recipe, options.gpus, options.ranks)
    _check_tuned(options, recipe, ranks)
    if options.max_restarts < 0:
        raise BadInputError(f"--max-restarts {options.max_restarts}: give a number from 0 on")
    if not 0 < options.grace < math.inf:
        raise BadInputError(f"--grace {options.grace}: give a number of seconds above 0")
    if options.stop_after is not None and options.stop_after < 1:
        raise BadInputError(f"--stop-after {options.stop_after}: give a number of windows from 1 on")
    wanted, stored = _wanted(options), _stored(options)
    settings = list(options.set)
    if provisional(options.recipe, settings)[1]:
        try:
            # A run goes on with what it was begun with: the micro-batch is part of its arithmetic.
            job = Job(recipe, ranks, threads, environment)
            settings.append(stored_setting(stored) or chosen_setting(job))
        except Interrupted as interrupted:
            warn(f"stopped by {interrupted} before it began; there is no checkpoint yet")
            return EXIT_FAILED
        recipe = load_recipe(options.recipe, settings)
    task = make_task(recipe)
    check_request(recipe, task, ranks)
    if wanted is not None and stored is not None:
        config = recipe.model_dump(mode="json")
        check_resumable(wanted, stored, config, device_kind(recipe), data_of(task), options.resume)
        if over := ended(shown(wanted), stored, options.resume):
            print(over[0])
            return over[1]
    # Before there is a folder: a signal ends a search at once, and leaves nothing behind.
    loading, told = loader_for_ranks(recipe, task, ranks, environment, stored, options.stop_after)
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
        *(word for setting in [*settings, *loading] for word in ("--set", setting)),
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


def _wanted(options: argparse.Namespace) -> Path | None:
    """The run folder that was asked for, if any."""
    folder: Path | None = options.out
    return folder or (newest_run(RUNS, options.recipe) if options.resume == "newest" else None)


def _stored(options: argparse.Namespace) -> Stored | None:
    """What lies in it."""
    wanted = _wanted(options)
    return None if wanted is None else read_stored(wanted)


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


def _show_keys(name: str, recipe: Recipe, auto: bool) -> None:
    values = recipe.model_dump(mode="json")
    if auto:
        values["data"]["micro_batch"] = "auto"
    for key in describe(Recipe):
        value = values
        for part in key.name.split("."):
            value = value[part]
        shown = redact_text(value if isinstance(value, str) else json.dumps(value))
        here = "" if shown == key.default else f" ({name}: {shown})"
        print(f"{key.name:<26} {key.type:<34} {key.default:<14} {key.description}{here}")
