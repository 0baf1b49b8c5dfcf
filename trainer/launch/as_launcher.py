"""Runs a module as `python -m` does, with the launcher's search path: ranks import what it imported.

`python -m` would put the working folder in front, where another `trainer` may lie: in a container that is
often a checkout of this project. PYTHONSAFEPATH needs Python 3.11 and would also affect the ranks' children.
"""

import sys

if __name__ == "__main__":  # as_launcher.py MODULE FOLDER-OF-THE-LAUNCH ARGUMENTS
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this file's own folder: nothing may be imported from there
    import json
    from pathlib import Path

    try:
        told = json.loads(Path(sys.argv[2], "launch.json").read_text())
    except FileNotFoundError:
        sys.exit(1)  # the launch is over, and nobody waits for this process
    sys.path[:] = told["path"]
    from runpy import run_module

    run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
