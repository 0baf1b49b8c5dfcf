"""The embedded text: the source of the standard library of the Python that runs this.

Another Python has another library, so figures hold for one version: the fingerprint of the data tells them
apart.
"""

import hashlib
import sysconfig
from pathlib import Path

import numpy as np

from trainer.data.formats.text import Text, joined
from trainer.errors import BadInputError
from trainer.rng import Purpose, key

END = 0  # source text holds no byte 0: Python refuses it
HELD_OUT = 20  # one module in so many

# Tests, tables that are generated (of character sets and of the documentation), and what isn't the library.
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
    """The modules' source, by their path below the library, in the order of these.

    Args:
        folder: Where the library is; None: that of this Python.

    Raises:
        BadInputError: If there is no source text, or it can't be read.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    modules = {}
    for file in root.rglob("*.py"):
        name = file.relative_to(root)
        if _LEFT_OUT.isdisjoint(name.parts) and not file.name.startswith("_sysconfigdata"):
            try:
                text = file.read_bytes()
            except OSError as error:
                raise BadInputError(
                    f"data.name=stdlib: {file} can't be read ({error.strerror}); repair this Python"
                ) from error
            if text and END not in text:
                modules[name.as_posix()] = text
    if not any(map(is_held_out, modules)) or all(map(is_held_out, modules)):
        raise BadInputError(
            f"data.name=stdlib: {root} holds {len(modules)} modules as source text, too few to hold some "
            "out; use a Python whose library isn't compiled or zipped, or data.name=tokens"
        )
    return dict(sorted(modules.items()))


def is_held_out(name: str) -> bool:
    """Whether a module is measured on and not learned from: by a hash of its name alone."""
    digest = hashlib.sha256(name.encode()).digest()
    return key(Purpose.SPLIT, int.from_bytes(digest[:8], "big")) % HELD_OUT == 0


def stdlib_text() -> tuple[Text, Text]:
    """Returns the texts for training and for evaluation: each module, in order, with a byte 0 after it."""
    modules = read_modules()
    parts = [[text for name, text in modules.items() if is_held_out(name) is held] for held in (False, True)]
    learned, held = (joined([np.frombuffer(text, np.uint8) for text in part], END) for part in parts)
    return Text(learned, 256, END, "bytes"), Text(held, 256, END, "bytes")
