"""Launch of a run: resolves and checks the request once, then starts the ranks."""

import math
import os
import platform
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from trainer.config.recipe import Recipe
from trainer.config.recipe_file import load_recipe, provisional
from trainer.config.section import config_hash
from trainer.errors import EXIT_FAILED, BadInputError, paths_explained
from trainer.host.files import write_whole
from trainer.host.here import folder_kept, from_here
from trainer.launch.forked import Footprint, can_fork, footprint, handed
from trainer.launch.launcher import LocalRanks, launch
from trainer.launch.nodes.discover import Nodes, find_nodes
from trainer.launch.rounds import launch_with_others
from trainer.observe.console import detail, say, warn
from trainer.runs.folder import (
    RUNS,
    check_inside,
    claim_folder,
    new_folder,
    newest_run,
    remove_unused,
)
from trainer.runs.manifest import Manifest, Pretrained, read_stored
from trainer.runs.report.write import failure_reported, report_failure
from trainer.tasks import Task
from trainer.tasks.custom import CustomTask
from trainer.train.components.task import check_request, device_kind, make_task
from trainer.train.options import TrainOptions
from trainer.train.provenance import lock_hash
from trainer.train.request import Request, as_json
from trainer.train.start.checks import CheckPlace, Start, check_start, places, threads_line
from trainer.train.start.decision import Decision, Finished, From, Resume, decide
from trainer.train.start.local_ranks import plan_local_ranks
from trainer.train.start.micro_batch import KEY, Interrupted, fitting_size, stored_size, usual_size
from trainer.train.start.rank import train_rank
from trainer.train.starting_weights import keep_beginning, resolve_pretrained
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
    wanted, stored = _wanted(options), _stored(options)
    if line := threads_line(recipe, stored, options.resume):
        warn(line)
    recipe, pretrained, fresh = resolve_pretrained(recipe, stored, wanted, options.resume, options.source)
    if auto:
        with folder_kept():  # trials and ranks start in the current folder of this process
            check_request(recipe, make_task(recipe), 1, fresh)  # so that no trial fails on such a fault
        try:
            number = stored_size(stored) or _tried_size(recipe, local, nodes)
        except Interrupted as interrupted:
            warn(f"stopped by {interrupted} before it began; there is no checkpoint yet")
            return EXIT_FAILED
        sized = load_recipe(options.recipe, [*options.set, f"{KEY}={number}"], options.values)
        recipe = sized.model_copy(update={"model": recipe.model})
    with folder_kept():
        task = make_task(recipe)
        _check_batch(recipe, task, local.ranks, nodes, fresh)
        wanted = wanted and from_here(wanted)
        decision = _decided(options, recipe, wanted, task, pretrained)
        if isinstance(decision, Finished):
            say(decision.line)
            return decision.code
        first = not (nodes and nodes.number)
        here: set[CheckPlace] = {"job", "host"} if first else {"host"}
        check_start(Start(recipe, task, wanted or RUNS, decision, options.set), here)
    begins = first and not isinstance(decision, Resume)
    folder, made = _folder(options.recipe, recipe, wanted, begins)
    check_inside(folder)
    detail(f"the launcher starts {local.ranks} rank{'s' * (local.ranks > 1)} here")
    # An absolute path: the same after each restart.
    asked = _request(options, recipe, folder.absolute(), decision, pretrained, task)
    request = as_json(asked)
    try:
        if begins:
            keep_beginning(folder, asked.begun_from)
        if nodes is None:
            fork = _may_fork(recipe, before, local)
            handed[:] = [task] if fork and isinstance(task, CustomTask) else []
            code = launch(
                _RANK,
                request,
                local._replace(fork=fork),
                max_restarts=options.max_restarts,
                grace_seconds=options.grace,
                output=output,
            )
            return report_failure(folder, code)
        code = launch_with_others(
            _RANK,
            request,
            local,
            nodes=nodes,
            folder=folder.absolute(),
            same=_same(recipe),
            grace_seconds=options.grace,
            join_seconds=options.join_timeout,
            output=output,
            suits=lambda world: _shares(recipe, task, world, fresh),
        )
        return report_failure(folder, code) if first else code
    finally:
        if made:
            remove_unused(folder)


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
    with paths_explained():
        request, task = _of_rank(options)
    with failure_reported(request.folder) if os.environ["RANK"] == "0" else nullcontext():
        return train_rank(request, task)


def _of_rank(options: TrainOptions) -> tuple[Request, Task]:
    """Returns the request and the task of a rank that torchrun or Slurm started, all checked."""
    _check_options(options, None)
    recipe, auto = provisional(options.recipe, options.set, options.values)
    if auto:
        world = int(os.environ["WORLD_SIZE"])
        number = stored_size(_stored(options)) or usual_size(recipe, world, "no launcher could try others")
        recipe = load_recipe(options.recipe, [*options.set, f"{KEY}={number}"], options.values)
    folder = _folder_of_rank(options, recipe).absolute()
    # One rank of a host fetches the weights, the others wait for it.
    recipe, pretrained, _ = resolve_pretrained(
        recipe, _stored(options), _wanted(options), options.resume, options.source
    )
    here = places(os.environ) if not _restarted() else set()
    if "job" in here and (line := threads_line(recipe, read_stored(folder), options.resume)):
        warn(line)
    task = make_task(recipe)
    decision = _decided(options, recipe, folder, task, pretrained)
    if not isinstance(decision, Finished):
        check_start(Start(recipe, task, folder, decision, options.set), here)
    request = _request(options, recipe, folder, decision, pretrained, task)
    if request.begun_from is not None and os.environ["RANK"] == "0":
        keep_beginning(folder, request.begun_from)
    return request, task


def _request(
    options: TrainOptions,
    recipe: Recipe,
    folder: Path,
    decision: Decision,
    pretrained: Pretrained | None,
    task: Task,
) -> Request:
    begun_from = decision.checkpoint if isinstance(decision, From) else None
    flags = (options.resume, options.stop_after, options.profile)
    tried = dict(getattr(task, "tried", {}))
    return Request(
        recipe, options.recipe, folder, *flags, begun_from=begun_from, pretrained=pretrained, tried=tried
    )


def _decided(
    options: TrainOptions, recipe: Recipe, folder: Path | None, task: Task, pretrained: Pretrained | None
) -> Decision:
    """Calls `decide` with paths relative to the folder of the start, which code of a task may have left."""
    source = options.source and options.source._replace(run=from_here(options.source.run))
    return decide(recipe, folder, task, pretrained=pretrained, resume=options.resume, source=source)


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
            f"{nodes.most} nodes need one run folder: give --out, on a file system that all of them have"
        )
    if options.max_restarts:
        raise BadInputError(
            "--max-restarts is for a single node; several go on without a lost one by --nnodes MIN:MAX"
        )


def _check_batch(recipe: Recipe, task: Task, ranks: int, nodes: Nodes | None, fresh: bool) -> None:
    """Refuses a batch that the ranks can't share; for an elastic job, if no number of nodes can."""
    counts = range(nodes.least, nodes.most) if nodes else ()
    if not any(_shares(recipe, task, ranks * count, fresh) for count in counts):
        check_request(recipe, task, ranks * (nodes.most if nodes else 1), fresh)


def _shares(recipe: Recipe, task: Task, world: int, fresh: bool) -> bool:
    try:
        check_request(recipe, task, world, fresh)
    except BadInputError:
        return False
    return True


def _tried_size(recipe: Recipe, local: LocalRanks, nodes: Nodes | None) -> int:
    """Returns the micro-batch size that trials find.

    Raises:
        BadInputError: With several nodes, if nothing fits, or if the recipe can't be trained here.
        Interrupted: After a signal.
    """
    if nodes is not None:
        raise BadInputError(
            f"{KEY}=auto: each of several nodes would choose for itself; find the number on one of them "
            "(--fast-dev-run), and give it"
        )
    return fitting_size(recipe, local)


def _folder(name: str, recipe: Recipe, wanted: Path | None, begins: bool) -> tuple[Path, bool]:
    """Returns the run folder, and True if it was made here; with several nodes, node 0 makes it."""
    if wanted is None:
        return new_folder(RUNS, name, recipe), True
    return wanted, claim_folder(wanted) if begins else False


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


def _folder_of_rank(options: TrainOptions, recipe: Recipe) -> Path:
    """Returns --out, or a folder for torchrun's run, which its restarts find again."""
    restarted = _restarted()
    if options.out is not None:
        if not restarted and os.environ["RANK"] == "0" and read_stored(options.out) is None:
            claim_folder(options.out)
        return options.out
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    marker = RUNS / f".{Path(options.recipe).stem}-{config_hash(recipe)[:8]}-{run_id}"
    if restarted and marker.exists():
        return Path(marker.read_text("utf-8"))
    if options.resume == "newest":
        return newest_run(RUNS, options.recipe)
    if os.environ["RANK"] != "0":
        return RUNS  # only rank 0 writes
    folder = new_folder(RUNS, options.recipe, recipe)
    write_whole(marker, str(folder))
    return folder
