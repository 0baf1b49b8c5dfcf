"""The environment variables of our own: few, in one module, with a table."""

import re
from pathlib import Path

from trainer.host import environment

PACKAGE = Path(environment.__file__).parents[1]
NAME = re.compile(r"\bTRAINER_[A-Z_]+")


def test_one_module_names_them_all() -> None:
    found = {
        path.relative_to(PACKAGE): set(NAME.findall(path.read_text()))
        for path in PACKAGE.rglob("*.py")
        if NAME.search(path.read_text())
    }
    assert list(found) == [Path("host/environment.py")]
    table = re.findall(r"^\| `(\w+)` \|", environment.__doc__ or "", re.MULTILINE)
    assert set(table) == set.union(*found.values()) and len(table) <= 4
