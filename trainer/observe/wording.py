"""Messages in the words of how the run was started: the flag that was typed, or `fit` from Python.

Messages are written for `trainer train` with --out. The start of a run sets how (`started_by`), once;
what the console prints and what is raised goes through `worded`.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

from typing_extensions import assert_never

from trainer.errors import BadInputError
from trainer.host.strict_json import parse_quickly

# How the run folder was named: by this flag, by none, or to `fit`.
StartWord = Literal["--out", "--resume", "", "fit"]


class _Here:
    start: StartWord = "--out"


def start_word() -> StartWord:
    """Returns how the run of this process was started."""
    return _Here.start


def set_start(how: StartWord) -> None:
    """Sets how a rank's launcher was started."""
    _Here.start = how


@contextlib.contextmanager
def started_by(how: StartWord) -> Iterator[None]:
    """Context manager in which messages name these flags, also that of a BadInputError that leaves it."""
    before, _Here.start = _Here.start, how
    try:
        yield
    except BadInputError as error:
        error.args = (worded(str(error)),)
        raise
    finally:
        _Here.start = before


def worded(line: str) -> str:
    """A message in the words of the start; what is in them already stays."""
    if "--" not in line:
        return line
    match _Here.start:
        case "--out":
            return line
        case "--resume":
            return re.sub(r"another --out\b", "another run", re.sub(r"^--out (?=\S+: )", "--resume ", line))
        case "":
            return re.sub(r"another --out\b", "--out DIR", line)
        case "fit":
            return _in_python(line)
        case other:
            assert_never(other)


_PYTHON = (
    (r"^--out ", "out="),
    (r"--out (\S+) --resume (force|never|newest|auto)", r'out="\1", resume="\2"'),
    (r"another --out\b", "another out"),
    (r"--init-from (\S+?)(?=[,;:]|$)", r'from_run="\1"'),
    (r"--resume (force|never|newest|auto)", r'resume="\1"'),
    (r"--resume (\S+?)(?=[,;]|$)", r'out="\1"'),
    (r"--help-config shows every key", "docs/configuration.md has every key"),
    (
        r"; the same command resumes (from there|after step \d+, its newest checkpoint)"
        r"( \(with --resume newest\))?",
        r"; fit(…) with this folder as out resumes \1",
    ),
    (r"--out\b", "out"),
    (r"--init-from\b", "from_run"),
    (r"--profile\b", "the profile"),
)
_SETTING = re.compile(r"--set (?P<quote>')?(?P<key>[\w.]+)=(?P<value>(?(quote)[^']*|[^\s:,;]*))(?(quote)')")


def _in_python(line: str) -> str:
    """A message of the command line, in the words of `fit`; whole commands (`trainer data pack …`) stay."""
    line = _SETTING.sub(_as_settings, line).replace("--set ", "settings: ")
    for typed, here in _PYTHON:
        line = re.sub(typed, here, line)
    return line


def _as_settings(found: re.Match[str]) -> str:
    value = found["value"]
    with contextlib.suppress(ValueError):
        return f'settings={{"{found["key"]}": {_python(parse_quickly(value))}}}'
    return f'settings={{"{found["key"]}": "{value}"}}'


def _python(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str | list) else repr(value)
