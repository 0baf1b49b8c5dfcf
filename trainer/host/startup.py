"""What a process sets for itself before anything else is imported. Imports no torch."""

import io
import os
import sys


def print_anything() -> None:
    """Lets standard output take any character, as standard error does: LC_ALL=C may be set."""
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.encoding.lower().startswith("utf"):
        sys.stdout.reconfigure(errors="backslashreplace")


def wait_passively() -> None:
    """Lets this process's compute threads sleep while they wait, as those of a rank; before torch's import.

    For a process that forks others which compute: OpenMP reads the variable when it is loaded.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
