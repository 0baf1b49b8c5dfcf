"""Memory of the device and of the host, as metrics for the log."""

import time
from collections.abc import Callable

import torch

from trainer.config.model import MemoryConfig
from trainer.host.processes import resident_bytes

_FRESH_SECONDS = 0.25
_RESIDENT = [-1.0, 0.0]  # when this process looked last, and what it saw


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Returns figures of torch's allocator on a GPU as keys of a record; {} on a CPU. Never waits for the
    device.

    `memory/peak_bytes` is that of the process so far. nvidia-smi shows more than `memory/reserved_bytes`: the
    CUDA context and the kernels (some hundred MiB), workspaces and buffers of cuBLAS and NCCL, and what other
    processes have.
    """
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats_as_nested_dict(device)  # the flat one of memory_stats costs more
    if not stats:
        return {}
    return {
        "memory/allocated_bytes": float(stats["allocated_bytes"]["all"]["current"]),
        "memory/reserved_bytes": float(stats["reserved_bytes"]["all"]["current"]),
        "memory/peak_bytes": float(stats["allocated_bytes"]["all"]["peak"]),
        "memory/retries": float(stats["num_alloc_retries"]),
    }


def memory_source(device: torch.device) -> Callable[[], dict[str, float]]:
    """Returns `memory_metrics` for a record, with the retries since the record before."""
    before = 0.0

    def take() -> dict[str, float]:
        nonlocal before
        metrics = memory_metrics(device)
        if metrics:
            metrics["memory/retries"], before = metrics["memory/retries"] - before, metrics["memory/retries"]
        return metrics

    return take


def used_memory(device: torch.device) -> int:
    """Peak bytes allocated on a GPU; on the CPU the process's resident bytes now."""
    if device.type == "cuda":
        return int(memory_metrics(device).get("memory/peak_bytes", 0))
    now = time.monotonic()
    if now - _RESIDENT[0] > _FRESH_SECONDS:  # the kernel adds up what each CPU counted, which takes 0.1 ms
        _RESIDENT[:] = now, resident_bytes()
    return int(_RESIDENT[1])


def after_evaluation(config: MemoryConfig, device: torch.device) -> dict[str, float]:
    """Releases cached memory if configured; returns the bytes freed and the time taken, for the record.

    The cost comes twice: here, where the device is waited for, and in the next steps, which have to ask
    CUDA for memory again.
    """
    if config.empty_cache == "never" or device.type != "cuda":
        return {}
    before, began = memory_metrics(device), time.perf_counter()
    torch.cuda.empty_cache()
    seconds = {"memory/freed_seconds": time.perf_counter() - began}
    if not before:
        return seconds
    freed = before["memory/reserved_bytes"] - memory_metrics(device)["memory/reserved_bytes"]
    return {"memory/freed_bytes": freed, **seconds}


def memory_row(step: int, epoch: float, at: str, device: torch.device) -> dict[str, float | int | str]:
    """Makes a memory record; `at` is the "start" or "end" of an epoch, or an "evaluation"."""
    moment: dict[str, float | int | str] = {"kind": "memory", "step": step, "epoch": epoch, "at": at}
    return {**moment, "memory/rss_bytes": resident_bytes(), **memory_metrics(device)}
