"""Promise: memory figures are right, and running out names the remedies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.refusals import named
from trainer.config.model import MemoryConfig
from trainer.config.sizes import GIB, MIB
from trainer.observe.memory import after_evaluation, memory_metrics, memory_row, used_memory
from trainer.observe.oom import explain_oom, held_by, is_out_of_memory

GPU = torch.device("cuda", 0)


class Allocator:
    """Counts as torch's does: allocated, reserved, and the peak since its reset."""

    def __init__(self) -> None:
        self.allocated = self.peak = self.reserved = 0

    def take(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, self.allocated)

    def stats(self, _: Any = None) -> dict[str, Any]:
        return {
            "allocated_bytes": {"all": {"current": self.allocated, "peak": self.peak}},
            "reserved_bytes": {"all": {"current": self.reserved}},
            "num_alloc_retries": 3,
        }


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    fake = Allocator()
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", fake.stats)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _=None: fake.allocated)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _=None: fake.reserved)
    monkeypatch.setattr(torch.cuda, "memory_summary", lambda _=None: "the summary")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(fake, "reserved", fake.allocated))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda name: Path(name).write_bytes(b"pickle"))
    return fake


def test_figures_of_a_gpu(allocator: Allocator) -> None:
    allocator.take(7 * GIB)
    allocator.take(-2 * GIB)
    assert memory_metrics(GPU) == {
        "memory/allocated_bytes": 5 * GIB,
        "memory/reserved_bytes": 7 * GIB,
        "memory/peak_bytes": 7 * GIB,
        "memory/retries": 3,
    }
    assert used_memory(GPU) == 7 * GIB
    row = memory_row(7, 0.5, "start", GPU)
    assert (row["kind"], row["step"], row["epoch"], row["at"]) == ("memory", 7, 0.5, "start")
    assert row["memory/allocated_bytes"] == 5 * GIB
    assert memory_metrics(torch.device("cpu")) == {}
    on_cpu = memory_row(7, 0.5, "end", torch.device("cpu"))
    assert set(on_cpu) == {"kind", "step", "epoch", "at", "memory/rss_bytes"}


def test_the_cache_is_given_back_only_if_asked_for(allocator: Allocator) -> None:
    allocator.take(6 * GIB)
    allocator.take(-4 * GIB)
    assert after_evaluation(MemoryConfig(), GPU) == {}
    found = after_evaluation(MemoryConfig(empty_cache="after_eval"), GPU)
    assert found["memory/freed_bytes"] == 4 * GIB
    assert found["memory/freed_seconds"] >= 0
    assert after_evaluation(MemoryConfig(empty_cache="after_eval"), torch.device("cpu")) == {}


def test_holders_are_counted_once() -> None:
    model = nn.Linear(1024, 1024, bias=False)
    model.tied = model.weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    held = held_by(model, optimizer, average=[torch.zeros(1024, 512)], batch=[next(model.parameters())])
    assert held["weights"] == held["gradients"] == 4 * MIB
    assert 8 * MIB <= held["optimizer state"] < 8 * MIB + 100
    assert (held["average"], held["batch"]) == (2 * MIB, 0)
    assert next(iter(held)) == "optimizer state"


MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.00 GiB of which 512.00 "
    "MiB is free. Including non-PyTorch memory, this process has 78.50 GiB memory in use. Of the allocated "
    "memory {allocated:.2f} GiB is allocated by PyTorch, and {cached:.2f} GiB is reserved by PyTorch but "
    "unallocated."
)
HELD = {"optimizer state": 8 * GIB, "weights": 4 * GIB, "gradients": 4 * GIB}


def explained(allocated: float, cached: float, tmp_path: Path, **settings: Any) -> str:
    error = torch.OutOfMemoryError(MESSAGE.format(allocated=allocated, cached=cached))
    return explain_oom(error, GPU, tmp_path, HELD, **{"micro_batch_size": 64, **settings})


@pytest.mark.usefixtures("allocator")
def test_activations_are_what_is_left(tmp_path: Path) -> None:
    text = explained(76.0, 0.5, tmp_path)
    assert named(text, "cuda:0 79.0 2,048 60.00 8.00 4.00")
    assert named(text, "data.micro_batch_size=32 memory.checkpointing=blocks precision.mode=bf16")
    done = explained(76.0, 0.5, tmp_path, micro_batch_size=1, checkpointing="blocks", precision="bf16")
    assert not named(done, "data.micro_batch_size") and not named(done, "precision.mode=bf16")
    assert "expandable_segments" not in text and "\n" not in text
    assert (tmp_path / "memory_summary.txt").read_text() == "the summary"
    assert (tmp_path / "memory_snapshot.pickle").exists()


@pytest.mark.usefixtures("allocator")
def test_fragments_and_others_are_told_apart(tmp_path: Path) -> None:
    text = explained(60.0, 17.0, tmp_path)
    assert named(text, "17.00 memory.allocator=expandable") and "nvidia-smi" not in text
    assert named(explained(40.0, 0.5, tmp_path), "38.00 nvidia-smi")


def test_the_host_runs_out(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 50)
    assert is_out_of_memory(raised.value)
    text = explain_oom(raised.value, torch.device("cpu"), tmp_path, {"weights": GIB}, micro_batch_size=8)
    assert named(text, "host test_memory_report.py 4194304.00 1.00")
    assert not list(tmp_path.iterdir())
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert is_out_of_memory(MemoryError())


# Words as users have posted them, and whether they mean memory also where the GPU isn't full.
GPU_WORDS = [
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
    ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
    ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", True),
    ("Triton Error [CUDA]: out of memory", True),
    ("NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error\nCuda failure 2 'out of memory'", True),
    ('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":830', True),
    ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", False),
    ("GET was unable to find an engine to execute this computation", False),
    ("NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error", False),
]
HOST_WORDS = [
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("unable to mmap 64 bytes from file </x>: Cannot allocate memory (12)"),
    OSError(12, "Cannot allocate memory"),
]
OTHERS = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("out of resource: shared memory, Required: 163840, Hardware limit: 101376"),
    OSError(28, "No space left on device"),
    ValueError("CUDA out of memory"),
]


def test_every_way_to_say_that_memory_ran_out_is_known(
    monkeypatch: pytest.MonkeyPatch, allocator: Allocator, tmp_path: Path
) -> None:
    """On a GPU that is there, of which first a third is free."""
    free = [0.3]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (int(free[0] * 80 * GIB), 80 * GIB))
    kinds = [RuntimeError, *([torch.AcceleratorError] if hasattr(torch, "AcceleratorError") else [])]
    for words, sure in GPU_WORDS:
        for error in [kind(words) for kind in kinds]:
            assert is_out_of_memory(error) is is_out_of_memory(error, probing=True) is sure, words
    for on_host in HOST_WORDS:
        assert is_out_of_memory(on_host) and is_out_of_memory(on_host, probing=True), on_host
    assert is_out_of_memory(RuntimeError("could not create a primitive"), probing=True)
    for other in (*OTHERS, RuntimeError("could not create a primitive")):
        assert not is_out_of_memory(other), other
    free[0] = 0.01
    assert all(is_out_of_memory(RuntimeError(words)) for words, _ in GPU_WORDS)
    assert not is_out_of_memory(OTHERS[0]) and is_out_of_memory(OTHERS[0], probing=True)
    allocator.take(20 * GIB)
    text = explain_oom(RuntimeError(GPU_WORDS[0][0]), GPU, tmp_path, HELD, micro_batch_size=8)
    assert named(text, "cuda:0 CUBLAS_STATUS_ALLOC_FAILED data.micro_batch_size=4") and "\n" not in text
