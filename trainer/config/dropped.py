"""Keys of earlier versions that are gone, and what replaces each.

A recipe that holds one is refused, with the recipe without it. What runs have stored is read without it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from trainer.config.yaml_text import to_yaml
from trainer.errors import BadInputError

DROPPED = {
    "checkpoint.folder": "put the whole run on the large disk by --out, as a link if you like",
    "data.image_bits": "images of 16 bits that use fewer are to be saved as 8 bits (numpy: image >> 4)",
    "language.attention": "leave it out: packed documents are kept apart by a mask on every device",
    "memory.history": 'call torch.cuda.memory._record_memory_history() in a hook with ranks = "all"',
    "model.mirror": "where torchvision's files can't be fetched, copy XDG_CACHE_HOME/trainer/weights from a "
    "machine that has them, or give a safetensors file by model.pretrained",
    "parallel.static_graph": "leave it out: results are the same without it",
}


class DroppedKeysError(BadInputError):
    """Keys that are gone: a line for each.

    Attributes:
        recipe: The recipe without them, as YAML; empty if they came from settings alone.
    """

    def __init__(self, lines: list[str], recipe: str) -> None:
        """With the lines."""
        super().__init__("\n".join(lines))
        self.recipe = recipe


def without_dropped(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a configuration without the keys that are gone, and without sections that held nothing else."""
    kept = dict[str, Any]()
    for name, value in values.items():
        if (key := f"{prefix}{name}") in DROPPED:
            continue
        if isinstance(value, Mapping):
            inner = without_dropped(value, f"{key}.")
            if inner or not value:
                kept[name] = inner
        else:
            kept[name] = value
    return kept


def refuse_dropped(values: Mapping[str, Any], given: Mapping[str, Any], source: str) -> None:
    """Refuses a recipe that holds keys that are gone.

    Args:
        values: The recipe.
        given: The recipe with all settings.
        source: Name of the recipe.

    Raises:
        DroppedKeysError: If it holds any.
    """
    if gone := list(_gone(given)):
        left = without_dropped(values)
        recipe = to_yaml(left) if left != values else ""
        remedy = "; the recipe without it is printed" if recipe else ""
        raise DroppedKeysError([f"{source}: {key} is gone: {DROPPED[key]}{remedy}" for key in gone], recipe)


def _gone(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if (key := f"{prefix}{name}") in DROPPED:
            yield key
        elif isinstance(value, Mapping):
            yield from _gone(value, f"{key}.")
