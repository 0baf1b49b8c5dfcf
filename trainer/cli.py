"""The command line."""

import argparse
import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from trainer.config.dropped import DroppedKeysError
from trainer.config.elsewhere import command_meant, setting_meant
from trainer.config.redact import redact_text
from trainer.config.registry import named
from trainer.config.suggest import nearest
from trainer.errors import EXIT_BAD_INPUT, BadInputError, UnnamedCodeError, paths_explained, reading
from trainer.host.startup import print_anything
from trainer.observe.console import tell
from trainer.version import __version__

# Commands, each trainer/commands/NAME (a file or folder with `add_parser`), with their groups in the help.
COMMANDS = {
    **dict.fromkeys(("train", "new", "check", "recipes"), "Train"),
    **dict.fromkeys(("runs", "report", "evaluate", "predict", "export", "verify"), "Use a run"),
    "data": "Data",
    **dict.fromkeys(("doctor", "job"), "Machine and cluster"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code (see `trainer.errors`)."""
    if arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until the launcher or a rank takes over, Ctrl-C just ends the process: a KeyboardInterrupt in
        # the seconds of importing torch is a traceback, or gets lost there.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    print_anything()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in ([], ["help"]):  # `trainer`, `trainer help`, `trainer help train`
        words = [*words[1:2], "--help"]
    return run(make_parser(), words)


def run(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    """Does what the words ask for; what they can't ask for is one line, and code 2."""
    options = parser.parse_args(arguments)
    try:
        if options.command != "doctor":  # MKL ends the process, without saying why
            with reading("the current folder", "it was deleted: go to another"):
                Path.cwd()
        with paths_explained():
            code: int = options.run(options)
        return code
    except DroppedKeysError as error:
        for line in str(error).splitlines():
            tell(f"trainer: error: {line}", "error")
        print(error.recipe, end="")
        return EXIT_BAD_INPUT
    except UnnamedCodeError as error:
        command = shlex.join(["trainer", *arguments, *error.words])
        tell(f"trainer: error: {error}: {command}", "error")
        return EXIT_BAD_INPUT
    except BadInputError as error:
        tell(f"trainer: error: {' '.join(str(error).split())}", "error")
        return EXIT_BAD_INPUT
    except BrokenPipeError:  # `trainer recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")  # argparse's words
_SETTING = re.compile(r"[a-z]\w*(\.\w+)*=.*", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, without secrets, with the flag that was meant.

    Attributes:
        told: What to say of flags that another command has, in place of a flag that looks alike.
    """

    told: Mapping[str, str] = MappingProxyType({})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses; a flag that the command's own parser doesn't know is reported there."""
        options, unknown = super().parse_known_args(self._with_settings(args), namespace)
        if unknown:
            message = f"unrecognized arguments: {' '.join(unknown)}"
            if message.endswith("]"):
                message += "; quote what holds blanks: --set 'KEY=[A, B]'"
            flag, known = unknown[0].partition("=")[0], self._option_string_actions
            if flag in self.told:
                self.error(f"{message}; {self.told[flag]}")
            meant = setting_meant(flag)
            needed = meant.partition(" ")[0] if meant.startswith("-") else "--set"
            self.error(
                message + (f"; here it is {meant}" if meant and needed in known else nearest(flag, known))
            )
        return options, unknown

    def _with_settings(self, words: Sequence[str] | None) -> list[str] | None:
        """KEY=VALUE alone becomes --set KEY=VALUE, in its place, where no other words may look like that."""
        flags = self._option_string_actions
        others = any(action.nargs in ("*", "+") for action in self._get_positional_actions())
        if words is None or "--set" not in flags or others:
            return None if words is None else list(words)
        found = list[str]()
        for before, word in zip(["", *words], words, strict=False):
            value = before in flags and flags[before].nargs not in (0, "?")  # of the flag before it
            found += ["--set", word] if _SETTING.fullmatch(word) and not value else [word]
        return found

    def error(self, message: str) -> NoReturn:
        """Ends with code 2."""
        if found := _CHOICE.search(message):
            meant = command_meant(found[1]) if "'runs'" in found[2] else ""
            message += (
                f"; here it is {meant}" if meant else nearest(found[1], re.findall(r"[\w-]+", found[2]))
            )
        line = redact_text(" ".join(message.split()))
        print(f"trainer: error: {line} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(EXIT_BAD_INPUT)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands; its help lists them by group."""
    parser = Parser(
        prog="trainer",
        usage="trainer [-h] [--version] COMMAND ...",
        description="Trains PyTorch models. A stopped run resumes exactly; every result can be checked.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"trainer {__version__}")
    commands = parser.add_subparsers(
        required=True, prog="trainer", metavar="COMMAND", dest="command", help=argparse.SUPPRESS
    )
    for command in COMMANDS:
        named(f"trainer.commands.{command}:add_parser")(commands)
    about = {one.dest: one.help for one in commands._choices_actions}
    groups = dict[str, list[str]]()
    for name, group in COMMANDS.items():
        groups.setdefault(group, [f"{group}:"]).append(f"  {name:<13}{about.get(name) or ''}")
    parser.epilog = "\n\n".join(
        [*map("\n".join, groups.values()), "Options of a command: trainer COMMAND --help"]
    )
    return parser
