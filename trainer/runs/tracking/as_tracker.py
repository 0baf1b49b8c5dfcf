"""Starts the process of a tracker with the rank's search path, which is in its first line of input.

A file and not `python -m`, for the reason given in `launch/as_launcher.py`.
"""

import sys

if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this file's own folder
    import json

    arguments = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = arguments.pop("path")
    from trainer.runs.tracking.process import main

    main(**arguments)
