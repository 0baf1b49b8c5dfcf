"""Runs containers for the tests. A warning or an error in what they say fails, unless a test expects it."""

import http.client
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tests.helpers.programs import ran

# Words of Python's logging, and the letters that JupyterLab and TensorBoard write instead.
_WORDS = r"\b(WARN|WARNING|ERROR|CRITICAL|FATAL|Traceback)\b|Warning\b|Error\b"
_TROUBLE = re.compile(_WORDS + r"|\[[WE] \d|^[WE]\d{4} ", re.I)
_HARMLESS = (r"TensorFlow installation not found",)  # TensorBoard, always


def trouble(text: str, expected: Iterable[str] = ()) -> list[str]:
    """The lines of a log that warn or tell of an error, but for those that match what is expected."""
    fine = re.compile("|".join([*_HARMLESS, *expected]))
    return [line for line in text.splitlines() if _TROUBLE.search(line) and not fine.search(line)]


def check_log(text: str, *expected: str) -> str:
    """Fails on trouble in a log; returns it."""
    found = trouble(text, expected)
    assert not found, "in the log: " + "\n".join(found)
    return text


def engine(
    *words: object, code: int | None = 0, expected: Iterable[str] = (), timeout: float = 1200, **options: Any
) -> str:
    """Runs `docker words…` until it is killed after `timeout` s; returns stdout and stderr together.

    Its exit code must be `code` (None: any), and each line that warns or tells of an error as one of the
    patterns `expected`; options are those of `subprocess.run`.
    """
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    more = {"capture_output": False, "timeout": timeout, **streams, **options}
    return check_log(ran("docker", *words, code=code, **more).stdout, *expected)


@contextmanager
def running(name: str, *words: object) -> Iterator[str]:
    """A container in the background, of `docker run words…`, until it is deleted."""
    try:
        engine("run", "--detach", "--name", name, *words)
        yield name
    finally:
        engine("rm", "--force", "--volumes", name, code=None, expected=(".*",))


class Answer(NamedTuple):
    """Answer of a server; code 0: there was none."""

    code: int
    body: bytes
    cookies: list[str]


def ask(port: object, path: str, method: str = "GET", body: str = "", **headers: str) -> Answer:
    """Asks a server of this machine; `_` in a header's name stands for `-`."""
    connection = http.client.HTTPConnection("127.0.0.1", int(str(port)), timeout=20)
    try:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body or None, given)
        answer = connection.getresponse()
        return Answer(answer.status, answer.read(), answer.headers.get_all("Set-Cookie") or [])
    except OSError:
        return Answer(0, b"", [])
    finally:
        connection.close()


def wait_for(ready: Callable[[], bool], what: str, seconds: float = 300) -> None:
    """Waits until something holds, for as long as a busy machine may take."""
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.5)
