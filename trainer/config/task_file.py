"""File of a custom task: its recipe and the hash of its code, read without running it."""

import ast
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from trainer.errors import BadInputError, reading

_COMPILED = (*EXTENSION_SUFFIXES, *BYTECODE_SUFFIXES)
_LARGEST = 64 << 20

# Defaults of a custom task: small data need more than an epoch; a linear fit with a slope of 3 needs more
# than the usual rate of 0.001, and with 0.01 transformers learn nothing.
OWN_LR, OWN_STEPS, OWN_EPOCHS = 0.003, 2000, 1_000_000


def split_task(task: str) -> tuple[Path, str]:
    """Splits FILE.py:CLASS into the file and the name of its class; "" without one: the file's only class."""
    file, _, name = task.rpartition(":")
    return (Path(file), name) if file.endswith(".py") and name.isidentifier() else (Path(task), "")


def is_task_file(task: object) -> bool:
    """True if a recipe's task is FILE.py or FILE.py:CLASS."""
    return split_task(str(task))[0].suffix == ".py"


def is_own(task: object) -> bool:
    """True if a recipe's task is the user's: a file, or a class that was passed to `fit`."""
    return task == "own" or is_task_file(task)


def custom_task_recipe(task: str) -> dict[str, Any]:
    """Returns the RECIPE of a task's class or file, a dict of plain values, without running the file.

    Raises:
        BadInputError: If the file isn't Python, RECIPE isn't a dict of plain values, or there are two.
    """
    path, name = split_task(task)
    text = read_source(path)
    try:
        tree = ast.parse(text, str(path))
    except SyntaxError as error:
        raise BadInputError(f"{path} line {error.lineno}: {error.msg}; mend the syntax") from error
    values: Any = {}
    of_file, of_class = _recipe_in(tree), _recipe_of_class(tree, name)
    if of_class is not None and ast.unparse(of_class) == "RECIPE":  # class Mine: RECIPE = RECIPE
        of_class = None
    if of_file is not None and of_class is not None and ast.dump(of_file) != ast.dump(of_class):
        raise BadInputError(
            f"{path} line {of_class.lineno}: RECIPE is in the class and in line {of_file.lineno}; keep one"
        )
    if (node := of_class or of_file) is not None:
        try:
            values = ast.literal_eval(node)
        except (ValueError, TypeError) as error:
            raise BadInputError(
                f"{path} line {node.lineno}: RECIPE is read before the file is run: plain numbers and "
                "words only, no names and no calls"
            ) from error
    if not isinstance(values, dict):
        raise BadInputError(f'{path}: RECIPE is a dict such as {{"epochs": 5}}, not {type(values).__name__}')
    return {**values, "task": str(Path(task).absolute())}


def _recipe_in(body: ast.Module | ast.ClassDef) -> ast.expr | None:
    """Returns what is assigned to RECIPE in a module or class, without what is within its own parts."""
    found: ast.expr | None = None
    for node in body.body:
        match node:
            case ast.Assign(targets=targets, value=value) if any(map(_is_recipe, targets)):
                found = value
            case ast.AnnAssign(target=target, value=value) if _is_recipe(target):
                found = value
            case _:
                pass
    return found


def _is_recipe(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id == "RECIPE"


def _recipe_of_class(tree: ast.Module, name: str) -> ast.expr | None:
    """Returns the RECIPE of the class of this name, or of its bases; without a name, of the only task."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

    def lineage(node: ast.ClassDef) -> list[ast.ClassDef]:
        bases = [classes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
        return [node, *(one for base in bases if base is not node for one in lineage(base))]

    def is_task(node: ast.ClassDef) -> bool:
        parts = [part for one in lineage(node) for part in one.body]
        return any(isinstance(part, ast.FunctionDef) and part.name == "loss" for part in parts)

    tasks = [classes[name]] if name in classes else [one for one in classes.values() if is_task(one)]
    if len(tasks) != 1:
        return None
    return next((found for one in lineage(tasks[0]) if (found := _recipe_in(one)) is not None), None)


def with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of a custom task with default length and learning rate, if it has none."""
    optim, evaluation = (values.get(name, {}) for name in ("optim", "evaluation"))
    if isinstance(optim, dict) and optim.get("name", "adamw") == "adamw":
        values = {**values, "optim": {"lr": OWN_LR, **optim}}
    if "epochs" in values:
        return values
    if isinstance(evaluation, dict):
        evaluation = {"every": f"{OWN_STEPS // 10} steps", **evaluation}
    return {"max_steps": OWN_STEPS, **values, "epochs": OWN_EPOCHS, "evaluation": evaluation}


def source_hash(path: Path) -> str:
    """Returns the SHA-256 of a task's file and of the modules beside it that it imports, 16 digits.

    It tells whether two attempts ran the same code. Without such modules it is the hash of the text.
    """
    return hash_of_sources(read_source(path).encode(), modules_beside(path))[:16]


def hash_of_sources(text: bytes, modules: Mapping[str, bytes]) -> str:
    """Returns the SHA-256 of a file and of modules by their paths, hexadecimal."""
    whole = hashlib.sha256(text)
    for name, content in sorted(modules.items()):
        whole.update(b"\0" + os.fsencode(name) + b"\0" + hashlib.sha256(content).digest())
    return whole.hexdigest()


def modules_beside(path: Path) -> dict[str, bytes]:
    """Returns the modules in a file's folder that it imports, and that these import, as bytes by path.

    They are found by import statements anywhere in the source, and by `import_module("name")`. If a name is
    computed at run time, all modules in that file's own folder count.
    """
    return _imported_from(path.parent, [path], path)


def modules_of(folder: Path, name: str) -> dict[str, bytes]:
    """Returns a module below a folder, its packages and their imports from there; see `modules_beside`."""
    return _imported_from(folder, list(_files(folder, name.split("."))), None)


def _imported_from(folder: Path, left: list[Path], but: Path | None) -> dict[str, bytes]:
    found = dict[str, bytes]()
    while left:
        file = left.pop()
        try:
            content = source_bytes(file)
            tree = ast.parse(content)
        except (OSError, SyntaxError, ValueError):  # reported where it is imported
            tree = ast.Module([], [])
        if file != but:
            found[file.relative_to(folder).as_posix()] = content
        package = file.parent.relative_to(folder).parts
        named = [one for node in ast.walk(tree) for one in _imported(node, package)]
        files = [place for parts in named if parts for place in _files(folder, parts)]
        files += sorted(file.parent.glob("*.py")) if () in named else []
        left += [
            one
            for one in dict.fromkeys(files)
            if one != but and one.relative_to(folder).as_posix() not in found
        ]
    return found


def _imported(node: ast.AST, package: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields the parts of the names that a statement may import; () for a name computed at run time."""
    if isinstance(node, ast.Import):
        yield from (tuple(one.name.split(".")) for one in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = tuple(package[: len(package) + 1 - node.level]) if node.level else ()
        module = (*above, *(node.module or "").split(".")) if node.module else above
        yield from ((*module, one.name) for one in node.names)
    elif isinstance(node, ast.Call) and node.args:
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called in ("import_module", "__import__"):
            name = getattr(node.args[0], "value", None)
            if isinstance(name, str) and name:
                yield tuple(filter(None, (*(package if name[0] == "." else ()), *name.split("."))))
            else:
                yield ()


def _files(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yields the files of a module in the folder, and of the packages that it is in."""
    for number in range(1, len(parts) + 1 if parts[0] != "trainer" else 0):
        place = folder.joinpath(*parts[:number])
        stems = (place / "__init__", place)
        both = (stem.with_name(f"{stem.name}.py") for stem in stems)
        if (file := next(filter(Path.is_file, both), None)) is not None:
            yield file
        # Files that Python prefers to a .py, or takes in its place.
        compiled = (stem.with_name(stem.name + end) for stem in stems for end in _COMPILED)
        yield from filter(Path.is_file, compiled)


def read_source(path: Path) -> str:
    """Returns the text of a task's file.

    Raises:
        BadInputError: If it can't be read.
    """
    with reading(path, f"begin one by `trainer new {path}`"):
        content = source_bytes(path)
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path}: not a text file in UTF-8") from error


def source_bytes(path: Path) -> bytes:
    """Returns the bytes of a file of code.

    Raises:
        OSError: If it can't be read.
        BadInputError: If it is larger than 64 MiB, a FIFO or a device.
    """
    if path.exists() and not path.is_file() and not path.is_dir():  # opening a FIFO would block
        raise BadInputError(f"{path}: isn't a regular file; give another")
    with path.open("rb") as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise BadInputError(f"{path}: larger than {_LARGEST >> 20} MiB, so no code; give another file")
    return content
