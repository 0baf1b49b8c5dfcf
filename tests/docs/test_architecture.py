"""Promise: the page names the rooms as they are held."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trainer"


def test_the_table_names_the_rooms_in_the_order_that_is_held() -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    layers = re.findall(r'"(\w+)"', settings.partition("\nlayers = [")[2].partition("]")[0])
    text = (ROOT / "docs/architecture.md").read_text()
    table = text.partition("| room | what lives there |\n|---|---|\n")[2].partition("\n\n")[0]
    named = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert named == [layer for layer in reversed(layers) if (PACKAGE / layer).is_dir()]
