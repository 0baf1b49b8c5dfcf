"""The command line."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.data.commands import add_parser as data_commands
from trainer.errors import EXIT_BAD_INPUT, BadInputError
from trainer.redact import redact_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code (see `trainer.errors`)."""
    if arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until the launcher or a rank takes over, Ctrl-C just ends the process: a KeyboardInterrupt in
        # the seconds of importing torch is a traceback, or gets lost there.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        return code
    except BadInputError as error:
        print(f"trainer: error: {redact_text(' '.join(str(error).split()))}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except BrokenPipeError:  # `trainer recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        if message.startswith("unrecognized arguments") and message.endswith("]"):
            message += "; quote what holds blanks: --set 'KEY=[A, B]'"
        raise SystemExit(self._one_line(message))

    def _one_line(self, message: str) -> int:
        line = redact_text(" ".join(message.split()))
        print(f"trainer: error: {line} (see {self.prog} --help)", file=sys.stderr)
        return EXIT_BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="trainer", description="Trains PyTorch models: fast, exact, explained.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    train = commands.add_parser("train", help="train a recipe", allow_abbrev=False)
    train.add_argument(
        "recipe", metavar="RECIPE", help="name of a recipe (trainer recipes) or path of a YAML file"
    )
    train.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key; repeatable"
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
    train.add_argument(
        "--stop-after",
        type=int,
        metavar="N",
        help="stop after N windows of the run with a checkpoint, as a signal would (code 75)",
    )
    train.add_argument("--help-config", action="store_true", help="show every configuration key and leave")
    train.set_defaults(run=_train)

    recipes = commands.add_parser("recipes", help="list the recipes", allow_abbrev=False)
    recipes.set_defaults(run=_recipes)

    checkpoints = commands.add_parser(
        "checkpoints", help="list and verify the checkpoints of a run", allow_abbrev=False
    )
    checkpoints.add_argument("folder", type=Path, metavar="RUN", help="run folder")
    checkpoints.add_argument("--json", action="store_true", help="print JSON")
    checkpoints.set_defaults(run=_checkpoints)

    _add_verify(commands)
    data_commands(commands, _Parser)

    bench = commands.add_parser("bench", help="measure; exit code 1: target missed, 3: nothing measured")
    benches = bench.add_subparsers(required=True, metavar="BENCH", parser_class=_Parser)
    overhead = benches.add_parser(
        "overhead", help="host time per step over a hand-written loop", allow_abbrev=False
    )
    overhead.add_argument(
        "--rounds", type=int, default=40, metavar="N", help="interleaved rounds (default: 40)"
    )
    overhead.add_argument(
        "--steps", type=int, default=500, metavar="N", help="steps per round (default: 500)"
    )
    overhead.add_argument(
        "--target", type=float, default=20.0, metavar="US", help="largest overhead, us per step"
    )
    overhead.add_argument(
        "--against", default="", metavar="LIST", help="lightning,fabric,accelerate,ignite: which to time too"
    )
    overhead.set_defaults(run=_bench_overhead)
    accumulation = benches.add_parser(
        "accumulation", help="gradient of every window against its samples concatenated", allow_abbrev=False
    )
    accumulation.add_argument(
        "--against", default="", metavar="LIST", help="lightning,accelerate,timm: which to measure too"
    )
    accumulation.add_argument(
        "--timm-train", type=Path, metavar="FILE", help="timm's train.py, which its wheel doesn't hold"
    )
    accumulation.set_defaults(run=_bench_accumulation)
    loader = benches.add_parser(
        "loader", help="CPU time, speed and memory of loading images", allow_abbrev=False
    )
    loader.add_argument(
        "folder", type=Path, nargs="?", metavar="DIR", help="images by class (default: photographs made here)"
    )
    loader.add_argument(
        "--against", default="", metavar="LIST", help="torchvision,timm,webdataset: which to measure too"
    )
    loader.add_argument("--rounds", type=int, default=5, metavar="N", help="interleaved rounds (default: 5)")
    loader.add_argument("--workers", type=int, default=2, metavar="N", help="of each (default: 2)")
    loader.set_defaults(run=_bench_loader)
    tokens = benches.add_parser(
        "tokens", help="token batches per CPU second against a nanoGPT-style get_batch", allow_abbrev=False
    )
    tokens.add_argument(
        "--rounds", type=int, default=20, metavar="N", help="interleaved rounds (default: 20)"
    )
    tokens.add_argument("--target", type=float, default=8.0, metavar="X", help="smallest ratio (default: 8)")
    tokens.set_defaults(run=_bench_tokens)
    resume = benches.add_parser(
        "resume", help="a run gone on with against the one that wasn't cut", allow_abbrev=False
    )
    resume.add_argument(
        "--against", default="", metavar="LIST", help="lightning,accelerate: which to measure too"
    )
    resume.set_defaults(run=_bench_resume)
    optimizers = benches.add_parser(
        "optimizers", help="what each optimiser learns in the same updates", allow_abbrev=False
    )
    optimizers.add_argument("--quick", action="store_true", help="a tenth of the work, to see that it runs")
    optimizers.set_defaults(run=_bench_optimizers)
    return parser


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify", help="train a run again and compare the bits; exit code 1: they differ", allow_abbrev=False
    )
    verify.add_argument("folder", type=Path, metavar="RUN", help="run folder; nothing in it is changed")
    verify.add_argument(
        "--steps", type=int, metavar="N", help="only the first N windows (default: up to the last row)"
    )
    verify.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key that changes nothing that is computed, such as data.path; repeatable",
    )
    verify.add_argument("--gpus", metavar="N|LIST", help="which GPUs (default: as many as the run had)")
    verify.add_argument("--ranks", type=int, metavar="N", help="CPU processes (default: as the run had)")
    verify.set_defaults(run=_verify)


# Commands import what they need when they run: torch alone takes two seconds.


def _train(options: argparse.Namespace) -> int:
    from trainer.rank import is_rank, register

    if is_rank(os.environ):
        register()  # before the slow imports, so that a signal finds a handler
    else:
        from trainer.preempt import end_on_signal
        from trainer.resume import has_checkpoint

        end_on_signal(lambda: has_checkpoint(options.out, options.resume, options.recipe))
    from trainer.start import start

    return start(options)


def _recipes(_: argparse.Namespace) -> int:
    from trainer.config import read_recipe, recipe_names

    for name in recipe_names():
        print(f"{name:<20} {read_recipe(name).get('about', '')}")
    return 0


def _checkpoints(options: argparse.Namespace) -> int:
    from trainer.checkpoint.show import show_checkpoints

    return show_checkpoints(options.folder, options.json)


def _verify(options: argparse.Namespace) -> int:
    from trainer.verify import verify

    return verify(options)


def _bench_overhead(options: argparse.Namespace) -> int:
    from trainer.bench.overhead import bench_overhead

    return bench_overhead(options.rounds, options.steps, options.target, options.against)


def _bench_accumulation(options: argparse.Namespace) -> int:
    from trainer.bench.accumulation import bench_accumulation

    return bench_accumulation(options.against, options.timm_train)


def _bench_loader(options: argparse.Namespace) -> int:
    from trainer.bench.loader import bench_loader

    return bench_loader(options.folder, options.against, options.rounds, options.workers)


def _bench_tokens(options: argparse.Namespace) -> int:
    from trainer.bench.tokens import bench_tokens

    return bench_tokens(rounds=options.rounds, target=options.target)


def _bench_resume(options: argparse.Namespace) -> int:
    from trainer.bench.resume import bench_resume

    return bench_resume(options.against)


def _bench_optimizers(options: argparse.Namespace) -> int:
    from trainer.bench.optimizers import bench_optimizers

    return bench_optimizers(options.quick)
