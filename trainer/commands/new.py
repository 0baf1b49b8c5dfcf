"""`trainer new`: writes the template of a custom task."""

import argparse
import importlib.resources
import os
from pathlib import Path
from typing import Any

from trainer.errors import EXIT_DONE, BadInputError, writing
from trainer.host.files import write_whole


def add_parser(commands: Any) -> None:
    """Adds `new` to the commands."""
    parser = commands.add_parser("new", help="Write a template for a custom task.", allow_abbrev=False)
    parser.add_argument("file", type=Path, metavar="FILE.py", help="file to write; it trains as it is")
    parser.set_defaults(run=new)


def new(options: argparse.Namespace) -> int:
    """Writes the template, which trains as it is; an existing file is left alone.

    Raises:
        BadInputError: If the file can't be written, exists already, or isn't named .py.
    """
    path: Path = options.file
    if path.suffix != ".py":
        raise BadInputError(f"{path}: a task is a Python file; name it {path.stem or 'my_task'}.py")
    text = (importlib.resources.files("trainer") / "tasks" / "example.py").read_text("utf-8")
    if os.path.lexists(path):
        raise BadInputError(f"{path}: is there already, and stays as it is; give another name")
    with writing(str(path), "give another place"):
        write_whole(path, text)
    print(f"{path}: a task that trains as it is\n  next  trainer check {path}\n  then  trainer train {path}")
    return EXIT_DONE
