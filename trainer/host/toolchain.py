"""Requirements of torch.compile on the host. Imports nothing heavy, as `trainer doctor` uses it."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path


def missing_compiler(cuda: bool) -> str | None:
    """Names the compiler that isn't found, with the remedy; None if none is missing.

    Args:
        cuda: Whether it is for a GPU: Triton builds a C launcher, Inductor for a CPU C++.
    """
    if cuda:
        compilers, package = [os.environ.get("CC", ""), "clang", "gcc"], "gcc"
    else:
        usual = "clang++" if sys.platform == "darwin" else "g++"
        compilers, package = [os.environ.get("CXX", usual)], "g++"
    if not any(compiler and shutil.which(compiler) for compiler in compilers):
        return f"no compiler was found ({' or '.join(filter(None, compilers))}); install {package}"
    return None


def missing_headers() -> str | None:
    """Names the header of Python that isn't there, with the remedy; None if none is missing."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    try:
        header.stat()
    except OSError:  # or it may not be looked at, which would raise with exists()
        return f"{header} is missing; install python3-dev, or use a Python that comes with its headers"
    return None
