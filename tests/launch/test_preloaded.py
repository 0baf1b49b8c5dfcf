"""Promise: a fork of the preloaded server is to a test what a Python of its own would be."""

import signal
import sys
from pathlib import Path

import pytest

from tests.helpers import preloaded

BESIDE = """
import subprocess, sys
print(subprocess.run([sys.executable, "-c", "raise SystemExit(7)"]).returncode)
"""


def test_a_process_that_ends_at_once_is_told_with_its_own_code() -> None:
    for code in (0, 1, 75):
        done = preloaded.run([sys.executable, "-c", f"raise SystemExit({code})"])
        assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.parametrize(
    ("code", "returned", "printed"),
    [
        ("raise SystemExit('why')", 1, ("", "why\n")),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ("", "")),
        ("import os; print(os.environ['A'], os.getcwd(), __name__)", 0, ("b {folder} __main__\n", "")),
        (BESIDE, 0, ("7\n", "")),
    ],
)
def test_as_a_python_of_its_own(code: str, returned: int, printed: tuple[str, str], tmp_path: Path) -> None:
    done = preloaded.run([sys.executable, "-c", code], cwd=tmp_path, env={"A": "b"})
    wanted = tuple(text.format(folder=tmp_path) for text in printed)
    assert (done.returncode, done.stdout, done.stderr) == (returned, *wanted)
