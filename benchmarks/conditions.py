"""Conditions of a measurement other than the code: one line, printed first by every bench."""

import platform
import time

import torch

from trainer.host.kernel import processor
from trainer.host.limits import read_limits
from trainer.version import __version__


def conditions() -> str:
    """Versions, processor, the CPUs that this container may use, and the date."""
    limits, cpu = read_limits(), processor() or platform.machine()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{time.strftime('%Y-%m-%d')}, trainer {__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {cpu}, {limits.cpus:g} CPUs, {device}"
    )
