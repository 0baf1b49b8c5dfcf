"""Load of the machine while a run trains: a thread samples twice a second; logging steps get the means."""

import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.host.counters import JobCounters, rates
from trainer.host.limits import read_limits
from trainer.host.nvml import Nvml
from trainer.observe.console import warn

_SHARE = 0.0007  # of a CPU, for looks; with waking up below 0.001: where a look is dear it looks less often
_LONGEST = 10.0
_END_SECONDS = 2.0  # a GPU that is lost can hold a call; the thread is no reason to wait


class Machine:
    """Samples host and GPUs in the background; rank 0 of a run has one.

    Start it after the loader workers: a process with another thread can't be forked safely.
    """

    def __init__(
        self,
        gpu: bool,
        ranks: int = 1,
        *,
        interval: float = 0.5,
        root: Path = Path("/"),
        environ: Mapping[str, str] = os.environ,
        nvml: Any = None,
    ) -> None:
        """Takes the first sample and starts the thread.

        Args:
            gpu: Whether the run is on GPUs.
            ranks: Of this host.
            interval: Seconds between two samples; more where that would cost over 0.1 % of a CPU.
            root: Folder that stands for "/".
            environ: For CUDA_VISIBLE_DEVICES.
            nvml: A module in place of pynvml.
        """
        limits = read_limits(root)
        self._cpus = limits.cpus
        # torchrun, or whatever started the ranks, is above them all.
        self._host = JobCounters(limits, root, top=os.getppid() if ranks > 1 else 0)
        self._gpus = Nvml(environ, ranks, nvml) if gpu else None
        self._interval = interval
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._sums, self._counts, self._reasons = Counter[str](), Counter[str](), Counter[str]()
        self._latest = self._taken = (time.monotonic(), dict[str, float]())
        self._sample()
        self._taken = self._latest
        self._thread = threading.Thread(target=self._watch, name="machine", daemon=True)
        self._thread.start()

    def take(self) -> dict[str, float | str]:
        """Means since the last call, as keys of a record; empty if no sample was taken since then.

        `energy/joules` is a sum, of the GPUs of this host. After `close` it gives what is left.
        """
        with self._lock:
            (began, before), (ended, after) = self._taken, self._latest
            if ended <= began:
                return {}
            self._taken = self._latest
            means = {name: total / self._counts[name] for name, total in self._sums.items()}
            found: dict[str, float | str] = {"cpu/limit": self._cpus, **rates(before, after, ended - began)}
            found |= means
            if "energy/joules" in before and "energy/joules" in after:
                found["energy/joules"] = max(0.0, after["energy/joules"] - before["energy/joules"])
            if self._reasons:
                found["gpu/throttle_reason"] = self._reasons.most_common(1)[0][0]
            self._sums.clear()
            self._counts.clear()
            self._reasons.clear()
        return found

    def close(self) -> None:
        """Takes a last sample and ends the thread."""
        self._stop.set()
        self._thread.join(_END_SECONDS)
        if self._gpus is not None and not self._thread.is_alive():
            self._gpus.close()

    def _watch(self) -> None:
        wait = self._interval
        try:
            while not self._stop.wait(wait):
                cost = self._sample()
                wait = min(max(self._interval, cost / _SHARE), _LONGEST)
            self._sample()
        except Exception as error:  # whatever it is, no training stops for a metric
            warn(f"the host's metrics end here ({type(error).__name__}: {error}); the training goes on")

    def _sample(self) -> float:
        """Returns the CPU seconds that it took."""
        began = time.thread_time()
        gauges, reasons = dict[str, float](), list[str]()
        now = time.monotonic()
        counters = self._host.counters()
        if self._gpus is not None:
            gauges, reasons = self._gpus.sample(now - self._latest[0])
            if "energy/joules" in gauges:
                counters["energy/joules"] = gauges.pop("energy/joules")
        if (resident := self._host.resident()) is not None:
            gauges["memory/rss_bytes"] = resident
        with self._lock:
            self._latest = (now, counters)
            self._sums.update(gauges)
            self._counts.update(gauges.keys())
            self._reasons.update(reasons)
        return time.thread_time() - began
