"""Runs a module as `python -m` does, with the launcher's search path: ranks import what it imported.

`python -m` would put the working folder in front, where another `trainer` may lie: in a container that is
often a checkout of this project. PYTHONSAFEPATH needs Python 3.11 and would reach what the ranks start.
"""

import os
import sys

PATH_VARIABLE = "TRAINER_LAUNCH_PATH"


def search_path() -> str:
    """This process's search path as the variable holds it: a line for each folder."""
    return "\n".join(sys.path)


if __name__ == "__main__":  # as_launcher.py MODULE ARGUMENTS
    # This file's own folder is in front until here, so nothing else may be imported before.
    sys.path[:] = os.environ[PATH_VARIABLE].split("\n")
    from runpy import run_module

    run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
