"""Memory of the device and of the host: metrics for the log, a tracker for users, peaks by phase."""

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.config.model import MemoryConfig
from trainer.observe.peak import Peak, highest, tells_figures

MIB, GIB = 1 << 20, 1 << 30

_FRESH_SECONDS = 0.25
_RESIDENT = [-1.0, 0.0]  # when this process looked last, and what it saw


def memory_metrics(device: torch.device) -> dict[str, float]:
    """What torch's allocator holds on a GPU, as keys of a row; nothing on a CPU. Never waits for the device.

    `memory/peak_bytes` is that of the process so far. nvidia-smi shows more than `memory/reserved_bytes`: the
    CUDA context and the kernels (some hundred MiB), workspaces and buffers of cuBLAS and NCCL, and what other
    processes have.
    """
    if device.type != "cuda" or not tells_figures():
        return {}
    stats = torch.cuda.memory_stats_as_nested_dict(device)  # the flat one of memory_stats costs more
    if not stats:
        return {}
    return {
        "memory/allocated_bytes": float(stats["allocated_bytes"]["all"]["current"]),
        "memory/reserved_bytes": float(stats["reserved_bytes"]["all"]["current"]),
        "memory/peak_bytes": float(highest(device)),
        "memory/retries": float(stats["num_alloc_retries"]),
    }


def memory_source(device: torch.device) -> Callable[[], dict[str, float]]:
    """`memory_metrics` for a row: retries are those since the row before."""
    before = 0.0

    def take() -> dict[str, float]:
        nonlocal before
        metrics = memory_metrics(device)
        if metrics:
            metrics["memory/retries"], before = metrics["memory/retries"] - before, metrics["memory/retries"]
        return metrics

    return take


@dataclass
class Tracked:
    """What `memory_tracker` saw, in bytes.

    Attributes:
        name: Of the stretch of code.
        kind: "allocated" by torch on a GPU, or "resident" memory of the process.
        before: At its start.
        after: At its end.
        peak: The most in between.
    """

    name: str
    kind: str
    before: int = 0
    after: int = 0
    peak: int = 0

    def __str__(self) -> str:
        return (
            f"{self.name}: {_text(self.before)} {self.kind} before, {_text(self.after)} after "
            f"({(self.after - self.before) / MIB:+,.1f} MiB), peak {_text(self.peak)}"
        )


@contextlib.contextmanager
def memory_tracker(
    name: str, device: torch.device | str | None = None, say: Callable[[str], object] | None = print
) -> Iterator[Tracked]:
    """Tells what a stretch of code does to memory: `with memory_tracker("forward") as memory: …`.

    On a GPU that is what torch's allocator gives out, without waiting for the device; trackers can overlap.
    On a CPU it is the process's resident memory, peak included where Linux lets us ask for it anew.

    Args:
        name: For the line.
        device: What is looked at; by default the current GPU, or the host if there is none.
        say: Takes the line at the end; None: nobody. An exception inside ends it as well.
    """
    if device is None:
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    told = device.type == "cuda" and tells_figures()
    tracked = Tracked(name, "allocated" if told else "resident")
    watch = _gpu(tracked, device) if told else _host(tracked)
    try:
        with watch:
            yield tracked
    finally:
        if say is not None:
            say(str(tracked))


@contextlib.contextmanager
def _gpu(tracked: Tracked, device: torch.device) -> Iterator[None]:
    tracked.before = torch.cuda.memory_allocated(device)
    peak = Peak(device)
    try:
        yield
    finally:
        tracked.peak, tracked.after = peak.close(), torch.cuda.memory_allocated(device)


@contextlib.contextmanager
def _host(tracked: Tracked) -> Iterator[None]:
    tracked.before = resident_bytes()
    told = True
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is resident: proc(5)
    except OSError:
        told = False
    try:
        yield
    finally:
        tracked.after = resident_bytes()
        peak = _status("VmHWM") if told else 0
        tracked.peak = max(tracked.before, tracked.after, peak)


def resident_bytes() -> int:
    """Bytes of this process that are in memory; on macOS the most there ever were."""
    return _status("VmRSS") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def used_memory(device: torch.device) -> int:
    """Peak bytes allocated on a GPU; on the CPU the process's resident bytes now."""
    if device.type == "cuda":
        return highest(device)
    now = time.monotonic()
    if now - _RESIDENT[0] > _FRESH_SECONDS:
        try:
            # The kernel adds up what each CPU counted, which takes 0.1 ms.
            with open("/proc/self/statm") as file:  # noqa: PTH123 (pathlib would cost more than the read)
                _RESIDENT[:] = now, int(file.read().split()[1]) * resource.getpagesize()
        except OSError:  # macOS: the peak, in bytes
            _RESIDENT[:] = now, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(_RESIDENT[1])


def _status(key: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:")), 0)


class PhasePeaks:
    """Peaks of a GPU's memory by phase, in the steps that are looked at: one per row of metrics is enough.

    A phase's peak is of what its host code allocated: torch counts when memory is given out, not when the
    device comes to use it. A look costs two calls of the allocator, so other steps are left alone.
    """

    def __init__(self, device: torch.device) -> None:
        """Nothing is looked at yet; on a CPU nothing ever is."""
        self._device = device if device.type == "cuda" else None
        self._peak: Peak | None = None
        self._phase = ""
        self._peaks: dict[str, int] = {}

    def enter(self, phase: str) -> None:
        """Call where a phase begins, in a step that is looked at."""
        if self._device is None:
            return
        self.leave()
        self._phase, self._peak = phase, Peak(self._device)

    def leave(self, _phase: str = "") -> None:
        """Call at the end of a step that is looked at."""
        if self._peak is not None:
            self._peaks[self._phase] = max(self._peaks.get(self._phase, 0), self._peak.close())
            self._peak = None

    def take(self) -> dict[str, float]:
        """`memory/peak/PHASE`, in bytes, of what was looked at since the last call."""
        peaks, self._peaks = self._peaks, {}
        return {f"memory/peak/{phase}": float(peak) for phase, peak in peaks.items()}


def after_evaluation(config: MemoryConfig, device: torch.device) -> dict[str, float]:
    """Gives cached memory back if the configuration says so; what that freed and cost, for the row.

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
    """A row on memory at a moment that matters: `at` the "start" or "end" of an epoch, or an "evaluation"."""
    moment: dict[str, float | int | str] = {"kind": "memory", "step": step, "epoch": epoch, "at": at}
    return {**moment, "memory/rss_bytes": resident_bytes(), **memory_metrics(device)}


def start_history(config: MemoryConfig, device: torch.device) -> None:
    """Lets torch record where memory is allocated, if the configuration says so: see observe.oom."""
    if config.history and device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=100_000)


def _text(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / MIB:,.1f} MiB"
