"""Requirements of an ablation, and why a machine doesn't meet them."""

import ctypes.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from trainer.host.affinity import read_topology
from trainer.host.limits import read_limits
from trainer.models.compiling import missing_for_compiling


def missing(need: str) -> str:
    """Returns why this machine doesn't meet a requirement; empty if it does."""
    return _CHECKS[need]()


def library(name: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Finds a library for LD_PRELOAD: in LD_LIBRARY_PATH, the environment's lib, or the system."""
    folders = [*environ.get("LD_LIBRARY_PATH", "").split(":"), f"{sys.prefix}/lib", "/opt/env/lib"]
    folders += [f"{environ[key]}/lib" for key in ("CONDA_PREFIX",) if environ.get(key)]
    folders += ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"]
    for folder in filter(None, folders):
        if found := sorted(Path(folder).glob(f"lib{name}.so*")):
            return found[0]
    known = ctypes.util.find_library(name)
    return Path(known) if known else None


def _cuda() -> str:
    return "" if torch.cuda.is_available() else "no GPU"


def _cpus(least: int) -> Callable[[], str]:
    def check() -> str:
        there = read_limits().cpus
        return "" if there >= least else f"{there:g} CPUs, it takes {least}"

    return check


def _nodes() -> str:
    count = len(read_topology().nodes)
    return "" if count > 1 else "one NUMA node"


def _compiler() -> str:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return missing_for_compiling(device) or ""


def _photographs() -> str:
    from benchmarks.photographs import originals
    from trainer.errors import BadInputError

    try:
        originals()
    except BadInputError:
        return "no photographs: scikit-image and scikit-learn ship them"
    return ""


def _library(name: str, *others: str) -> Callable[[], str]:
    def check() -> str:
        return "" if any(library(one) for one in (name, *others)) else f"no lib{name} on this machine"

    return check


def _linux() -> str:
    return "" if sys.platform == "linux" else "the bytes of the loopback are read from Linux's /proc"


_CHECKS: dict[str, Callable[[], str]] = {
    "cuda": _cuda,
    "2 CPUs": _cpus(2),
    "16 CPUs": _cpus(16),
    "NUMA": _nodes,
    "compiler": _compiler,
    "photographs": _photographs,
    "jemalloc": _library("jemalloc"),
    "tcmalloc": _library("tcmalloc", "tcmalloc_minimal"),
    "linux": _linux,
}


def first_missing(needs: Iterable[str]) -> str:
    """Returns the first unmet requirement; empty if there is none."""
    return next((reason for need in needs if (reason := missing(need))), "")
