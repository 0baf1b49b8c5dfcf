"""Promise: parsing an untrusted file never fills the memory, hangs or ends in a traceback."""

import ast
from pathlib import Path

import pytest

import trainer
from tests.helpers.refusals import refused
from trainer.config.recipe_file import read_recipe
from trainer.config.yaml_text import parse_yaml, to_yaml
from trainer.host import strict_json

# Who may call a parser itself, and why.
_OWN_WORDS = {
    *("host/strict_json.py",),  # the bounded parser
    *("host/stacks.py",),  # a file of the package, and one of the environment that it is installed in
    *("launch/as_launcher.py", "launch/folder.py", "launch/exit_record.py"),  # the launch's own folder
    *("checkpoint/background.py", "distributed/turns.py", "distributed/watchdog.py"),  # words of ranks
    *("train/evaluate.py", "launch/meeting.py"),  # words of this run's ranks, and of this job's nodes
    *("train/model_of_run.py", "tasks/trial.py"),  # what this process has just made
    *("train/start/micro_batch.py", "commands/evaluate/evaluate.py"),  # folders for their user alone
}
_PARSERS = {*("json.load", "json.loads", "pickle.load", "pickle.loads"), "marshal.loads", "torch.load"}
_PARSERS |= {"eval", "exec"}


def test_only_bounded_parsers_see_files() -> None:
    found = dict[str, set[str]]()
    root = Path(trainer.__file__).parent
    for file in root.rglob("*.py"):
        text = file.read_text()
        if not any(word in text for word in ("load", "eval(", "exec(")):
            continue
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call):
                name = ast.unparse(call.func)
                if name in _PARSERS or (name.startswith("yaml.") and "load" in name):
                    found.setdefault(file.relative_to(root).as_posix(), set()).add(name)
    assert found.pop("config/yaml_text.py") == {"yaml.load"}
    assert found.pop("models/pretrained.py") == {"torch.load"}  # see test_pretrained.py
    assert {file for file, names in found.items() if names == {"json.loads"}} == set(found) == _OWN_WORDS


def _bomb(line: str) -> str:
    return "\n".join(["a0: &a0 {x: 1, y: 2}", *(line.format(n, n - 1) for n in range(1, 40))])


BOMBS = {
    "aliases": _bomb("a{0}: &a{0} [*a{1}, *a{1}]"),
    "merge keys": _bomb("a{0}: &a{0}\n  <<: [*a{1}, *a{1}]"),
    "pairs": _bomb("a{0}: &a{0} !!pairs [x: *a{1}, y: *a{1}]"),
    "depth": "[" * 1_000,
    "digits": f"x: {'9' * 10_000}",
    "itself": "a: &a [*a]",
    "an object": "x: !!python/object/apply:os.system [id]",
}


@pytest.mark.parametrize("name", BOMBS)
def test_yaml_has_bounds(name: str) -> None:
    with refused("recipe"):
        parse_yaml(BOMBS[name], "recipe")


def test_values_come_back_from_yaml() -> None:
    """PyYAML's own dumper writes for YAML 1.1: `08` and `1e3` would come back as numbers."""
    values = ["08", "1e3", "+.5", ".inf", "on", "1:30", "null", "", "~", "a #b", "\x85", 8, 1e-5, 1e16, None]
    assert parse_yaml(to_yaml(values), "recipe") == values


@pytest.mark.parametrize("data", [b"[" * 100_000, b"9" * 10_000, b"\xff", b""])
def test_json_has_bounds(data: bytes) -> None:
    for parse in (strict_json.parse, strict_json.parse_quickly):
        with pytest.raises(ValueError):
            parse(data)
    with pytest.raises(ValueError, match="larger than"):
        strict_json.parse_quickly(b" " * 11, most=10)


def test_files_that_are_named_have_an_end(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.symlink_to("/dev/zero")
    with refused(path):
        read_recipe(str(path))
