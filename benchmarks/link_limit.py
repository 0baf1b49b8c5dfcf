"""Upper bound of the speed between ranks, as far as the system reports it; nothing is assumed.

All limits are bytes per second in one direction, as bus bandwidth is (`comm_fit.bus_factor`).
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.host.interfaces import address_towards, interface_of
from trainer.host.kernel import infiniband_ports
from trainer.host.nvml import Nvml

Limit = tuple[float | None, str]  # bytes per second, or None; and what it is of, or why it isn't known

# Gigatransfers per second of a lane, and the share of its bits that is data (8b/10b until generation 2,
# 128b/130b until 5, and frames without a line code in 6), by generation: PCI Express Base Specification.
_PCIE = {
    1: (2.5, 0.8),
    2: (5.0, 0.8),
    **{generation: (2.0**generation, 128 / 130) for generation in (3, 4, 5)},
    6: (64.0, 1.0),
}


def host_limit(
    backend: str, master: str, root: Path = Path("/"), environ: Mapping[str, str] | None = None
) -> Limit:
    """The limit of what this host sends to others.

    Args:
        backend: nccl uses InfiniBand where a port of it is active.
        master: Name or address of the host at which the ranks meet: its route is that of the traffic.
        root: Folder that stands for "/".
        environ: For GLOO_SOCKET_IFNAME and NCCL's variables; by default this process's.
    """
    environ = os.environ if environ is None else environ
    if backend == "nccl" and environ.get("NCCL_IB_DISABLE") != "1":
        ports = [(name, speed) for name, speed in infiniband_ports(root).items() if speed]
        if ports:
            speeds = ", ".join(f"{name} {speed:g} Gbit/s" for name, speed in ports)
            return sum(speed for _, speed in ports) * 1e9 / 8, f"InfiniBand {speeds}"
    name, why = interface_to(master, environ)
    if not name:
        return None, f"unknown, because {why}"
    return interface_speed(name, root)


def local_limit(
    backend: str, gpu: int, module: Any = None, environ: Mapping[str, str] | None = None
) -> Limit:
    """The limit of what a rank sends to others of its host.

    Args:
        backend: gloo goes over the loopback.
        gpu: Number of the rank's GPU, among those that CUDA_VISIBLE_DEVICES leaves.
        module: In place of pynvml.
        environ: For CUDA_VISIBLE_DEVICES; by default this process's.
    """
    if backend != "nccl":
        return None, "loopback: no link, memory is the limit"
    with Nvml(os.environ if environ is None else environ, module=module) as nvml:
        if nvml.problem:
            return None, "unknown, because NVML can't be asked"
        if gpu >= len(nvml.gpus):
            return None, f"unknown, because NVML doesn't show GPU {gpu}"
        return _nvlink(nvml, nvml.gpus[gpu]) or _pcie(nvml, nvml.gpus[gpu])


def _nvlink(nvml: Nvml, handle: Any) -> Limit | None:
    """The active links together; None where there are none. Of one link NVML tells MB/s in one direction."""
    links = range(getattr(nvml.module, "NVML_NVLINK_MAX_LINKS", 18))
    active = sum(nvml.ask("nvmlDeviceGetNvLinkState", handle, link) == 1 for link in links)
    if not active:
        return None
    field = getattr(nvml.module, "NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON", 90)
    speed = _field(nvml.ask("nvmlDeviceGetFieldValues", handle, [field]))
    if not speed:
        return None, f"unknown, because NVML doesn't tell the speed of the {active} NVLinks"
    return active * speed * 1e6, f"{active} NVLinks of {speed / 1e3:g} GB/s"


def _field(values: Sequence[Any] | None) -> int:
    if not values or values[0].nvmlReturn != 0:
        return 0
    value = values[0].value  # a union; both members that a speed can have start with its low 32 bits
    return int(value.uiVal)


def _pcie(nvml: Nvml, handle: Any) -> Limit:
    """PCIe, at the best that GPU and slot can do together: an idle GPU lowers what it does now."""
    generation = nvml.ask("nvmlDeviceGetMaxPcieLinkGeneration", handle)
    width = nvml.ask("nvmlDeviceGetMaxPcieLinkWidth", handle)
    if generation not in _PCIE or not width:
        return None, "unknown, because there is no active NVLink and NVML doesn't tell the PCIe link"
    rate, share = _PCIE[generation]
    return rate * share * width * 1e9 / 8, f"PCIe {generation}.0 x{width}"


def interface_speed(name: str, root: Path = Path("/")) -> Limit:
    """Returns the speed that the kernel reports; see /sys/class/net/<iface>/speed in its ABI docs."""
    if name == "lo":
        return None, "loopback: no link, memory is the limit"
    try:
        megabits = int((root / "sys/class/net" / name / "speed").read_text())
    except (OSError, ValueError):
        return None, f"unknown, because {name} doesn't tell its speed (/sys/class/net/{name}/speed)"
    if megabits <= 0:
        return None, f"unknown, because {name} says {megabits} of its speed, as virtual ones do"
    return megabits * 1e6 / 8, f"{name} {megabits / 1e3:g} Gbit/s"


def interface_to(master: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """The interface that carries traffic to a host, and if none is found, why."""
    wanted = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if wanted:
        return wanted, ""
    address = address_towards(master)
    if not address:
        return "", f"there is no route to {master}"
    if name := interface_of(address):
        return name, ""
    if address.startswith("127.") or address == "::1":
        return "lo", ""
    return "", f"no interface has the address {address}"
