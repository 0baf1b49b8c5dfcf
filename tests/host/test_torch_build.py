"""Promise: the launcher knows PyTorch's build and the GPUs that it can use, and doesn't import it."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.host import torch_build as module
from trainer.host.torch_build import TorchBuild, count_gpus


def nvml(gpus: int | None) -> Any:
    """A driver's library with so many GPUs; None: it doesn't answer."""
    library = SimpleNamespace(gpus=[0] * (gpus or 0), problem=None if gpus is not None else "no answer")
    return lambda _: nullcontext(library)


@pytest.mark.parametrize(
    ("cuda", "driver", "gpus", "counted", "found"),
    [
        ("12.8", True, 2, "", 2),
        (None, True, 2, "", 0),  # a build without CUDA on a host with GPUs
        ("12.8", False, 2, "", 0),
        ("12.8", True, None, "3\n", 3),  # as on WSL: a process imports PyTorch and counts
        ("12.8", True, None, "a traceback", 0),
    ],
)
def test_gpus_are_counted(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cuda: str | None,
    driver: bool,
    gpus: int | None,
    counted: str,
    found: int,
) -> None:
    monkeypatch.setattr(module, "torch_build", lambda: TorchBuild("2.9.1", cuda))
    monkeypatch.setattr(module, "DRIVERS", (tmp_path if driver else tmp_path / "none",))
    monkeypatch.setattr(module, "Nvml", nvml(gpus))
    ran = SimpleNamespace(stdout=counted)
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=lambda *_, **__: ran))
    assert count_gpus({}) == found


@pytest.mark.slow  # a Python of its own, without what this one has imported
def test_nothing_of_the_launcher_imports_it() -> None:
    code = "import sys, trainer.train.start.job; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
