"""What NVML tells of the GPUs that a job uses on this host; whatever it refuses to tell is absent.

NVML numbers GPUs by their place on the PCI bus. CUDA does so too on a host whose GPUs are of one kind, or
with CUDA_DEVICE_ORDER=PCI_BUS_ID. See the NVML API reference (nvmlDeviceQueries) and the CUDA C++ programming
guide (CUDA_VISIBLE_DEVICES).
"""

import contextlib
from collections.abc import Mapping
from typing import Any

# Reasons for low clocks, one bit each (nvmlClocksEventReasons; until driver 535 nvmlClocksThrottleReasons).
# HwSlowdown (0x8) goes with the other two of hardware where these are told; then they say more.
_REASONS = (
    ("thermal", 0x20 | 0x40),  # SwThermalSlowdown, HwThermalSlowdown
    ("power", 0x04 | 0x80),  # SwPowerCap, HwPowerBrakeSlowdown
    ("hardware", 0x08),
)
_IDLE = 0x01


class Gpus:
    """The GPUs of this host's ranks. NVML errors (lost, not supported, no permission) never leave it."""

    def __init__(self, nvml: Any, environ: Mapping[str, str], ranks: int) -> None:
        """Starts NVML.

        Args:
            nvml: The module pynvml.
            environ: For CUDA_VISIBLE_DEVICES.
            ranks: Of this host; the n-th uses the n-th visible GPU.
        """
        self._nvml = nvml
        self._joules = dict[int, float]()
        self._started = False
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlInit()
            self._started = True
        self._handles = visible_gpus(nvml, environ)[0][:ranks] if self._started else []

    def close(self) -> None:
        """Ends NVML."""
        if self._started:
            self._started = False
            self._ask("nvmlShutdown")

    def sample(self, seconds: float) -> tuple[dict[str, float], list[str]]:
        """Figures now, and for each GPU that is slowed down the reason.

        Means over the GPUs, but memory of the fullest, temperature of the hottest, and joules of all.

        Args:
            seconds: Since the sample before, for a GPU that tells its power but not its energy.
        """
        ones = [self._one(handle) for handle in self._handles]
        ones = [one for one in ones if one]
        figures = dict[str, float]()
        for key in ("utilisation", "power_w", "power_limit_w", "clock_mhz", "slow"):
            known = [one[key] for one in ones if key in one]
            if known:
                figures[f"gpu/{key}"] = sum(known) / len(known)
        full = [one for one in ones if "memory_bytes" in one]
        if full:
            fullest = max(full, key=lambda one: one["memory_bytes"])
            figures |= {f"gpu/{key}": fullest[key] for key in ("memory_bytes", "memory_total_bytes")}
        hot = [one["temperature_c"] for one in ones if "temperature_c" in one]
        if hot:
            figures["gpu/temperature_c"] = max(hot)
        if "gpu/slow" in figures:
            figures["gpu/throttled"] = figures.pop("gpu/slow")
        energy = self._energy(seconds)
        if energy is not None:
            figures["energy/joules"] = energy
        reasons = [reason for one in ones if (reason := slowdown(int(one.get("reasons", 0))))]
        return figures, reasons

    def _one(self, gpu: Any) -> dict[str, float]:
        found = dict[str, float]()
        if (rates := self._ask("nvmlDeviceGetUtilizationRates", gpu)) is not None:
            found["utilisation"] = rates.gpu / 100
        if (memory := self._ask("nvmlDeviceGetMemoryInfo", gpu)) is not None:
            found |= {"memory_bytes": float(memory.used), "memory_total_bytes": float(memory.total)}
        for key, scale, question in (
            ("clock_mhz", 1, ("nvmlDeviceGetClockInfo", gpu, self._nvml.NVML_CLOCK_SM)),
            ("power_w", 1e-3, ("nvmlDeviceGetPowerUsage", gpu)),
            ("power_limit_w", 1e-3, ("nvmlDeviceGetEnforcedPowerLimit", gpu)),
            ("temperature_c", 1, ("nvmlDeviceGetTemperature", gpu, self._nvml.NVML_TEMPERATURE_GPU)),
        ):
            if (value := self._ask(*question)) is not None:
                found[key] = value * scale
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", gpu)
        if reasons is None:  # an older driver knows only the older name
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", gpu)
        if reasons is not None:
            found |= {"reasons": reasons, "slow": float(bool(slowdown(reasons)))}
        return found

    def _energy(self, seconds: float) -> float | None:
        """Joules of all GPUs since some moment, or since the start where power alone is told."""
        told = False
        for number, gpu in enumerate(self._handles):
            if (counted := self._ask("nvmlDeviceGetTotalEnergyConsumption", gpu)) is not None:
                self._joules[number] = counted / 1e3
            elif (power := self._ask("nvmlDeviceGetPowerUsage", gpu)) is not None:
                self._joules[number] = self._joules.get(number, 0.0) + power / 1e3 * seconds
            else:
                continue
            told = True
        return sum(self._joules.values()) if told else None  # that of a GPU that is lost stays in it

    def _ask(self, function: str, *values: Any) -> Any:
        return ask(self._nvml, function, *values)


def ask(nvml: Any, function: str, *values: Any) -> Any:
    """What NVML answers; None where it refuses, or this version of it has no such question."""
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        return getattr(nvml, function)(*values)
    return None


def visible_gpus(nvml: Any, environ: Mapping[str, str]) -> tuple[list[Any], str]:
    """NVML's handles of what CUDA_VISIBLE_DEVICES leaves, and its first word that names no GPU ("": none).

    Args:
        nvml: The module pynvml, started.
        environ: For CUDA_VISIBLE_DEVICES.
    """
    count = ask(nvml, "nvmlDeviceGetCount") or 0
    there = [ask(nvml, "nvmlDeviceGetHandleByIndex", number) for number in range(count)]
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return [gpu for gpu in there if gpu is not None], ""
    found = list[Any]()
    for word in environ["CUDA_VISIBLE_DEVICES"].split(","):
        name, chosen = word.strip(), None
        if name.isdecimal() and len(name) < 5:
            chosen = there[int(name)] if int(name) < count else None
        elif name.startswith("GPU-"):  # CUDA takes the first letters of an identifier, NVML all of it
            matching = [gpu for gpu in there if gpu is not None and _uuid(nvml, gpu).startswith(name)]
            chosen = matching[0] if len(matching) == 1 else None
        elif name.startswith("MIG-"):
            chosen = ask(nvml, "nvmlDeviceGetHandleByUUID", name)
        if chosen is None:  # CUDA sees nothing from the first wrong one on
            return found, name
        found.append(chosen)
    return found, ""


def _uuid(nvml: Any, gpu: Any) -> str:
    uuid = ask(nvml, "nvmlDeviceGetUUID", gpu)
    return uuid.decode() if isinstance(uuid, bytes) else str(uuid)


def bus_ids(environ: Mapping[str, str], ranks: int, nvml: Any = None) -> list[str]:
    """Where on the PCI bus the GPUs of this host's ranks are, as far as NVML tells: "00000000:3B:00.0"."""
    found = [info.busId for info in _each(environ, ranks, "nvmlDeviceGetPciInfo", nvml) if info is not None]
    return [one.decode() if isinstance(one, bytes) else str(one) for one in found]


def gpu_bytes(environ: Mapping[str, str], gpu: int, nvml: Any = None) -> int:
    """The memory of a visible GPU; 0 if NVML doesn't tell."""
    found = _each(environ, gpu + 1, "nvmlDeviceGetMemoryInfo", nvml)
    return int(found[gpu].total) if len(found) > gpu and found[gpu] is not None else 0


def _each(environ: Mapping[str, str], ranks: int, question: str, nvml: Any) -> list[Any]:
    if nvml is None:
        import pynvml as nvml  # type: ignore[no-redef]
    gpus = Gpus(nvml, environ, ranks)
    try:
        return [gpus._ask(question, handle) for handle in gpus._handles]
    finally:
        gpus.close()


def driver_version(nvml: Any = None) -> str | None:
    """The version of NVIDIA's driver; None where there is none."""
    if nvml is None:
        import pynvml as nvml  # type: ignore[no-redef]
    try:
        nvml.nvmlInit()
        found = nvml.nvmlSystemGetDriverVersion()
        nvml.nvmlShutdown()
    except nvml.NVMLError:
        return None
    return found.decode() if isinstance(found, bytes) else str(found)


def slowdown(reasons: int) -> str:
    """Why a GPU's clocks are low: thermal, power or hardware; empty if it is idle or nothing slows it."""
    if reasons & _IDLE:
        return ""
    return next((name for name, bits in _REASONS if reasons & bits), "")
