"""What holds a refusal: its exit code, one line, and the names in it; never its wording."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from trainer.errors import BadInputError


def named(text: str | Iterable[str], *names: object) -> bool:
    """Whether all names stand in a text: keys, files, tensors, numbers, one after another or given apart.

    Each must stand as a whole: `optim.lr` isn't found in `optim.lrr`.
    """
    whole = text if isinstance(text, str) else "\n".join(text)
    words = " ".join(map(str, names)).split()
    return all(re.search(rf"(?<!\w(?=\w)){re.escape(word)}(?!(?<=\w)\w)", whole) for word in words)


def is_refusal(err: str, *names: object) -> bool:
    """Whether a command said one line on stderr, with all names in it. Its exit code is 2."""
    return err.startswith("trainer: error: ") and err.count("\n") == 1 and named(err, *names)


@contextmanager
def refused(*names: object, by: type[Exception] = BadInputError) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Fails unless what is done in it raises BadInputError of one line, or `by`, with all names in it."""
    with pytest.raises(by) as raised:
        yield raised
    said = str(raised.value)
    assert said and (by is not BadInputError or "\n" not in said), said
    assert named(said, *names), (said, names)
