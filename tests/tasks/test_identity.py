"""Promise: a task is the same if its code, the values that it reads and its attributes are; not its text."""

import collections
import dataclasses
import importlib
import itertools
import json
import os
import random
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.refusals import named
from trainer.tasks import bytecode
from trainer.tasks.bytecode import digest_of_statements
from trainer.tasks.identity import Identity, identity_of

CELL = '''
SCALE, OTHER, TABLE = 2, [1, 2], {"a": 1, "b": 2}
WORDS = {"one", "two", "three"}


def helper(x, power=2):
    return inner(x) ** power


def inner(x):
    return x + SCALE


class Base:
    width = 8

    def model(self):
        return (self.width, OTHER)


def make(factor):
    class Task(Base):
        """The task."""

        kinds = ("a", "b")

        def __init__(self, weight=1):
            self.weight = weight

        def loss(self, x):
            """The loss."""
            return factor * helper(x) + sum(map(lambda one: one * 3, TABLE.values()))

        def measure(self, x):
            return x in {"left", "right", "up", "down", "near", "far"} or x in WORDS

    return Task


Task = make(5)
'''
_NUMBERS = itertools.count(1)


def cell(text: str = CELL, *changes: tuple[str, str]) -> Any:
    """Runs a cell of a notebook: there is no file of its name, and its module is `__main__`."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, f"/tmp/ipykernel_1/{next(_NUMBERS)}.py", "exec"), namespace)
    return namespace["Task"]


def differing(one: Identity, other: Identity) -> set[str]:
    """Names of the entries that differ."""
    pairs = ((one.code, other.code), (one.values, other.values))
    return {name for a, b in pairs for name in a.keys() | b.keys() if a.get(name) != b.get(name)}


INNER = "\n\n\ndef inner(x):\n    return x + SCALE\n"


@pytest.mark.parametrize(
    "changes",
    [
        [("\n\nclass Base", "\n\n# A comment.\n\n\nclass Base")],
        [('            """The loss."""\n', "")],
        [('WORDS = {"one", "two", "three"}', 'WORDS = {"three", "one", "two"}')],
        [('{"a": 1, "b": 2}', '{"b": 2, "a": 1}')],
        [(INNER, ""), ("\n\nTask = make(5)\n", f"\n\nTask = make(5)\n{INNER}")],  # moved
        [('x in {"left", "right", ', 'x in {"right", "left", ')],
    ],
    ids=lambda changes: changes[0][0].strip()[:20],
)
def test_what_changes_nothing(changes: list[tuple[str, str]]) -> None:
    assert identity_of(cell(CELL, *changes)()) == identity_of(cell()())


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (("factor * helper", "factor + helper"), "method loss"),
        (('"right"', '"wrong"'), "method measure"),
        (("width = 8", "width = 9"), "attribute width"),
        (("make(5)", "make(6)"), "closure factor loss"),
        (("return inner(x)", "return 2 * inner(x)"), "function helper"),
        (("return x + SCALE", "return x - SCALE"), "function inner"),
        (("power=2", "power=3"), "default power helper"),
        (("SCALE, OTHER, TABLE = 2", "SCALE, OTHER, TABLE = 3"), "SCALE"),
        (('"three"}', '"four"}'), "WORDS"),
    ],
    ids=str,
)
def test_what_changes_something_is_named(change: tuple[str, str], name: str) -> None:
    assert named(differing(identity_of(cell()()), identity_of(cell(CELL, change)())), name)


def test_arguments_of_the_constructor() -> None:
    kind = cell()
    one, three = identity_of(kind(1)), identity_of(kind(3))
    assert differing(one, three) == {"attribute weight"}
    assert (one.values["attribute weight"], three.values["attribute weight"]) == ("1", "3")


def identity_with(value: Any) -> Identity:
    return identity_of(types.SimpleNamespace(value=value))


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    names: list[str] = dataclasses.field(default_factory=list)


class Slotted:
    __slots__ = ("kept",)

    def __init__(self, kept: int) -> None:
        self.kept = kept


class Numbers(set[int]):
    """A set of a class of its own."""


def linear(bias: float) -> nn.Module:
    net = nn.Linear(2, 1)
    with torch.no_grad():
        net.weight.fill_(1)
        net.bias.fill_(bias)
    return net


def circle(number: int) -> list[Any]:
    made: list[Any] = [number]
    made.append(made)
    return made


VALUES: list[Callable[[int], Any]] = [
    *(lambda n: n, lambda n: "word" * n * 20, lambda n: {"deep": [{"a": (n, None)}]}),
    *(lambda n: np.arange(4) * n, lambda n: np.ma.masked_equal([1, 2, 3], n)),
    *(lambda n: torch.full((2, 2), n), linear, lambda n: nn.utils.parametrizations.weight_norm(linear(n))),
    *(Config, Slotted, circle, lambda n: collections.defaultdict(int if n == 1 else list)),
    *(lambda n: (1,) if n == 1 else [1], lambda n: {frozenset({"a", "b", "c" * n})}),
    *(lambda n: lambda x: x * n, lambda n: [threading.Lock(), n]),
    *(np.random.default_rng, lambda n: [random.Random(n).random]),
]


@pytest.mark.parametrize("make", VALUES)
def test_values_are_compared(make: Callable[[int], Any]) -> None:
    one, again, other = (identity_with(make(number)) for number in (1, 1, 2))
    assert differing(one, again) == set() and differing(one, other) != set()


@pytest.mark.parametrize(
    "make",
    [threading.Lock, Path(os.devnull).open, lambda: (one for one in [1]), lambda: [sys._getframe()]],
)
def test_what_has_no_stable_value_is_named(make: Callable[[], Any]) -> None:
    one, other = (identity_with(value) for value in (make(), make()))
    assert one.unknown == ("attribute value",) and differing(one, other) == set()


def test_secrets_are_neither_stored_nor_compared() -> None:
    one, other = ({"api_key": f"sesame{n}", "path": f"https://me:pass{n}word@host/x"} for n in (1, 2))
    first, second = (identity_of(types.SimpleNamespace(**each, all=each)) for each in (one, other))
    assert differing(first, second) == set()
    assert not any(secret in json.dumps(first) for secret in ("sesame", "word@"))


DECORATED = """
import functools, torch
from dataclasses import dataclass, field
def wraps(by):
    def outer(function):
        @functools.wraps(function)
        def called(*args):
            return by * function(*args)
        return called
    return outer
def add(x): return x + 1
@dataclass
class Settings:
    size: int = 3
    parts: list = field(default_factory=lambda: [1])
class Task:
    added = functools.partial(add, 2)
    other = staticmethod(add)
    settings = Settings()
    @wraps(7)
    def loss(self, x): return x * 10
    @torch.no_grad()
    def measure(self, x): return x * 20
    @property
    def size(self): return 30
    @functools.cached_property
    def cached(self): return 40
    @functools.lru_cache
    def kept(self): return 50
    @classmethod
    def made(cls): return cls() or 60
    def uses(self): return self.added() or Settings(4).size
"""


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("by * function", "method loss"),
        ("@wraps(7)", "closure by of method loss"),
        ("return 30", "method size"),
        ("return 50", "function Task.kept"),
        ("x + 1", "function add"),
        ("add, 2", "class attribute added"),
        ("lambda: [1]", "function <lambda>"),
        ("Settings(4)", "method uses"),
    ],
)
def test_decorated_methods_and_other_members(old: str, name: str) -> None:
    changed = old.translate(str.maketrans("0123456789*", "1234567890+"))
    assert changed != old and DECORATED.count(old) == 1
    found = differing(identity_of(cell(DECORATED)()), identity_of(cell(DECORATED, (old, changed))()))
    assert any(name.rsplit(maxsplit=1)[-1] in one for one in found), found


def test_a_class_without_a_module() -> None:
    """`exec` with a namespace of its own says "builtins"."""
    found = []
    for text in (CELL, CELL.replace("one * 3", "one * 4")):
        namespace: dict[str, Any] = {}
        exec(text, namespace)
        found.append(identity_of(namespace["Task"]()))
    assert "method loss" in differing(*found)


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        del sys.modules[name]


def of_modules(folder: Path, **texts: str) -> Identity:
    """Writes modules, imports `task` anew and returns the identity of its class."""
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    sys.dont_write_bytecode = True
    return identity_of(importlib.import_module("task").Task())


def test_modules_of_the_user_count_by_what_is_used(importable: Path) -> None:
    texts = {
        "task": """
            import numpy, helpers
            from helpers import g as renamed
            class Task:
                def loss(self, x): return helpers.f(x) + renamed(x)
                def model(self):
                    from late import LATE
                    return LATE
        """,
        "helpers": "SCALE = 2\ndef f(x): return x * SCALE\ndef g(x): return x\ndef unused(x): return x\n",
        "late": "LATE = 1\n",
    }
    before = of_modules(importable, **texts)
    changes = {
        "x * SCALE": ("x + SCALE", {"function helpers.f"}),
        "SCALE = 2": ("SCALE = 3", {"global helpers.SCALE"}),
        "def g(x): return x": ("def g(x): return -x", {"function renamed"}),
        "def unused(x): return x": ("def unused(x): return -x", set()),
    }
    for old, (new, names) in changes.items():
        helpers = texts["helpers"].replace(old, new)
        assert differing(before, of_modules(importable, **{**texts, "helpers": helpers})) == names
    late = of_modules(importable, **{**texts, "late": "LATE = 2\n"})
    assert differing(before, late) == {"module late.py"}
    assert differing(before, of_modules(importable, **{**texts, "late": "# new\nLATE = 1\n"})) == set()


def test_a_folder_that_was_moved_is_the_same(importable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
        from pathlib import Path
        HERE = Path(__file__).parent
        NAMES = [str(HERE / 'x')] * 50
        class Task:
            def __init__(self): self.root = str(HERE / 'data')
            def loss(self): return HERE, NAMES
    """
    found = []
    for name in ("a", "b"):
        (importable / name).mkdir()
        monkeypatch.syspath_prepend(str(importable / name))
        found.append(of_modules(importable / name, task=text))
    assert differing(*found) == set()


def test_another_hash_seed_is_the_same() -> None:
    """Sets in code have the order of a process's hashes; those of numbers that of their making."""
    text = "def f(x):\n    return x in {'left', 'right', 'up', 'down', 'near', 'far'}\n"
    code = (
        "import runpy, sys\n"
        "scan = runpy.run_path(sys.argv[1])['scan']\n"
        "print(scan(compile(sys.argv[2], '', 'exec')).digest)"
    )
    said = {
        subprocess.check_output(
            [sys.executable, "-c", code, bytecode.__file__, text],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
        )
        for seed in (1, 2, 3)
    }
    assert said == {f"{bytecode.scan(compile(text, '', 'exec')).digest}\n".encode()}
    assert list({0, 8}) != list({8, 0})
    for kind in (set, Numbers):
        assert identity_with(kind([0, 8])) == identity_with(kind([8, 0]))


def test_statements_beside_definitions() -> None:
    text = "'doc'\nimport os\nX = 1\ndef f(): pass\nif __name__ == '__main__':\n    f()\n"
    assert digest_of_statements(text.encode()) == ""
    one, two = (digest_of_statements(f"{text}import torch\ntorch.set_{n}(1)\n".encode()) for n in "ab")
    assert one and one != two
