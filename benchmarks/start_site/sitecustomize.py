"""Notes when a start reaches its phases. Python imports it first where its folder is in PYTHONPATH.

Each line of the file that START_MARKS names: what was reached, the process, its CPU seconds and its parent's
so far, a clock in seconds, how many modules it has. A fork begins anew with its CPU seconds.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

# By module: its function, whether reaching or leaving it counts, and what that is called.
_MARKS = {
    "trainer.config.recipe_file": ("provisional", "left", "validated"),
    "trainer.train.start.job": ("start", "reached", "imported"),
    "trainer.launch.launcher": ("launch", "reached", "launched"),
    "trainer.train.start.rank": ("train_rank", "reached", "imported"),
    "trainer.train.components.task": ("make_task", "left", "data"),
    "trainer.train.start.prepare": ("prepared_in_turns", "left", "prepared"),
    "trainer.train.components.run": ("build", "left", "model"),
    "trainer.train.step": ("train_step", "left", "stepped"),
}
_noted = set[tuple[int, str]]()


def _note(name: str) -> None:
    if (os.getpid(), name) in _noted:
        return
    _noted.add((os.getpid(), name))
    used = os.times()
    with open(f"/proc/{os.getppid()}/stat", encoding="utf-8") as stat:  # noqa: PTH123  (pathlib is a phase's)
        parent = sum(map(int, stat.read().rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")
    with open(os.environ["START_MARKS"], "a", encoding="utf-8") as file:  # noqa: PTH123
        cpu = used.user + used.system
        file.write(f"{name} {os.getpid()} {cpu:.3f} {parent:.3f} {time.monotonic():.3f} {len(sys.modules)}\n")


def _noting(function: Callable[..., Any], when: str, name: str) -> Callable[..., Any]:
    def noting(*values: Any, **named: Any) -> Any:
        if when == "reached":
            _note(name)
        result = function(*values, **named)
        if when == "left":
            _note(name)
        return result

    return noting


class _Finder:
    """Finds what the others find, and has functions of it noted."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        """See `importlib.abc.MetaPathFinder`."""
        if name not in _MARKS:
            return None
        others = (finder for finder in sys.meta_path if finder is not cls)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)))
        assert spec.loader is not None
        execute, (function, when, mark) = spec.loader.exec_module, _MARKS[name]

        def execute_and_wrap(module: Any) -> None:
            execute(module)
            setattr(module, function, _noting(getattr(module, function), when, mark))

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


if "START_MARKS" in os.environ:
    _note("began")
    sys.meta_path.insert(0, _Finder)
