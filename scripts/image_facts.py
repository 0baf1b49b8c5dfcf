"""Facts of an image: its Python reads this from image.py, and prints JSON. No GPU is needed."""

import importlib
import json
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch


def _cudnn() -> str:
    # The version as NVIDIA writes it; the wheel's or conda's has four parts, the library's number three.
    number = torch.backends.cudnn.version() or 0
    major, rest = divmod(number, 10000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _torchaudio() -> str:
    try:
        return version("torchaudio").partition("+")[0]
    except PackageNotFoundError:  # it ends before torch 2.15
        return ""


def _triton() -> str:
    return str(importlib.import_module("triton").__version__)


def _compiler() -> str:
    words = ["g++", "--version"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def facts() -> dict[str, object]:
    """Returns versions as the libraries themselves name them."""
    flags = torch._C._cuda_getArchFlags() or ""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__.partition("+")[0],
        "torchvision": version("torchvision").partition("+")[0],
        "torchaudio": _torchaudio(),
        "cuda": torch.version.cuda,
        "cudnn": _cudnn(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "triton": _triton(),
        # sm_90a has code for sm_90's own instructions beside it: the same GPUs.
        "architectures": list(dict.fromkeys(re.findall(r"sm_\d+", flags))),
        "trainer": version("reproducible-trainer"),
        "compiler": _compiler(),
    }


if __name__ == "__main__":
    print(json.dumps(facts()))
