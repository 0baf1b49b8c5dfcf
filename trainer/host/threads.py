"""How compute threads wait. Imports no torch."""

import os
import sys


def wait_passively() -> None:
    """Lets this process's compute threads sleep while they wait, as those of a rank; before torch's import.

    For a process that forks others which compute: OpenMP reads the variable when it is loaded.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
