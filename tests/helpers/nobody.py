"""Runs Python as a user without a name or a home."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
IN_ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_nobody(imports: str, code: str, limit: int, value: int) -> str:
    """Returns the output of a process without a name, HOME or privileges, and with a lower limit.

    It becomes that user when it has imported what it needs: Python may lie where others can't read.
    """
    become = "os.setgid(12345); os.setuid(12345); os.chdir('/tmp')" if os.geteuid() == 0 else ""
    lower = f"resource.setrlimit({limit}, ({value}, {value}))"
    lines = f"{imports}\nimport os, resource\n{lower}\n{become}\n{code}"
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", lines],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert not done.stderr, done.stderr
    return done.stdout.strip()
