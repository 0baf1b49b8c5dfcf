"""Promise: a remedy names the flag that was typed; from Python no message names command-line flags."""

import ast
import re
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

import trainer
from trainer.cli import main
from trainer.errors import BadInputError
from trainer.observe.console import Told, tell_as, told_here
from trainer.observe.wording import StartWord, set_start, started_by, worded

ROOMS = (
    "config",
    "host",
    "observe",
    "launch",
    "distributed",
    "checkpoint",
    "data",
    "models",
    "optim",
    "tasks",
)
PLACE = "runs/a-1"
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
# Words of other programs, and of whole commands of ours, which can be typed anywhere.
_COMMAND = re.compile(
    r"`?(trainer (data|export|predict|evaluate|doctor|report|bench)|tar|docker run)\b[^;,)]*"
)
# Files of what `fit` never does: other commands, the launcher and its flags.
NOT_OF_FIT = {
    *("pack.py", "tokenize.py", "encoders.py", "gpus.py", "meeting.py", "nodes.py", "local_ranks.py"),
    *(
        "resolve.py",
        "options.py",
        "model_of_run.py",
        "export_formats.py",
        "flags.py",
    ),
}
OTHERS = {
    *("--backend-store-uri", "--logdir", "--dereference", "--hard-dereference"),
    *("--stop-after", "--exif-orientation", "--image-bits"),  # asked for by a command alone
}


def texts(file: Path) -> Iterator[str]:
    """The texts of a file but its docstrings; what is put into one is a path or a value."""
    source = file.read_text()
    nodes = list(ast.walk(ast.parse(source))) if FLAG.search(source) else []
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    inside |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else PLACE for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def remedies(leave_out: Collection[str] = ()) -> Iterator[str]:
    """Texts that a run can print and that name a flag."""
    root = Path(trainer.__file__).parent
    files = [file for room in ROOMS for file in (root / room).rglob("*.py")]
    files += (root / "train").rglob("*.py")
    for file in files:
        if file.name not in ("wording.py", "redact.py", *leave_out):
            yield from (text for text in texts(file) if FLAG.search(text) and " " in text)


@cache
def all_texts() -> list[str]:
    return sorted(set(remedies()))


def test_there_are_many() -> None:
    assert len(all_texts()) > 40
    assert all(any(flag in text for text in all_texts()) for flag in ("--out", "--resume"))


def test_from_python_none_speaks_of_the_command_line() -> None:
    with started_by("fit"):
        left = [worded(text) for text in remedies(NOT_OF_FIT)]
    assert len(left) > 40
    assert not [
        here for here in left if set(FLAG.findall(_COMMAND.sub("", here))) - OTHERS or "same command" in here
    ]


@pytest.mark.parametrize("how", ["--resume", ""])
def test_each_names_what_was_typed(how: StartWord) -> None:
    with started_by(how):
        for text in all_texts():
            here = worded(text)
            assert worded(here) == here
            assert "another --out" not in here
            if how == "--resume":
                assert not re.match(r"--out \S+: ", here), here


@pytest.mark.parametrize(
    ("how", "line", "here"),
    [
        ("fit", "needs --set data.path=DIR", 'needs settings={"data.path": "DIR"}'),
        ("fit", "with --set 'model.reinit=[\"head\"]'", 'with settings={"model.reinit": ["head"]}'),
        ("fit", "--set optim.lr=0.1: x", 'settings={"optim.lr": 0.1}: x'),
        ("fit", "key 'a'; --help-config shows every key", "key 'a'; docs/configuration.md has every key"),
        ("fit", "give --resume runs/a, else --init-from runs/a", 'give out="runs/a", else from_run="runs/a"'),
        ("fit", "--out runs/a: isn't empty", "out=runs/a: isn't empty"),
        ("fit", "go on by --out runs/a --resume force", 'go on by out="runs/a", resume="force"'),
        ("--resume", "--out runs/a: holds a run; x", "--resume runs/a: holds a run; x"),
        ("--resume", "go on by --out runs/a --resume force", "go on by --out runs/a --resume force"),
        ("", "runs/a: is full; give another --out", "runs/a: is full; give --out DIR"),
        ("--out", "runs/a: is full; give another --out", "runs/a: is full; give another --out"),
    ],
)
def test_words(how: StartWord, line: str, here: str) -> None:
    with started_by(how):
        assert worded(line) == here
    with pytest.raises(BadInputError) as error, started_by(how):
        raise BadInputError(line)
    assert str(error.value) == here


def test_a_rank_says_it_as_its_launcher_would() -> None:
    try:
        with started_by("--resume"):
            told = told_here()
        assert told.start == "--resume" and told_here().start == "--out"
        tell_as(told, 0)
        assert worded("--out runs/a: x") == "--resume runs/a: x"
    finally:
        tell_as(Told(), 0)
        set_start("--out")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--out", "runs/full"], "--out runs/full: isn't empty"),
        (["--out", "file"], "--out file: "),
    ],
)
def test_the_flag_that_was_typed(
    words: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/full").mkdir(parents=True)
    (tmp_path / "runs/full/note").touch()
    (tmp_path / "file").touch()
    assert main(["train", "digits", *words]) == 2
    assert capsys.readouterr().err.startswith(f"trainer: error: {named}")
