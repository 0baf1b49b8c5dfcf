"""How bad input is refused: held by its exit code, one line, and the names in it; never by wording."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainer.errors import BadInputError


def named(text: str | Iterable[str], *names: object) -> bool:
    """Whether all names stand in a text: keys, files, tensors, numbers, one after another or given apart.

    Each must stand as a whole: `optim.lr` isn't found in `optim.lrr`.
    """
    whole = text if isinstance(text, str) else "\n".join(text)
    words = " ".join(map(str, names)).split()
    return all(re.search(rf"(?<!\w(?=\w)){re.escape(word)}(?!(?<=\w)\w)", whole) for word in words)


def refusal(code: int, error: str, *names: object, folder: Path | None = None) -> str:
    """Checks how a command refused, and returns its line.

    By code 2 and one line on standard error that has `names`, as `named` reads it; without a run folder.
    """
    assert code == 2, error
    assert error.count("\n") == 1 and error.endswith("\n"), error
    assert named(error, *names), (error, names)
    assert folder is None or not folder.exists(), f"{folder} is left: {error}"
    return error


@contextmanager
def refused(*names: object, by: type[Exception] = BadInputError) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Fails unless what is done in it raises BadInputError of one line, or `by`, with all names in it."""
    with pytest.raises(by) as raised:
        yield raised
    said = str(raised.value)
    assert said and (by is not BadInputError or "\n" not in said), said
    assert named(said, *names), (said, names)
