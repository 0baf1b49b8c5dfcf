"""`trainer train RECIPE`: starts the ranks of a run, or is one of them."""

import argparse
import os
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Adds `train` to the commands."""
    train = commands.add_parser("train", help="train a recipe", allow_abbrev=False)
    train.add_argument(
        "recipe",
        metavar="RECIPE",
        help="name of a recipe (trainer recipes), or path of a YAML file or of a Python file with a task",
    )
    train.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key; repeatable"
    )
    train.add_argument(
        "--tuned", type=Path, metavar="FILE", help="what `trainer tune` chose (--set wins over it)"
    )
    train.add_argument(
        "--out", type=Path, metavar="DIR", help="run folder (default: runs/<recipe>-<hash>-<n>)"
    )
    train.add_argument(
        "--resume",
        choices=("auto", "newest", "force", "never"),
        default="auto",
        help="auto: go on with the run in --out, if there is one and its configuration is the same; newest: "
        "with the newest run of the recipe; force: also with a changed configuration (default: auto)",
    )
    train.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="start failed ranks again, up to N times"
    )
    train.add_argument(
        "--grace",
        type=float,
        default=25.0,
        metavar="SECONDS",
        help="how long ranks may take to stop after a signal, checkpoint included, before they are killed "
        "(default: 25)",
    )
    train.add_argument(
        "--gpus", metavar="N|LIST", help="how many GPUs (2), or which (0,1 or id:1); default: all"
    )
    train.add_argument(
        "--ranks", type=int, metavar="N", help="processes on a machine without GPUs (default: 1)"
    )
    _add_nodes(train)
    train.add_argument(
        "--stop-after",
        type=int,
        metavar="N",
        help="stop after N steps of the run with a checkpoint, as a signal would (code 75)",
    )
    train.add_argument(
        "--profile",
        action="store_const",
        const="torch",
        help="look at a few steps with torch's profiler: a trace in the run folder, and where the time "
        "goes by operator and by module",
    )
    train.add_argument(
        "--nvtx",
        action="store_const",
        const="nvtx",
        dest="profile",
        help="mark phases, modules and operators of these steps for Nsight Systems instead (make profile)",
    )
    train.add_argument("--help-config", action="store_true", help="show every configuration key and leave")
    train.set_defaults(run=_run)


def _add_nodes(train: argparse.ArgumentParser) -> None:
    """Several nodes; Slurm, Kubeflow and plain variables say it without flags."""
    train.add_argument(
        "--nodes",
        metavar="N|MIN:MAX",
        help="nodes of the job, each with a launcher of its own; with MIN:MAX it goes on while nodes leave "
        "and come (default: as Slurm, Kubeflow or NNODES say; else 1)",
    )
    train.add_argument(
        "--node-rank", type=int, metavar="N", help="which of them this is, from 0 (default: NODE_RANK)"
    )
    train.add_argument(
        "--master",
        metavar="HOST:PORT",
        help="where node 0 is; its ranks' own store is at the next port (default: MASTER_ADDR:MASTER_PORT)",
    )
    train.add_argument(
        "--join-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long nodes may take to come together (default: 600)",
    )


def _run(options: argparse.Namespace) -> int:
    from trainer.config.recipe_file import key_lines, provisional
    from trainer.host.threads import wait_passively
    from trainer.launch.nodes.discover import rank_variables
    from trainer.launch.rank import is_rank, register
    from trainer.train.tune.tuned import with_tuned

    if options.help_config:
        settings = with_tuned(options.tuned, options.set)
        print("\n".join(key_lines(options.recipe, *provisional(options.recipe, settings))))
        return 0
    os.environ.update(rank_variables(os.environ))
    if is_rank(os.environ):
        register()  # before the slow imports, so that a signal finds a handler
    else:
        from trainer.launch.signals import end_on_signal
        from trainer.train.resume import has_checkpoint

        end_on_signal(lambda: has_checkpoint(options.out, options.resume, options.recipe))
        wait_passively()
        # What is wrong with the configuration is said before torch is imported.
        provisional(options.recipe, with_tuned(options.tuned, options.set))
    from trainer.train.start import start

    return start(options)
