"""Launch of a run: resolves and checks the request once, then starts the ranks."""

import math
import os
import platform
import sys
from collections.abc import Set
from contextlib import nullcontext
from pathlib import Path

import torch

from trainer.config.recipe import Recipe
from trainer.config.recipe_file import load_recipe, provisional
from trainer.config.section import config_hash
from trainer.errors import EXIT_FAILED, BadInputError, paths_explained
from trainer.host.files import write_whole
from trainer.host.here import folder_kept
from trainer.launch.forked import Footprint, can_fork, footprint, handed
from trainer.launch.launcher import LocalRanks, launch
from trainer.launch.meeting import Meeting
from trainer.launch.nodes import Nodes, find_nodes
from trainer.observe.console import detail, say, warn
from trainer.runs.folder import (
    RUNS,
    newest_run,
    remove_unused,
)
from trainer.runs.manifest import Manifest, read_stored
from trainer.runs.report.write import failure_reported, report_failure
from trainer.tasks.custom import CustomTask
from trainer.train.components.task import check_request, device_kind, make_task
from trainer.train.options import TrainOptions
from trainer.train.provenance import lock_hash
from trainer.train.request import as_json
from trainer.train.start.checks import CheckPlace, places
from trainer.train.start.decision import Finished
from trainer.train.start.local_ranks import plan_local_ranks
from trainer.train.start.micro_batch import KEY, Interrupted, fitting_size, stored_size, usual_size
from trainer.train.start.prepare import Asked, prepare
from trainer.train.start.rank import train_rank
from trainer.train.starting_weights import resolve_pretrained
from trainer.version import __version__

_RANK = "trainer.train.start.rank_process"


def start(options: TrainOptions, recipe: Recipe, auto: bool, output: int | None = None) -> int:
    """Starts the ranks of `trainer train`; returns the exit code.

    Args:
        options: The flags.
        recipe: The configuration, as `provisional` read it.
        auto: True if data.micro_batch_size=auto is still to be chosen.
        output: A file descriptor for the standard output of the ranks, or None.

    Raises:
        BadInputError: If a check fails.
    """
    before = footprint()
    nodes = find_nodes(
        os.environ, options.nnodes, options.node_rank, options.master_addr, options.master_port
    )
    _check_options(options, nodes)
    local = plan_local_ranks(recipe, options.gpus, options.nproc_per_node)
    with folder_kept():  # trials and ranks start in the current folder of this process
        try:
            recipe = _sized(options, recipe, local, nodes) if auto else recipe
        except Interrupted as interrupted:
            warn(f"stopped by {interrupted} before it began; there is no checkpoint yet")
            return EXIT_FAILED
        first = not (nodes and nodes.number)
        here: set[CheckPlace] = {"job", "host"} if first else {"host"}
        ranks = local.ranks * (nodes.total if nodes else 1)
        prepared = prepare(_asked(options, recipe, ranks, here, first, _wanted(options)))
    if isinstance(prepared.decision, Finished):
        say(prepared.decision.line)
        return prepared.decision.code
    request = prepared.request
    detail(f"the launcher starts {local.ranks} rank{'s' * (local.ranks > 1)} here")
    try:
        fork = nodes is None and _may_fork(request.recipe, before, local)
        handed[:] = [prepared.task] if fork and isinstance(prepared.task, CustomTask) else []
        meeting = nodes and Meeting(
            nodes, local.ranks, _same(request.recipe), request.folder, options.join_timeout
        )
        code = launch(
            _RANK,
            as_json(request),
            local._replace(fork=fork),
            max_restarts=options.max_restarts,
            grace_seconds=options.grace,
            output=output,
            meeting=meeting,
        )
        return report_failure(request.folder, code) if first else code
    finally:
        if prepared.made:
            remove_unused(request.folder)


def _may_fork(recipe: Recipe, before: Footprint, local: LocalRanks) -> bool:
    """True if the ranks may be forks: neither CUDA nor threads of a library survive a fork.

    OpenMP's threads are pinned by variables that it reads when torch is imported, in a process of its own.
    """
    own = bool(recipe.hooks.use or Path(recipe.task).suffix)
    alone = device_kind(recipe) == "cpu" and torch.get_num_threads() == 1 and not local.cpus.pinned
    return alone and can_fork(before, files=own)


def compute_alone() -> None:
    """Sets one thread, in a process that has computed nothing yet, so that ranks may be forks of it."""
    torch.set_num_threads(1)


def train_without_launcher(options: TrainOptions) -> int:
    """Trains as a rank that torchrun or Slurm started; ranks compare their requests when they have met.

    Returns:
        The exit code.

    Raises:
        BadInputError: If a check fails.
    """
    _check_options(options, None)
    world, first = int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0"
    with paths_explained():
        recipe, auto = provisional(options.recipe, options.set, options.values)
        if auto:
            number = stored_size(_stored(options)) or usual_size(
                recipe, world, "no launcher could try others"
            )
            recipe = load_recipe(options.recipe, [*options.set, f"{KEY}={number}"], options.values)
        marker = _marker(options, recipe)
        wanted = _wanted(options)
        if wanted is None and _restarted() and marker.exists():
            wanted = Path(marker.read_text("utf-8"))
        here = places(os.environ) if not _restarted() else set()
        prepared = prepare(_asked(options, recipe, world, here, first, wanted))
        folder = prepared.request.folder
        if wanted is None and first:
            write_whole(marker, str(folder))
    try:
        with failure_reported(folder) if first else nullcontext():
            return train_rank(prepared.request, prepared.task)
    finally:
        if prepared.made:
            remove_unused(folder)


def _asked(
    options: TrainOptions,
    recipe: Recipe,
    ranks: int,
    here: Set[CheckPlace],
    first: bool,
    wanted: Path | None,
) -> Asked:
    return Asked(
        recipe,
        options.recipe,
        ranks,
        here,
        first,
        _restarted(),
        folder=wanted,
        resume=options.resume,
        settings=options.set,
        source=options.source,
        stop_after=options.stop_after,
        profile=options.profile,
    )


def _marker(options: TrainOptions, recipe: Recipe) -> Path:
    """Returns the file in which a run of torchrun leaves its folder for its restarts."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return RUNS / f".{Path(options.recipe).stem}-{config_hash(recipe)[:8]}-{run_id}"


def _restarted() -> bool:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _check_options(options: TrainOptions, nodes: Nodes | None) -> None:
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
            f"{nodes.total} nodes need one run folder: give --out, on a file system that all of them have"
        )
    if options.max_restarts:
        raise BadInputError(
            "--max-restarts is for a single node; with several the scheduler starts the job again"
        )


def _sized(options: TrainOptions, recipe: Recipe, local: LocalRanks, nodes: Nodes | None) -> Recipe:
    """Returns the recipe with the micro-batch size of the run that is resumed, or that trials find.

    Raises:
        BadInputError: With several nodes, if nothing fits, or if the recipe can't be trained here.
        Interrupted: After a signal.
    """
    stored = _stored(options)
    if (number := stored_size(stored)) is None:
        tried, _, fresh = resolve_pretrained(recipe, stored, _wanted(options), options.resume, options.source)
        check_request(tried, make_task(tried), 1, fresh)  # so that no trial fails on such a fault
        if nodes is not None:
            raise BadInputError(
                f"{KEY}=auto: each of several nodes would choose for itself; find the number on one of them "
                "(--fast-dev-run), and give it"
            )
        number = fitting_size(tried, local)
    return load_recipe(options.recipe, [*options.set, f"{KEY}={number}"], options.values)


def _same(recipe: Recipe) -> dict[str, str]:
    """Returns the versions and hashes that must be equal on every node."""
    return {
        "trainer": __version__,
        "Python": platform.python_version(),
        "lock": (lock_hash(Path(sys.prefix)) or "unknown")[:16],
        "PyTorch": torch.__version__,
        "configuration": config_hash(recipe)[:16],
    }


def _wanted(options: TrainOptions) -> Path | None:
    """Returns the run folder that the flags name, or None."""
    return options.out or (newest_run(RUNS, options.recipe) if options.resume == "newest" else None)


def _stored(options: TrainOptions) -> Manifest | None:
    """Reads the manifest in the folder that the flags name; None without one."""
    wanted = _wanted(options)
    return None if wanted is None else read_stored(wanted)
