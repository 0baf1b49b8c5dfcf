"""Figures from NVML for the GPUs that a job uses on this host; a figure that NVML refuses is absent.

NVML numbers GPUs by their place on the PCI bus. CUDA does so too on a host whose GPUs are of one kind, or
with CUDA_DEVICE_ORDER=PCI_BUS_ID. See the NVML API reference (nvmlDeviceQueries) and the CUDA C++ programming
guide (CUDA_VISIBLE_DEVICES).
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

from trainer.host.gpus import visible_gpus

# Reasons for low clocks, one bit each (nvmlClocksEventReasons; until driver 535 nvmlClocksThrottleReasons).
# HwSlowdown (0x8) goes with the other two of hardware where these are told; then they say more.
_REASONS = (
    ("thermal", 0x20 | 0x40),  # SwThermalSlowdown, HwThermalSlowdown
    ("power", 0x04 | 0x80),  # SwPowerCap, HwPowerBrakeSlowdown
    ("hardware", 0x08),
)
_IDLE = 0x01
_UNKNOWN = 999  # nvmlReturn_t


class Refusal(NamedTuple):
    """Error of NVML: its number (nvml.h, nvmlReturn_t) and its message."""

    code: int
    text: str


class Nvml:
    """NVML, started, until `close` or the end of `with`. Its errors (lost, not supported) never leave it.

    Attributes:
        module: pynvml, for its constants.
        problem: Why it didn't start; None if it did.
    """

    def __init__(self, environ: Mapping[str, str], ranks: int | None = None, module: Any = None) -> None:
        """Starts it.

        Args:
            environ: For CUDA_VISIBLE_DEVICES.
            ranks: Of this host; the n-th uses the n-th visible GPU. None: all GPUs matter.
            module: In place of pynvml.
        """
        if module is None:
            import pynvml as module  # type: ignore[no-redef]
        self.module = module
        self._environ, self._ranks = environ, ranks
        self._joules = dict[int, float]()
        self.problem = self.asked("nvmlInit")[1]
        self._started = self.problem is None

    def __enter__(self) -> "Nvml":
        """Ends with the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends NVML."""
        self.close()

    def close(self) -> None:
        """Ends NVML."""
        if self._started:
            self._started = False
            self.ask("nvmlShutdown")

    def ask(self, question: str, *values: Any) -> Any:
        """Returns NVML's answer, bytes as text; None where it refuses, or lacks the function."""
        return self.asked(question, *values)[0]

    def asked(self, question: str, *values: Any) -> tuple[Any, Refusal | None]:
        """Returns NVML's answer, None where it refuses, and its error, None where it answers."""
        try:
            return _text(getattr(self.module, question)(*values)), None
        except (self.module.NVMLError, AttributeError) as error:
            return None, Refusal(int(getattr(error, "value", 0) or _UNKNOWN), str(error))

    @property
    def gpus(self) -> list[Any]:
        """NVML's handles of the ranks' GPUs."""
        return self._visible[0][: self._ranks]

    @property
    def wrong(self) -> str:
        """Returns the first word of CUDA_VISIBLE_DEVICES that names no GPU; "" if there is none."""
        return self._visible[1]

    @cached_property
    def _visible(self) -> tuple[list[Any], str]:
        if not self._started:
            return [], ""
        count = self.ask("nvmlDeviceGetCount") or 0
        handles = [self.ask("nvmlDeviceGetHandleByIndex", number) for number in range(count)]
        variable = self._environ.get("CUDA_VISIBLE_DEVICES")
        if variable is None:
            return [gpu for gpu in handles if gpu is not None], ""
        uuids = ["" if gpu is None else str(self.ask("nvmlDeviceGetUUID", gpu)) for gpu in handles]
        found, (words, wrong) = list[Any](), visible_gpus(uuids, variable)
        for word in words:
            if word.isdecimal():
                gpu = handles[int(word)]
            else:
                gpu = (
                    handles[uuids.index(word)]
                    if word in uuids
                    else self.ask("nvmlDeviceGetHandleByUUID", word)
                )
            if gpu is None:  # lost, or no such slice
                return found, word
            found.append(gpu)
        return found, wrong

    def bus_id(self, gpu: Any) -> str:
        """Returns a GPU's address on the PCI bus, "00000000:3B:00.0"; empty if NVML refuses."""
        return str(_text(getattr(self.ask("nvmlDeviceGetPciInfo", gpu), "busId", "")))

    def sample(self, seconds: float) -> tuple[dict[str, float], list[str]]:
        """Metrics now, and for each GPU that is slowed down the reason.

        Means over the GPUs, but memory of the fullest, temperature of the hottest, and joules of all.

        Args:
            seconds: Since the sample before, for a GPU that reports power but not energy.
        """
        ones = [self._one(gpu) for gpu in self.gpus]
        ones = [one for one in ones if one]
        metrics = dict[str, float]()
        for key in ("utilization", "power_w", "power_limit_w", "clock_mhz", "throttled"):
            known = [one[key] for one in ones if key in one]
            if known:
                metrics[f"gpu/{key}"] = sum(known) / len(known)
        full = [one for one in ones if "memory_bytes" in one]
        if full:
            fullest = max(full, key=lambda one: one["memory_bytes"])
            metrics |= {f"gpu/{key}": fullest[key] for key in ("memory_bytes", "memory_total_bytes")}
        hot = [one["temperature_c"] for one in ones if "temperature_c" in one]
        if hot:
            metrics["gpu/temperature_c"] = max(hot)
        energy = self._energy(seconds)
        if energy is not None:
            metrics["energy/joules"] = energy
        reasons = [reason for one in ones if (reason := slowdown(int(one.get("reasons", 0))))]
        return metrics, reasons

    def _one(self, gpu: Any) -> dict[str, float]:
        found = dict[str, float]()
        if (rates := self.ask("nvmlDeviceGetUtilizationRates", gpu)) is not None:
            found["utilization"] = rates.gpu / 100
        if (memory := self.ask("nvmlDeviceGetMemoryInfo", gpu)) is not None:
            found |= {"memory_bytes": float(memory.used), "memory_total_bytes": float(memory.total)}
        for key, scale, question in (
            ("clock_mhz", 1, ("nvmlDeviceGetClockInfo", gpu, self.module.NVML_CLOCK_SM)),
            ("power_w", 1e-3, ("nvmlDeviceGetPowerUsage", gpu)),
            ("power_limit_w", 1e-3, ("nvmlDeviceGetEnforcedPowerLimit", gpu)),
            ("temperature_c", 1, ("nvmlDeviceGetTemperature", gpu, self.module.NVML_TEMPERATURE_GPU)),
        ):
            if (value := self.ask(*question)) is not None:
                found[key] = value * scale
        reasons = self.ask("nvmlDeviceGetCurrentClocksEventReasons", gpu)
        if reasons is None:  # an older driver knows only the older name
            reasons = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons", gpu)
        if reasons is not None:
            found |= {"reasons": reasons, "throttled": float(bool(slowdown(reasons)))}
        return found

    def _energy(self, seconds: float) -> float | None:
        """Returns joules of all GPUs since a fixed moment, or since the start where only power is known."""
        known = False
        for number, gpu in enumerate(self.gpus):
            if (counted := self.ask("nvmlDeviceGetTotalEnergyConsumption", gpu)) is not None:
                self._joules[number] = counted / 1e3
            elif (power := self.ask("nvmlDeviceGetPowerUsage", gpu)) is not None:
                self._joules[number] = self._joules.get(number, 0.0) + power / 1e3 * seconds
            else:
                continue
            known = True
        return sum(self._joules.values()) if known else None  # that of a GPU that is lost stays in it


def bus_ids(environ: Mapping[str, str], ranks: int) -> list[str]:
    """Returns the PCI bus addresses of the ranks' GPUs, in their order; "" where NVML has none."""
    with Nvml(environ, ranks) as nvml:
        return [nvml.bus_id(gpu) for gpu in nvml.gpus]


def driver_version() -> str | None:
    """Returns the version of NVIDIA's driver; None without one."""
    with Nvml({}) as nvml:
        found: str | None = nvml.ask("nvmlSystemGetDriverVersion")
    return found


def _text(answer: Any) -> Any:
    return answer.decode() if isinstance(answer, bytes) else answer


def slowdown(reasons: int) -> str:
    """Returns why a GPU's clocks are low: thermal, power or hardware; empty if it is idle or not slowed."""
    if reasons & _IDLE:
        return ""
    return next((name for name, bits in _REASONS if reasons & bits), "")
