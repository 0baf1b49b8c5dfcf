"""Starts the process of a tracker with the rank's search path, which is in its first line of input.

As a file and not by `python -m`, for the reason that `launch/as_launcher.py` tells.
"""

import sys

if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this file's own folder
    import json

    told = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = told.pop("path")
    from trainer.runs.tracking.process import main

    main(**told)
