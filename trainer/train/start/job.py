"""Job of `trainer train` on this host: how many ranks there are, and their start. Imports no torch."""

import math
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.config.recipe import Recipe
from trainer.config.recipe_file import load_recipe
from trainer.config.section import config_hash
from trainer.errors import EXIT_FAILED, BadInputError
from trainer.host.stacks import lock_hash
from trainer.host.torch_build import torch_build
from trainer.launch.launcher import LocalRanks, launch
from trainer.launch.meeting import Meeting
from trainer.launch.nodes import Nodes, find_nodes
from trainer.observe.console import detail, warn
from trainer.runs.folder import RUNS, newest_run, remove_unused
from trainer.runs.manifest import Manifest, read_stored
from trainer.runs.report.write import report_failure
from trainer.train.options import TrainOptions
from trainer.train.request import Request, as_json, from_json, request_of
from trainer.train.start.local_ranks import plan_local_ranks
from trainer.train.start.micro_batch import KEY, Interrupted, fitting_size, stored_size, usual_size
from trainer.version import __version__

_RANK = "trainer.train.start.rank_process"


def start(options: TrainOptions, recipe: Recipe, auto: bool, output: int | None = None) -> int:
    """Starts the ranks of this host, and waits for their end; returns the exit code.

    Args:
        options: The flags.
        recipe: The configuration, as `provisional` read it.
        auto: True if data.micro_batch_size=auto is still to be chosen.
        output: A file descriptor for the standard output of the ranks, or None.

    Raises:
        BadInputError: If flags, devices or nodes don't fit.
    """
    nodes = find_nodes(
        os.environ, options.nnodes, options.node_rank, options.master_addr, options.master_port
    )
    check_options(options, nodes)
    local = plan_local_ranks(recipe, options.gpus, options.nproc_per_node)
    try:
        recipe = _sized(options, recipe, local, nodes) if auto else recipe
    except Interrupted as interrupted:
        warn(f"stopped by {interrupted} before it began; there is no checkpoint yet")
        return EXIT_FAILED
    first = not (nodes and nodes.number)
    request = request_of(options, recipe, folder=wanted_folder(options), gpus=local.gpus)
    meeting = nodes and Meeting(nodes, local.ranks, _same(recipe), options.join_timeout)
    detail(f"the launcher starts {local.ranks} rank{'s' * (local.ranks > 1)} here")
    ended = launch(
        _RANK,
        as_json(request),
        local,
        max_restarts=options.max_restarts,
        grace_seconds=options.grace,
        output=output,
        meeting=meeting,
    )
    prepared = from_json(Request, ended.request)
    if not prepared.again or prepared.folder is None or not first:
        return ended.code
    if prepared.made:
        remove_unused(prepared.folder)
    return report_failure(prepared.folder, ended.code)


def request_of_rank(options: TrainOptions, recipe: Recipe, auto: bool) -> Request:
    """Returns the request of a rank that torchrun or Slurm started.

    Raises:
        BadInputError: If the flags don't fit.
    """
    check_options(options, None)
    if auto:
        ranks = int(os.environ["WORLD_SIZE"])
        number = stored_size(_stored(options)) or usual_size(recipe, ranks, "no launcher could try others")
        recipe = _with_size(options, number)
    folder, marker = wanted_folder(options), None
    if folder is None:
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        marker = RUNS / f".{Path(options.recipe).stem}-{config_hash(recipe)[:8]}-{run_id}"
    request = request_of(options, recipe, folder=folder, marker=marker)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return request
    if marker is not None and marker.exists():
        folder = Path(marker.read_text("utf-8"))
    return restarted(request, folder)


def restarted(request: Request, folder: Path | None, made: bool = False) -> Request:
    """Returns the request of a restart of the same job: it goes on in the folder that the first one made.

    Args:
        request: Of the first start.
        folder: The run folder; None if it isn't known.
        made: True if this job has made it.
    """
    mode = "auto" if request.resume == "never" else request.resume  # what this job began is its own
    return replace(request, folder=folder, resume=mode, again=True, made=made)


def check_options(options: TrainOptions, nodes: Nodes | None) -> None:
    """Checks flags that no key of the recipe has.

    Raises:
        BadInputError: Naming the flag.
    """
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
    if (number := stored_size(_stored(options))) is None:
        if nodes is not None:
            raise BadInputError(
                f"{KEY}=auto: each of several nodes would choose for itself; find the number on one of them "
                "(--fast-dev-run), and give it"
            )
        number = fitting_size(recipe, local)
    return _with_size(options, number)


def _with_size(options: TrainOptions, number: int) -> Recipe:
    return load_recipe(options.recipe, [*options.set, f"{KEY}={number}"], options.values)


def _same(recipe: Recipe) -> dict[str, Any]:
    """Returns the versions and hashes that must be equal on every node."""
    return {
        "trainer": __version__,
        "Python": platform.python_version(),
        "lock": (lock_hash(Path(sys.prefix)) or "unknown")[:16],
        "PyTorch": torch_build().version,
        "configuration": config_hash(recipe)[:16],
    }


def wanted_folder(options: TrainOptions) -> Path | None:
    """Returns the run folder that the flags name, or None."""
    return options.out or (newest_run(RUNS, options.recipe) if options.resume == "newest" else None)


def _stored(options: TrainOptions) -> Manifest | None:
    """Reads the manifest in the folder that the flags name; None without one."""
    wanted = wanted_folder(options)
    return None if wanted is None else read_stored(wanted)
