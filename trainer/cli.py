"""The command line."""

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.commands.bench import add_parser as bench_commands
from trainer.commands.data import add_parser as data_commands
from trainer.commands.submit.command import add_parser as launch_command
from trainer.config.redact import redact_text
from trainer.errors import EXIT_BAD_INPUT, BadInputError
from trainer.host.threads import wait_passively


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code (see `trainer.errors`)."""
    if arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until the launcher or a rank takes over, Ctrl-C just ends the process: a KeyboardInterrupt in
        # the seconds of importing torch is a traceback, or gets lost there.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.encoding.lower().startswith("utf"):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it: LC_ALL=C may be set
    return run(make_parser(), sys.argv[1:] if arguments is None else arguments)


def run(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    """Does what the words ask for; what they can't ask for is one line, and code 2."""
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
        return code
    except BadInputError as error:
        print(f"trainer: error: {redact_text(' '.join(str(error).split()))}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except BrokenPipeError:  # `trainer recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, without secrets."""

    def error(self, message: str) -> None:  # type: ignore[override]
        """Ends with code 2."""
        if message.startswith("unrecognized arguments") and message.endswith("]"):
            message += "; quote what holds blanks: --set 'KEY=[A, B]'"
        raise SystemExit(self._one_line(message))

    def _one_line(self, message: str) -> int:
        line = redact_text(" ".join(message.split()))
        print(f"trainer: error: {line} (see {self.prog} --help)", file=sys.stderr)
        return EXIT_BAD_INPUT


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = Parser(
        prog="trainer", description="Trains PyTorch models: fast, exact, explained.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)

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
        help="stop after N windows of the run with a checkpoint, as a signal would (code 75)",
    )
    train.add_argument(
        "--profile",
        action="store_const",
        const="torch",
        help="look at a few windows with torch's profiler: a trace in the run folder, and where the time "
        "goes by operator and by module",
    )
    train.add_argument(
        "--nvtx",
        action="store_const",
        const="nvtx",
        dest="profile",
        help="mark phases, modules and operators of these windows for Nsight Systems instead (make profile)",
    )
    train.add_argument("--help-config", action="store_true", help="show every configuration key and leave")
    train.set_defaults(run=_train)

    new = commands.add_parser("new", help="begin a file with a task of one's own", allow_abbrev=False)
    new.add_argument("file", type=Path, metavar="FILE.py", help="what to write; it trains as it is")
    new.set_defaults(run=_new)

    recipes = commands.add_parser("recipes", help="list the recipes", allow_abbrev=False)
    recipes.set_defaults(run=_recipes)

    checkpoints = commands.add_parser(
        "checkpoints", help="list and verify the checkpoints of a run", allow_abbrev=False
    )
    checkpoints.add_argument("folder", type=Path, metavar="RUN", help="run folder")
    checkpoints.add_argument("--json", action="store_true", help="print JSON")
    checkpoints.set_defaults(run=_checkpoints)

    report = commands.add_parser(
        "report", help="write what a run did as one HTML file; several runs side by side", allow_abbrev=False
    )
    report.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="run folder")
    report.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="replaced if it is a report, and never if it is anything else (default: RUN/report.html; for "
        "several runs ./report.html, if there is none yet)",
    )
    report.set_defaults(run=_report)

    _add_verify(commands)
    _add_tune(commands)
    _add_doctor(commands)
    _add_export(commands)
    _add_predict(commands)
    data_commands(commands, Parser)
    launch_command(commands, Parser)

    bench_commands(commands)
    return parser


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


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify", help="train a run again and compare the bits; exit code 1: they differ", allow_abbrev=False
    )
    verify.add_argument("folder", type=Path, metavar="RUN", help="run folder; nothing in it is changed")
    verify.add_argument(
        "--steps", type=int, metavar="N", help="only the first N windows (default: up to the last row)"
    )
    verify.add_argument(
        "--incident", type=int, metavar="N", help="only up to incident N: does it come again?"
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


def _add_tune(commands: Any) -> None:
    tune = commands.add_parser(
        "tune",
        help="find the largest micro-batch that fits, keeping the global batch; exit code 1 (--check): the "
        "recipe's own doesn't",
        allow_abbrev=False,
    )
    tune.add_argument("recipe", metavar="RECIPE", help="name of a recipe, or path of a YAML file")
    tune.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key; repeatable"
    )
    tune.add_argument("--gpus", metavar="N|LIST", help="as of trainer train")
    tune.add_argument("--ranks", type=int, metavar="N", help="as of trainer train")
    tune.add_argument(
        "--out", type=Path, default=Path("tuned.yaml"), metavar="FILE", help="(default: tuned.yaml)"
    )
    tune.add_argument(
        "--check",
        action="store_true",
        help="only tell whether the recipe's own micro-batch fits, in one probe; writes nothing",
    )
    tune.add_argument("--tuned", type=Path, metavar="FILE", help="for --check: as of trainer train")
    tune.add_argument(
        "--seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="after so long no larger one is tried (default: 600)",
    )
    tune.set_defaults(run=_tune)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor", help="say what is wrong with this box; exit code 1: something is bad", allow_abbrev=False
    )
    doctor.add_argument(
        "recipe", nargs="?", metavar="RECIPE", help="look at its data, and whether its plan fits"
    )
    doctor.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key; repeatable"
    )
    doctor.add_argument("--out", type=Path, metavar="DIR", help="run folder (default: runs)")
    doctor.add_argument(
        "--json", action="store_true", help="print every check as JSON, with the lines for every place"
    )
    doctor.set_defaults(run=_doctor)


def _add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="write a run's model for use elsewhere, checked in a fresh process; exit code 1: it differs",
        allow_abbrev=False,
    )
    export.add_argument("folder", type=Path, metavar="RUN", help="run folder, finished or with a checkpoint")
    export.add_argument(
        "--to",
        required=True,
        choices=("torch-export", "onnx", "torchscript", "safetensors"),
        help="the format; safetensors holds weights only",
    )
    export.add_argument(
        "--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights (default: fp32)"
    )
    export.add_argument(
        "--with-normalisation",
        action="store_true",
        help="take uint8 (n, height, width, channels) and give probabilities (images to classes)",
    )
    export.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to write (default: RUN/export/FORMAT-DTYPE)"
    )
    export.add_argument("--force", action="store_true", help="replace an export that is there")
    _add_where_data_lies(export)
    export.set_defaults(run=_export)


def _add_predict(commands: Any) -> None:
    predict = commands.add_parser(
        "predict",
        help="what a run's model says of files; without any, of its evaluation data",
        allow_abbrev=False,
    )
    predict.add_argument("folder", type=Path, metavar="RUN", help="run folder, finished or with a checkpoint")
    predict.add_argument("files", type=Path, nargs="*", metavar="FILE", help="images or recordings")
    predict.add_argument("--out", type=Path, metavar="FILE", help="write a grid of pictures (.png)")
    predict.add_argument(
        "--top", type=int, default=3, metavar="N", help="classes or boxes named (default: 3)"
    )
    predict.add_argument(
        "--score", type=float, default=0.3, metavar="S", help="of the boxes to draw, at least (default: 0.3)"
    )
    _add_text(predict)
    predict.add_argument(
        "--samples", type=int, default=25, metavar="N", help="of the evaluation data to show (default: 25)"
    )
    _add_where_data_lies(predict)
    predict.set_defaults(run=_predict)


def _add_text(predict: argparse.ArgumentParser) -> None:
    """What a language model is asked for."""
    predict.add_argument("--prompt", metavar="TEXT", help="text to go on with (default: a new document)")
    predict.add_argument("--tokens", type=int, default=200, metavar="N", help="to add (default: 200)")
    predict.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0: always the likeliest (default: 0.8)",
    )
    predict.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn (default: 0)")
    predict.add_argument("--tokenizer", metavar="bpe:FILE", help="the tokenizer.json of tokens that need one")


def _add_where_data_lies(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="where the data lies now, such as data.path; repeatable",
    )


# Commands import what they need when they run: torch alone takes two seconds.


def _train(options: argparse.Namespace) -> int:
    from trainer.launch.nodes.discover import rank_variables
    from trainer.launch.rank import is_rank, register

    os.environ.update(rank_variables(os.environ))
    if is_rank(os.environ):
        register()  # before the slow imports, so that a signal finds a handler
    else:
        from trainer.launch.signals import end_on_signal
        from trainer.train.resume import has_checkpoint

        end_on_signal(lambda: has_checkpoint(options.out, options.resume, options.recipe))
        wait_passively()
        _check_recipe_name(options)
    from trainer.commands.train import start

    return start(options)


def _check_recipe_name(options: argparse.Namespace) -> None:
    """Refuses a recipe that isn't there, and settings that aren't KEY=VALUE, before torch is imported."""
    from trainer.config.recipe_file import override, read_recipe

    override(read_recipe(options.recipe), options.set)


def _new(options: argparse.Namespace) -> int:
    from trainer.commands.new import new

    return new(options)


def _recipes(_: argparse.Namespace) -> int:
    from trainer.config.recipe_file import read_recipe, recipe_names

    for name in recipe_names():
        print(f"{name:<20} {read_recipe(name).get('about', '')}")
    return 0


def _checkpoints(options: argparse.Namespace) -> int:
    from trainer.commands.checkpoints import show_checkpoints

    return show_checkpoints(options.folder, options.json)


def _report(options: argparse.Namespace) -> int:
    from trainer.commands.report.write import report

    return report(options.folders, options.out)


def _verify(options: argparse.Namespace) -> int:
    from trainer.commands.verify.verify import verify

    return verify(options)


def _tune(options: argparse.Namespace) -> int:
    _check_recipe_name(options)
    from trainer.commands.tune import tune

    return tune(options)


def _doctor(options: argparse.Namespace) -> int:
    from trainer.commands.doctor.command import doctor

    return doctor(options)


def _export(options: argparse.Namespace) -> int:
    from trainer.commands.export.command import export

    return export(options)


def _predict(options: argparse.Namespace) -> int:
    from trainer.commands.predict.command import predict

    return predict(options)
