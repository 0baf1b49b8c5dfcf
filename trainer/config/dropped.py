"""Keys of earlier versions that are gone, and what replaces each.

A configuration may still hold one at its old default, as those that runs have stored: it is left out. With
another value it is refused with the replacement.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Dropped(NamedTuple):
    """A key that is gone: its default, with which it changed nothing, and what to do instead."""

    default: Any
    instead: str


DROPPED = {
    "memory.history": Dropped(
        False, 'call torch.cuda.memory._record_memory_history() in a hook with ranks = "all"'
    ),
    "model.mirror": Dropped(
        None,
        "where torchvision's files can't be fetched, copy XDG_CACHE_HOME/trainer/weights from a machine that "
        "has them, or give a safetensors file by model.pretrained",
    ),
    "parallel.static_graph": Dropped(False, "leave it out: results are the same without it"),
}


def without_dropped(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a configuration without the keys that are gone, as far as they are at their defaults."""
    return {
        name: without_dropped(value, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in values.items()
        if (key := f"{prefix}{name}") not in DROPPED or value != DROPPED[key].default
    }
