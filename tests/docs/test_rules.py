"""Promise: tests hold no wording and no private names of the package, but for what `rules.json` counts."""

import ast
import json

import pytest

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


LONG = "no file of this name"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (f"assert '{LONG}' in err", 1),
        (f"assert re.search(r'{LONG}', err)", 1),
        (f"with pytest.raises(ValueError, match='{LONG}'):\n    pass", 1),
        (f"said = '{LONG}'\nassert said in err", 1),
        (f"@parametrize('a, said', [(1, '{LONG}')])\ndef test(a, said):\n    assert said in err", 1),
        (f"assert parse('{LONG}') == 3", 0),
        ("assert 'data.path is gone: 5 of 7' in err", 0),
        ("assert main(['train', 'digits', '--set', 'a', 'b']) == 2", 0),
        (f"@parametrize('a, b', [('{LONG}', 2)])\ndef test(a, b):\n    assert read(a) == b", 0),
    ],
)
def test_sentences_are_found(code: str, found: int) -> None:
    assert len(rules.find(ast.parse(code), frozenset()).sentences) == found


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("loop._now = 3", 1),
        ("from trainer.train.loop import _now, train", 1),
        ("patch.setattr(loop, '_now', 3)", 1),
        ("self._now = 3", 0),
        ("_now = 3", 0),
    ],
)
def test_private_uses_are_found(code: str, found: int) -> None:
    assert len(rules.find(ast.parse(code), frozenset({"_now", "_order"})).private) == found
