"""Imports what a row of a registry names; rows hold text, so that the schema imports no torch."""

import importlib
from typing import Any


def named(where: str) -> Any:
    """Imports what "module:name" names."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)
