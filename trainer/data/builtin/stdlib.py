"""Embedded text: the source of the running Python's standard library.

It differs between Python versions, and so does the data fingerprint; losses are comparable for one version
only.
"""

import hashlib
import sysconfig
from pathlib import Path

import numpy as np

from trainer.data.formats.text import Text, join_documents
from trainer.errors import BadInputError, reading
from trainer.rng import Purpose, key

END = 0  # Python source holds no byte 0
HELD_OUT = 20  # one module in 20 is for evaluation

# Tests, generated tables (character sets, documentation), and packages that aren't the library.
_LEFT_OUT = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}


def read_modules(folder: Path | None = None) -> dict[str, bytes]:
    """Returns the modules' source by path, sorted by path.

    Args:
        folder: Folder of the library; None: the running Python's.

    Raises:
        BadInputError: If there is too little source text, or it can't be read.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    modules = {}
    for file in root.rglob("*.py"):
        name = file.relative_to(root)
        if _LEFT_OUT.isdisjoint(name.parts) and not file.name.startswith("_sysconfigdata"):
            with reading(f"data.name=stdlib: {file}", "repair this Python"):
                text = file.read_bytes()
            if text and END not in text:
                modules[name.as_posix()] = text
    if not any(map(is_held_out, modules)) or all(map(is_held_out, modules)):
        raise BadInputError(
            f"data.name=stdlib: {root} holds {len(modules)} modules as source text, too few to hold some "
            "out; use a Python whose library isn't compiled or zipped, or data.name=tokens"
        )
    return dict(sorted(modules.items()))


def is_held_out(name: str) -> bool:
    """True if a module is for evaluation, by a hash of its path."""
    digest = hashlib.sha256(name.encode()).digest()
    return key(Purpose.SPLIT, int.from_bytes(digest[:8], "big")) % HELD_OUT == 0


def stdlib_text() -> tuple[Text, Text]:
    """Returns the texts for training and evaluation: the modules in order, each followed by a byte 0."""
    modules = read_modules()
    parts = [[text for name, text in modules.items() if is_held_out(name) is held] for held in (False, True)]
    learned, held = (join_documents([np.frombuffer(text, np.uint8) for text in part], END) for part in parts)
    return Text(learned, 256, END, "bytes"), Text(held, 256, END, "bytes")
