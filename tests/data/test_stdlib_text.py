"""Promise: the embedded text is the same on every host with this Python, and a run on it learns."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.planted import put
from tests.helpers.refusals import refused
from trainer.cli import main
from trainer.data.builtin.stdlib import END, is_held_out, read_modules, stdlib_text
from trainer.data.formats.documents import StreamDataset


def a_library(root: Path, modules: int = 60) -> Path:
    for number in range(modules):
        put(root, f"package{number % 3}/module{number}.py", content=b"x = %d\n" % number)
    others = "test/a.py", "site-packages/b.py", "encodings/cp1.py", "package1/tests/c.py", "notes.txt"
    put(root, *others, content=b"y = 1\n")
    put(root, "package1/nul.py", content=b"a\0b")
    return put(root, "package1/empty.py")


def test_which_modules_there_are(tmp_path: Path) -> None:
    modules = read_modules(a_library(tmp_path / "one"))
    assert len(modules) == 60 and list(modules) == sorted(modules)
    assert modules["package1/module1.py"] == b"x = 1\n"
    again = read_modules(a_library(tmp_path / "two"))
    assert again == modules, "whatever folder it lies in"
    held = {name for name in modules if is_held_out(name)}
    more = read_modules(a_library(tmp_path / "two", 80))
    assert {name for name in more if is_held_out(name)} & modules.keys() == held, "by the name alone"


def test_an_empty_library_is_one_line(tmp_path: Path) -> None:
    with refused(tmp_path, "0"):
        read_modules(tmp_path)


def test_the_text_is_all_of_the_modules() -> None:
    modules = read_modules()
    learned, held = stdlib_text()
    for text, is_held in ((learned, False), (held, True)):
        documents = text.tokens.tobytes().split(bytes([END]))
        assert documents.pop() == b""
        assert documents == [content for name, content in modules.items() if is_held_out(name) is is_held]
    assert 0.01 < len(held.tokens) / (len(learned.tokens) + len(held.tokens)) < 0.15
    assert len(learned.tokens) > 4e6
    other = StreamDataset(np.append(held.tokens, np.uint8(7)), 256, whole=True)
    assert other.fingerprint() != StreamDataset(held.tokens, 256, whole=True).fingerprint()


@pytest.mark.slow
def test_the_recipe_reaches_its_figure(tmp_path: Path) -> None:
    """Below 2.3 bits per byte; in five minutes on two quiet cores, which isn't tested."""
    # One thread: the other core has tests of its own, and two threads would wait for each other.
    words = ["--out", str(tmp_path / "run"), "--set", "parallel.threads=1"]
    assert main(["train", "gpt-stdlib", *words]) == 0
    summary = json.loads((tmp_path / "run" / "manifest.json").read_text())["summary"]
    assert summary["bits_per_byte"] < 2.3
