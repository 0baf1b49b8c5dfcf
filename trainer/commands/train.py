"""`trainer train RECIPE`: starts the ranks of a run, or is one of them."""

import argparse
import math
import os
import shutil
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.suggest import nearest
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_REQUEUE, BadInputError, reading
from trainer.host.here import paths_from_here
from trainer.host.latest import MANIFEST, nor_below_runs, run_path
from trainer.host.limits import read_limits
from trainer.host.startup import choose_waiting
from trainer.observe.console import log_as_json, say, set_verbosity, without_bars
from trainer.runs.flags import add_task

if TYPE_CHECKING:
    from trainer.config.recipe import Recipe
    from trainer.launch.worker import Worker
    from trainer.train.options import TrainOptions

_MODES = ("auto", "newest", "force", "never")


def add_parser(commands: Any) -> None:
    """Adds `train` to the commands."""
    train = commands.add_parser(
        "train",
        help="Train a recipe or a task file.",
        usage="trainer train [RECIPE] [KEY=VALUE ...] [options]",
        description="Train a recipe or a task file. Exit codes: 0 done, 1 failed, 2 bad input, 75 stopped "
        "with a checkpoint (run the same command again), 76 a rank hung.",
        allow_abbrev=False,
    )
    train.add_argument(
        "recipe",
        metavar="RECIPE",
        nargs="?",
        help="recipe (listed by `trainer recipes`), YAML file, or Python file with a task; not needed with "
        "--resume RUN and --init-from RUN, which take the run's configuration",
    )
    train.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set a configuration key (repeatable); KEY=VALUE alone does the same",
    )
    train.add_argument(
        "--help-config",
        nargs="?",
        const="",
        metavar="SECTION",
        help="print the configuration keys, all or those of a section such as optim, and exit",
    )
    _add_run(train.add_argument_group("run folder, stop and resume"))
    _add_processes(train.add_argument_group("GPUs and processes"))
    _add_nodes(train.add_argument_group("several nodes (Slurm and Kubeflow set these)"))
    _add_trials(train.add_argument_group("short runs and profiles"))
    _add_output(train.add_argument_group("output"))
    add_task(train)
    train.told = {
        "--from": "it is --init-from now",
        "--name": "--out runs/NAME does that",
        "--tuned": "data.micro_batch_size=auto finds the size at the start",
    }
    train.set_defaults(run=_run, source=None, values=None, named=None, verbosity="normal")


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--out", type=Path, metavar="DIR", help="run folder (default: runs/<recipe>-<hash>-<n>)"
    )
    group.add_argument(
        "--resume",
        metavar="MODE|RUN",
        default="auto",
        help="auto: resume the run in --out if its configuration is the same (a larger max_steps or epochs "
        "extends a finished run); newest: resume the newest run of the recipe; force: resume with a changed "
        "configuration; never: refuse a folder that has a run; RUN (a folder, or latest): resume that run "
        "(default: auto)",
    )
    group.add_argument(
        "--init-from",
        dest="begin_from",
        metavar="RUN[@STEP|@best]",
        help="start a new run from the weights, average and optimizer state of another run's checkpoint "
        "(default: the newest); steps, data order and schedule start at 0",
    )
    group.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="restart failed ranks up to N times (default: 0)",
    )
    group.add_argument(
        "--grace",
        type=float,
        default=25.0,
        metavar="SECONDS",
        help="time that ranks have to save a checkpoint after a signal, before they are killed (default: 25)",
    )


def _add_processes(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--gpus", metavar="N|LIST", help="number of GPUs (2) or their indices (0,1 or id:1); default: all"
    )
    group.add_argument(
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="number of ranks on a machine without GPUs (default: 1)",
    )


def _add_nodes(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--nnodes",
        metavar="N",
        help="number of nodes, each with its own launcher (default: from Slurm, Kubeflow or NNODES; else 1)",
    )
    group.add_argument(
        "--node-rank", type=int, metavar="N", help="index of this node, from 0 (default: NODE_RANK)"
    )
    group.add_argument("--master-addr", metavar="HOST", help="address of node 0 (default: MASTER_ADDR)")
    group.add_argument(
        "--master-port",
        type=int,
        metavar="PORT",
        help="port of the ranks' store on node 0 (default: MASTER_PORT, else 29500)",
    )
    group.add_argument(
        "--join-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="time to wait for all nodes (default: 600)",
    )


def _add_trials(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--stop-after",
        type=int,
        metavar="N",
        help="stop after step N with a checkpoint and code 75, as after a signal",
    )
    group.add_argument(
        "--fast-dev-run",
        action="store_true",
        help="train one step and evaluate on as many samples, then delete the run folder unless that "
        "failed (--set wins)",
    )
    group.add_argument(
        "--profile",
        action="store_const",
        const="torch",
        help="profile a few steps with torch's profiler: a trace in the run folder, times by operator",
    )
    group.add_argument(
        "--nvtx",
        action="store_const",
        const="nvtx",
        dest="profile",
        help="mark phases, modules and operators for Nsight Systems instead (see make profile)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="json: print each line as an object with time, level, rank and message (default: text)",
    )
    group.add_argument("--no-progress", action="store_true", help="print lines instead of a progress bar")
    how_much = group.add_mutually_exclusive_group()
    how_much.add_argument(
        "-q",
        "--quiet",
        action="store_const",
        const="quiet",
        dest="verbosity",
        help="print warnings and errors only; the run folder has everything",
    )
    how_much.add_argument(
        "-v",
        "--verbose",
        action="store_const",
        const="verbose",
        dest="verbosity",
        help="also print the steps of the start, with their times",
    )


def _run(options: argparse.Namespace) -> int:
    from trainer.launch.nodes import forget_step_of_shell

    forget_step_of_shell(os.environ)
    with paths_from_here():
        return _try_fast(options) if options.fast_dev_run else _train(options)


def _try_fast(options: argparse.Namespace) -> int:
    """Trains with --fast-dev-run: its settings, and a temporary folder, which stays if the run fails."""
    from trainer.config.recipe_file import provisional
    from trainer.launch.nodes import is_rank, rank_variables
    from trainer.train.options import check_alone, fast_settings

    resume = None if options.resume in _MODES else options.resume
    several = is_rank({**os.environ, **rank_variables(os.environ)})
    check_alone(several, out=options.out, resume=resume, nnodes=options.nnodes)
    find_recipe(options, None)
    check_code(options)
    recipe, _ = provisional(options.recipe, options.set, options.values)
    options.set = [*fast_settings(recipe), *options.set]
    beside, code = Path(tempfile.mkdtemp(prefix="trainer-try-")), EXIT_BAD_INPUT
    options.out = beside / "run"
    try:
        code = _train(options)
    finally:
        if code in (EXIT_DONE, EXIT_REQUEUE, EXIT_BAD_INPUT):  # else a line names it
            shutil.rmtree(beside, ignore_errors=True)
            say("  --fast-dev-run: the run folder is removed")
    return code


def _train(options: argparse.Namespace) -> int:
    from trainer.config.recipe_file import key_lines, provisional
    from trainer.launch.nodes import is_rank, rank_variables

    variables = {**os.environ, **rank_variables(os.environ)}
    rank = int(variables["RANK"]) if is_rank(variables) and options.help_config is None else None
    set_verbosity("normal" if rank and options.verbosity == "verbose" else options.verbosity)
    if options.no_progress:
        without_bars()
    if options.log_format == "json":
        log_as_json(rank)
    if rank is not None:
        from trainer.launch.worker import Worker

        os.environ.update(variables)
        with Worker() as worker:  # before the slow imports, so that a signal finds a handler
            worker.code = _train_as_rank(options, worker)
        return worker.exit_code
    find_recipe(options, find_run(options))
    if options.help_config is not None:
        given = provisional(options.recipe, options.set, options.values)
        width = shutil.get_terminal_size((100, 24)).columns
        print("\n".join(key_lines(options.recipe, *given, section=options.help_config, width=width)))
        return 0
    check_code(options)
    from trainer.launch.signals import end_on_signal
    from trainer.runs.folder import has_checkpoint

    end_on_signal(lambda: has_checkpoint(options.out, options.resume == "newest", options.recipe))
    given = provisional(options.recipe, options.set, options.values)
    choose_waiting(_cpus_wanted(given[0], options.nproc_per_node or 1))
    from trainer.train.start.job import start

    return start(options_of(options), *given)


def _train_as_rank(options: argparse.Namespace, worker: "Worker") -> int:
    """Trains as a rank that torchrun or Slurm started; returns the exit code."""
    from trainer.config.recipe_file import provisional

    find_recipe(options, find_run(options))
    check_code(options)
    given = provisional(options.recipe, options.set, options.values)
    from trainer.runs.folder import has_checkpoint
    from trainer.train.start.job import request_of_rank

    request = request_of_rank(options_of(options), *given)
    worker.prepares(lambda: has_checkpoint(request.folder, False, request.name))
    from trainer.train.start.rank import train_rank

    return train_rank(request).code


def _cpus_wanted(recipe: "Recipe", ranks: int) -> float:
    """Returns the CPUs that ranks and their loader workers keep busy; infinity where a GPU may compute."""
    if recipe.device != "cpu" and Path("/dev/nvidiactl").exists():
        return math.inf
    workers, threads = recipe.data.workers, recipe.parallel.threads
    if workers == "auto":
        if recipe.task != "language":  # as many workers as the data needs
            return math.inf
        workers = 0
    each = max(1.0, read_limits().cpus // ranks) if threads == "auto" else threads
    return (each + workers) * ranks


def options_of(options: argparse.Namespace) -> "TrainOptions":
    """Returns the options that `start` needs."""
    from trainer.train.options import TrainOptions

    return TrainOptions(**{field.name: getattr(options, field.name) for field in fields(TrainOptions)})


def find_run(options: argparse.Namespace) -> Path | None:
    """Handles --resume with a run folder instead of a mode: sets --out to it, and returns it."""
    if options.resume in _MODES:
        return None
    if options.begin_from is not None:
        raise BadInputError(
            f"--init-from {options.begin_from} and --resume {options.resume}: give one of them; --resume "
            "goes on with a run, --init-from begins a new one with the weights of another"
        )
    run = _run_named(options.resume, "--resume")
    with reading(f"--resume {run}"):
        is_run = (run / "manifest.json").is_file()
    if not is_run:
        hint = nearest(options.resume, _MODES) if run.name == options.resume else ""
        raise BadInputError(
            f"--resume {run}: no run folder (it holds no manifest.json{nor_below_runs(run)}); give one, or "
            f"{', '.join(_MODES)}{hint}"
        )
    if options.out is not None and os.path.realpath(options.out) != os.path.realpath(run):
        raise BadInputError(f"--resume {run} and --out {options.out}: a run goes on in its own folder")
    options.out, options.resume = run, "auto"
    return run


def _run_named(word: str, flag: str) -> Path:
    try:
        return run_path(word)
    except argparse.ArgumentTypeError as error:
        raise BadInputError(f"{flag} {error}") from error


def find_recipe(options: argparse.Namespace, resumed: Path | None) -> None:
    """Reads the run of --init-from; without a recipe, takes that of the run to resume or to begin from."""
    from trainer.runs.differences import own_config
    from trainer.runs.manifest import read_run
    from trainer.train.options import parse_source

    if options.begin_from is not None:
        source = parse_source(options.begin_from)
        options.source = source._replace(run=_run_named(str(source.run), "--init-from"))
    if options.recipe is not None:
        return
    named = resumed or (options.source.run if options.source else None)
    if options.source and options.out is not None and (options.out / MANIFEST).is_file():
        named = options.out  # it has begun already: what it began from may be gone
    if named is None and options.help_config is not None:
        options.recipe = "digits"  # the keys are those of all
        return
    if named is None:
        raise BadInputError(
            "RECIPE is missing: give one (trainer recipes lists them), or --resume RUN or --init-from RUN "
            "for that run's own"
        )
    run = read_run(named)
    own_config(run, options.set)
    options.recipe, options.values = run.manifest.recipe or named.name, dict(run.manifest.config)
    options.named = named


def check_code(options: argparse.Namespace) -> None:
    """Refuses Python code that the recipe of a run folder names, and the command doesn't."""
    if options.values is None:
        return
    from trainer.config.own_code import refuse_unnamed
    from trainer.config.recipe_file import override, provisional

    recipe, _ = provisional(options.recipe, options.set, options.values)
    refuse_unnamed(options.named, recipe, override({}, options.set), options.recipe)
