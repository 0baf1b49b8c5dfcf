"""A file with a custom task: what can be read from it without running it."""

import ast
import hashlib
from pathlib import Path
from typing import Any

from trainer.errors import BadInputError

# The name that a task's file has as a module.
MODULE = "trainer_custom_task"


def custom_task_recipe(path: Path) -> dict[str, Any]:
    """The configuration that a task file holds: its RECIPE, a dict of plain values, read but not run.

    Raises:
        BadInputError: If the file isn't Python, or RECIPE isn't that.
    """
    text = read_source(path)
    try:
        tree = ast.parse(text, str(path))
    except SyntaxError as error:
        raise BadInputError(f"{path} line {error.lineno}: {error.msg}; mend the syntax") from error
    values: Any = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "RECIPE" for target in targets):
            try:
                values = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            except (ValueError, TypeError) as error:
                raise BadInputError(
                    f"{path} line {node.lineno}: RECIPE is read before the file is run: plain numbers and "
                    "words only, no names and no calls"
                ) from error
    if not isinstance(values, dict):
        raise BadInputError(f'{path}: RECIPE is a dict such as {{"epochs": 5}}, not {type(values).__name__}')
    return {"epochs": 1, **values, "task": str(path.absolute())}


def source_hash(path: Path) -> str:
    """SHA-256 of a task's file, hexadecimal, shortened: for the comparison of two attempts."""
    return text_hash(read_source(path))


def text_hash(text: str) -> str:
    """SHA-256 of a task's source, hexadecimal, shortened."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_source(path: Path) -> str:
    """The text of a task's file.

    Raises:
        BadInputError: If it can't be read.
    """
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path}: not a text file in UTF-8") from error
    except OSError as error:
        raise BadInputError(
            f"{path}: can't be read ({error.strerror}); begin one by `trainer new {path}`"
        ) from error
