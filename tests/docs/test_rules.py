"""Promise: tests hold no wording and no private names of the package, but for what `rules.json` counts."""

import json

from tests.docs import rules

TABLE: rules.Table = json.loads(rules.TABLE.read_text())


def test_no_file_has_more_than_the_table() -> None:
    """After fewer: `python -m tests.docs.rules --write`. It raises no number, and neither should you."""
    more = {
        f"{file}: {kind}: {number}, in the table {TABLE.get(file, {}).get(kind, 0)}"
        for file, kinds in rules.counts().items()
        for kind, number in kinds.items()
        if number > TABLE.get(file, {}).get(kind, 0)
    }
    assert not more, "`python -m tests.docs.rules FILE` shows the lines"
