"""Tests, named for what they prove."""

import os
import sys
from pathlib import Path

# Where nothing is to be written beside the sources, bytecode is kept elsewhere: without any, collecting the
# tests takes three times as long, and each process that imports torch compiles it anew.
if sys.dont_write_bytecode:
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(Path(__file__).parents[1] / "build/pycache")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a process that multiprocessing spawned has -B instead
