"""PyTorch's build and this host's GPUs, without importing PyTorch, which takes seconds."""

import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import NamedTuple

from trainer.errors import BadInputError
from trainer.host.nvml import Nvml

NO_GPU = "device=cuda but no usable GPU was found: use device=cpu, or check nvidia-smi and the driver"
DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # of Linux, of WSL
_COUNT = "import torch; print(torch.cuda.device_count())"


class TorchBuild(NamedTuple):
    """The installed PyTorch.

    Attributes:
        version: Its version, such as 2.9.1+cpu.
        cuda: The version of CUDA that it was built for; None for a build without CUDA.
    """

    version: str
    cuda: str | None


@cache
def torch_build() -> TorchBuild:
    """Returns what PyTorch's file version.py says.

    Raises:
        BadInputError: If PyTorch isn't installed.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise BadInputError("PyTorch isn't installed in this environment: run make venv, or use the image")
    values = run_path(str(Path(spec.origin).with_name("version.py")))
    return TorchBuild(str(values["__version__"]), values.get("cuda"))


def count_gpus(environ: Mapping[str, str]) -> int:
    """Returns the number of GPUs that PyTorch can use in this environment, by NVML.

    Where a driver is there whose NVML doesn't answer (WSL, Tegra), a process imports PyTorch and counts them.
    """
    if torch_build().cuda is None or not any(map(Path.exists, DRIVERS)):
        return 0
    with Nvml(environ) as nvml:
        if nvml.problem is None:
            return len(nvml.gpus)
    done = subprocess.run(
        [sys.executable, "-c", _COUNT], capture_output=True, text=True, check=False, env=dict(environ)
    )
    return int(done.stdout) if done.stdout.strip().isdecimal() else 0
