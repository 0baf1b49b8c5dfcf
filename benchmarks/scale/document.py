"""Keeps what a document shows of commands: `python -m benchmarks.scale.document docs/scaling.md`.

What stands between `<!-- python -m benchmarks … -->` and `<!-- end -->` is replaced by what that prints.
"""

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

from benchmarks.__main__ import main
from trainer.errors import EXIT_DONE, BadInputError

_BLOCK = re.compile(r"<!-- python -m benchmarks (?P<words>.+?) -->\n.*?<!-- end -->", re.DOTALL)


def renewed(text: str) -> str:
    """The document with what its commands print now.

    Raises:
        BadInputError: If one of them fails.
    """
    return _BLOCK.sub(_printed, text)


def _printed(block: re.Match[str]) -> str:
    words = block["words"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(shlex.split(words))
    if code != EXIT_DONE:
        raise BadInputError(f"python -m benchmarks {words} ended with code {code}")
    return f"<!-- python -m benchmarks {words} -->\n{printed.getvalue().strip()}\n<!-- end -->"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(renewed(path.read_text("utf-8")), "utf-8")
