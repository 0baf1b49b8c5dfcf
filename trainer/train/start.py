"""The start of a run: checks the whole request once, then starts the ranks; or is one of them."""

import argparse
import math
import os
import sys
from pathlib import Path

import torch

from trainer.config.recipe import Recipe
from trainer.config.recipe_file import load_recipe, provisional
from trainer.config.section import config_hash
from trainer.errors import EXIT_FAILED, BadInputError
from trainer.host.limits import read_limits
from trainer.launch.launcher import launch
from trainer.launch.nodes.discover import Nodes, find_nodes
from trainer.launch.rank import is_rank, run_rank
from trainer.launch.rounds import launch_with_others
from trainer.observe.console import warn
from trainer.tasks import Task
from trainer.train.attempt import train_rank
from trainer.train.local_ranks import check_threads, plan_local_ranks
from trainer.train.manifest import COMMAND_VARIABLE, command
from trainer.train.resume import RUNS, Mode, Stored, check_resumable, ended, newest_run, read_stored
from trainer.train.run import check_files, check_request, data_of, device_kind, make_plan, make_task
from trainer.train.run_folder import claim_folder, new_folder, remove_unused, shown, warn_of_loss
from trainer.train.tune.auto import chosen_setting, for_ranks, stored_setting
from trainer.train.tune.job import Interrupted, Job
from trainer.train.tune.loader import for_ranks as loader_for_ranks
from trainer.train.tune.tuned import check_tuned, read_tuned, with_tuned
from trainer.version import __version__

_FOLDER = "TRAINER_RUN_FOLDER"


def start(options: argparse.Namespace, output: int | None = None) -> int:
    """Does what `trainer train` was asked for; returns the exit code.

    Args:
        options: Of the command.
        output: A file descriptor that takes the standard output of the ranks, or None.
    """
    options = argparse.Namespace(**{**vars(options), "set": with_tuned(options.tuned, options.set)})
    recipe, _ = provisional(options.recipe, options.set)
    return run_rank(lambda: _rank(options)) if is_rank(os.environ) else _launch(options, recipe, output)


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
    nodes = find_nodes(os.environ, options.nodes, options.node_rank, options.master)
    _check_options(options, nodes)
    ranks, threads, environment = plan_local_ranks(recipe, options.gpus, options.ranks)
    _check_tuned(options, recipe, ranks)
    wanted, stored = _wanted(options), _stored(options)
    if line := _threads_line(recipe, stored, options.resume):
        warn(line)
    settings = list(options.set)
    if provisional(options.recipe, settings)[1]:
        check_request(recipe, make_task(recipe), 1)  # not found by a probe, as a name of no model is
        try:
            settings.append(micro_batch_size(stored, nodes, Job(recipe, ranks, threads, environment)))
        except Interrupted as interrupted:
            warn(f"stopped by {interrupted} before it began; there is no checkpoint yet")
            return EXIT_FAILED
        recipe = load_recipe(options.recipe, settings)
    task = make_task(recipe)
    _check_batch(recipe, task, ranks, nodes)
    if wanted is not None and stored is not None:
        config = recipe.model_dump(mode="json")
        check_resumable(wanted, stored, config, device_kind(recipe), data_of(task), options.resume)
        if over := ended(shown(wanted), stored, options.resume, make_plan(recipe, task).steps):
            print(over[0])
            return over[1]
    check_files(recipe, task)
    # Before there is a folder: a signal ends a search at once, and leaves nothing behind.
    if nodes is None:  # else by rule, in each rank: what one node found wouldn't hold on another
        loading, told = loader_for_ranks(recipe, task, ranks, environment, stored, options.stop_after)
        settings += loading
        environment |= told
    begins = stored is None and not (nodes and nodes.number)
    folder, made = _folder(options.recipe, recipe, wanted, begins)
    warn_of_loss(wanted or RUNS)
    # The ranks take the folder from here, so that it stays the same through restarts.
    environment[_FOLDER] = str(folder.absolute())
    environment[COMMAND_VARIABLE] = command(os.environ, sys.argv)
    arguments = _words_for_ranks(options, settings)
    try:
        if nodes is None:
            return launch(
                arguments,
                processes=ranks,
                threads=threads,
                environment=environment,
                max_restarts=options.max_restarts,
                grace_seconds=options.grace,
                output=output,
            )
        return launch_with_others(
            arguments,
            nodes=nodes,
            folder=folder.absolute(),
            same=_same(recipe),
            processes=ranks,
            threads=threads,
            environment=environment,
            grace_seconds=options.grace,
            join_seconds=options.join_timeout,
            output=output,
            suits=lambda world: _shares(recipe, task, world),
        )
    finally:
        if made:
            remove_unused(folder)


def _check_options(options: argparse.Namespace, nodes: Nodes | None) -> None:
    if options.max_restarts < 0:
        raise BadInputError(f"--max-restarts {options.max_restarts}: give a number from 0 on")
    for name, seconds in (("grace", options.grace), ("join-timeout", options.join_timeout)):
        if not 0 < seconds < math.inf:
            raise BadInputError(f"--{name} {seconds}: give a number of seconds above 0")
    if options.stop_after is not None and options.stop_after < 1:
        raise BadInputError(f"--stop-after {options.stop_after}: give a number of steps from 1 on")
    if nodes is None:
        return
    if options.out is None:
        raise BadInputError(
            f"{nodes.most} nodes need one run folder: give --out, on a file system that all of them have"
        )
    if options.max_restarts:
        raise BadInputError(
            "--max-restarts is for a single node; several go on without a lost one by --nodes LEAST:MOST"
        )


def _threads_line(recipe: Recipe, stored: Stored | None, mode: Mode) -> str:
    """A line about more threads than CPUs, or nothing; --resume force, as of `trainer verify`, takes any."""
    threads = recipe.parallel.threads
    begun = stored.threads if stored is not None and mode != "force" else None
    count = begun if threads == "auto" else threads
    if count is None:  # chosen by the CPUs
        return ""
    return check_threads(count, read_limits(), known=mode == "force" or count == begun)


def _check_batch(recipe: Recipe, task: Task, ranks: int, nodes: Nodes | None) -> None:
    """Refuses what can't be shared out to the ranks; of an elastic job one number of nodes must do."""
    counts = range(nodes.least, nodes.most) if nodes else ()
    if not any(_shares(recipe, task, ranks * count) for count in counts):
        check_request(recipe, task, ranks * (nodes.most if nodes else 1))


def _shares(recipe: Recipe, task: Task, world: int) -> bool:
    try:
        check_request(recipe, task, world)
    except BadInputError:
        return False
    return True


def micro_batch_size(stored: Stored | None, nodes: Nodes | None, job: Job) -> str:
    """The setting for data.micro_batch_size=auto: a resumed run keeps its own, part of its arithmetic."""
    if setting := stored_setting(stored):
        return setting
    if nodes is not None:
        raise BadInputError(
            "data.micro_batch_size=auto: each of several nodes would choose for itself; find it by `trainer "
            "tune` on one of them, and give --tuned FILE"
        )
    return chosen_setting(job)


def _folder(name: str, recipe: Recipe, wanted: Path | None, begins: bool) -> tuple[Path, bool]:
    """The run folder, and whether it was made here. With several nodes node 0 makes it."""
    if wanted is None:
        return new_folder(RUNS, name, recipe), True
    return wanted, claim_folder(wanted) if begins else False


def _words_for_ranks(options: argparse.Namespace, settings: list[str]) -> list[str]:
    return [
        "train",
        options.recipe,
        "--resume",
        options.resume,
        *(word for setting in settings for word in ("--set", setting)),
        *([] if options.stop_after is None else ["--stop-after", str(options.stop_after)]),
        *({"torch": ["--profile"], "nvtx": ["--nvtx"]}.get(options.profile, [])),
    ]


def _same(recipe: Recipe) -> dict[str, str]:
    """What every node must have alike."""
    return {
        "trainer": __version__,
        "PyTorch": torch.__version__,
        "configuration": config_hash(recipe)[:16],
    }


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
