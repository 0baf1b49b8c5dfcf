"""The command line."""

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence

from trainer.commands import (
    bench,
    checkpoints,
    data,
    doctor,
    export,
    new,
    predict,
    recipes,
    report,
    submit,
    train,
    tune,
    verify,
)
from trainer.config.redact import redact_text
from trainer.errors import EXIT_BAD_INPUT, BadInputError
from trainer.version import __version__

COMMANDS = (
    *(train, new, recipes, checkpoints, report, verify, tune, doctor, export, predict, data, submit, bench),
)


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
    parser.add_argument("--version", action="version", version=f"trainer {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
