"""Promise, on a GPU: what is told of it is true; tests/observe/test_machine.py does it without one."""

import gzip
import json
import re
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.gpu import GPU, MARKS
from trainer.config.sizes import MIB
from trainer.observe.machine import Machine
from trainer.observe.memory import memory_metrics, used_memory
from trainer.observe.oom import explain_oom, held_by, is_out_of_memory
from trainer.observe.phases import enter_phase
from trainer.observe.profile import TRACE, Profile

pytestmark = MARKS


def test_nvml_sees_the_work() -> None:
    machine = Machine(True)
    matrix = torch.randn(4096, 4096, device=GPU)
    began = time.monotonic()
    while time.monotonic() - began < 3:
        matrix = (matrix @ matrix).clamp(-1, 1)
        torch.cuda.synchronize()
    machine.close()
    found = machine.take()
    assert float(found["gpu/utilization"]) > 0.5
    assert 0 < float(found["gpu/memory_bytes"]) < float(found["gpu/memory_total_bytes"])
    power = float(found["gpu/power_w"])
    assert 0 < power <= 1.2 * float(found["gpu/power_limit_w"])
    assert power * 1.5 < float(found["energy/joules"]) < power * 6
    assert 0 < float(found["gpu/temperature_c"]) < 120


def test_the_peak_is_the_process_s() -> None:
    block = torch.empty(64 * MIB, dtype=torch.uint8, device=GPU)
    del block
    assert memory_metrics(GPU)["memory/peak_bytes"] == used_memory(GPU) >= 64 * MIB


def test_running_out_is_explained(tmp_path: Path) -> None:
    model = nn.Linear(1024, 1024, device=GPU)
    optimizer = torch.optim.SGD(model.parameters())
    activations = torch.empty(256 * MIB, dtype=torch.uint8, device=GPU)
    try:
        torch.empty(1 << 45, dtype=torch.uint8, device=GPU)
    except RuntimeError as error:
        assert is_out_of_memory(error)
        text = explain_oom(error, GPU, tmp_path, held_by(model, optimizer), micro_batch_size=8)
    assert activations.nbytes == 256 * MIB
    assert "33,554,432 MiB more were wanted" in text
    left = (torch.cuda.memory_allocated(GPU) - sum(held_by(model, optimizer).values())) / (1 << 30)
    # With what tests before this one left.
    rest = re.search(r"activations and temporaries ([\d.]+) GiB", text)
    assert rest is not None and float(rest[1]) == pytest.approx(left, abs=0.01) and left > 0.24
    assert "CUDA" in (tmp_path / "memory_summary.txt").read_text()
    assert (tmp_path / "memory_snapshot.pickle").stat().st_size > 100


def test_a_profile_has_kernels_and_the_devices_time(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(inplace=True), nn.Conv2d(64, 64, 3)).to(GPU)
    profile = Profile(tmp_path, model, GPU, skip=2, warm_up=1, active=3)
    for step in range(8):
        enter_phase("forward")
        loss = model(torch.randn(16, 3, 64, 64, device=GPU)).mean()
        enter_phase("backward")
        loss.backward()
        enter_phase("host")
        profile.step_done(step + 1)
    text = profile.close()
    rows = {row.split("  ")[0]: row.split() for row in text.splitlines()}
    assert "device ms" in text
    assert float(rows["2 (Conv2d)"][-1]) > 0  # backward
    # By the device's clock: what modules take fits into what operators take.
    events = json.loads(gzip.decompress((tmp_path / TRACE).read_bytes()))["traceEvents"]
    kernels = sum(event["dur"] for event in events if event.get("cat") == "kernel") / 1e3
    modules = [name for name in rows if name.endswith(("(Conv2d)", "(ReLU)"))]
    assert sum(float(rows[name][-3]) for name in modules) < kernels * 1.01
