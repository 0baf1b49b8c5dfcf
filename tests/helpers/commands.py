"""Commands in this process, and what they say."""

import io
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

from tests.helpers.refusals import refusal
from trainer.cli import main


class Said(NamedTuple):
    out: str
    err: str


def command(*words: object, code: int = 0) -> Said:
    """Runs a command; fails if it ends with another code."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            ended = main(list(map(str, words)))
        except SystemExit as error:
            ended = int(error.code or 0)
    said = Said(out.getvalue(), err.getvalue())
    assert ended == code, (words, ended, said)
    return said


def refuse(words: str | Sequence[object], *names: object) -> str:
    """The line, with these names, by which a command is refused: its words, or a text of them."""
    out, err = command(*(words.split() if isinstance(words, str) else words), code=2)
    assert out == "", out
    return refusal(2, err, *names)
