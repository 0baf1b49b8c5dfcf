"""Lazy import of names in the tables; these hold strings, so that the schema imports no torch."""

import importlib
from typing import Any


def named(where: str) -> Any:
    """Imports and returns the object of "module:name"."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)
