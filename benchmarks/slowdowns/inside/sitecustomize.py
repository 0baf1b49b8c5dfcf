"""Put on PYTHONPATH by `benchmarks.slowdowns`: slows a training from inside, as its user's own code would.

SLOW_INSIDE says how, as JSON: name of a function of `users_code` and its arguments.
"""

import json
import os
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_ORDER: dict[str, Any] = json.loads(os.environ.get("SLOW_INSIDE", "{}"))


class _After(MetaPathFinder, Loader):
    """Lets the user's code run when a module of the trainer has been imported."""

    def find_spec(self, name: str, path: Any, *_: Any) -> ModuleSpec | None:
        if name != "trainer.train.step":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        users_code = import_module("users_code")  # beside this file
        for name, arguments in _ORDER.items():
            getattr(users_code, name)(**arguments)


if _ORDER:  # in a rank, or in the launcher that forks it
    sys.meta_path.insert(0, _After())
