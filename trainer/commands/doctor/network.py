"""Interfaces and libraries by which ranks communicate."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.commands.doctor.facts import (
    CheckResult,
    MachineFacts,
    Network,
    bad,
    fine,
    some,
    unavailable,
    warning,
)
from trainer.host.kernel import infiniband_ports
from trainer.host.reading import kind_of


def read_interfaces(root: Path, load: Callable[[str], Any] = ctypes.CDLL) -> Network:
    """Reads interfaces and InfiniBand devices; sends nothing.

    Args:
        root: Folder that stands for "/".
        load: Opens a shared library by its name, as dlopen does.
    """
    try:
        names = sorted(entry.name for entry in (root / "sys/class/net").iterdir())
    except OSError:
        names = []
    active = infiniband_ports(root)
    verbs = list((root / "dev/infiniband").glob("uverbs*"))
    modules = [root / "sys/module" / name for name in ("nvidia_peermem", "nv_peer_mem")]
    return Network(
        interfaces=tuple(name for name in names if name != "lo"),
        infiniband=tuple(active),
        verbs=any(os.access(device, os.R_OK | os.W_OK) for device in verbs),
        peer_memory=any(kind_of(module) for module in modules),
        listed=verbs_devices(load) if active else None,
    )


def verbs_devices(load: Callable[[str], Any]) -> tuple[str, ...] | None:
    """Returns the devices that libibverbs lists, as NCCL sees them; None where it can't be loaded.

    NCCL isn't linked against it but opens it by name, and without it goes over TCP, without an error.
    """
    try:
        library = load("libibverbs.so.1")
    except OSError:
        return None
    library.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    library.ibv_get_device_name.restype = ctypes.c_char_p
    count = ctypes.c_int(0)
    devices = library.ibv_get_device_list(ctypes.byref(count))
    if not devices:
        return ()
    names = [library.ibv_get_device_name(ctypes.c_void_p(devices[at])) for at in range(count.value)]
    library.ibv_free_device_list(devices)
    return tuple(name.decode() for name in names)


def nccl(box: MachineFacts) -> CheckResult:
    """Checks whether the settings of NCCL and Gloo are right."""
    environ, network = box.environ, box.network
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        words = [word for word in environ.get(name, "").split(",") if word]
        known = (*network.interfaces, "lo")
        if words and not words[0].startswith("^") and not any(_names(word, known) for word in words):
            judge = warning if name.startswith("NCCL") and not box.gpus.cards else bad
            return judge(
                f"{name}={environ[name]}: there is {some(known)}",
                "ranks can't connect: no interface has that name",
                container=f"docker run --network=host …   (to have the host's interfaces), or without {name}",
                kubernetes=f"leave {name} out of env: (in a pod the interface is eth0)",
                host=f"unset {name}, or name an interface that every node has",
            )
    off = [name for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") if environ.get(name) == "1"]
    off += ["NCCL_IB_DISABLE"] if environ.get("NCCL_IB_DISABLE") == "1" and network.infiniband else []
    if off:
        return warning(
            f"{', '.join(off)}=1",
            "NCCL takes a slower way; such a line often stays from a search for a fault",
            container=f"docker run without -e {off[0]}=1",
            host=f"unset {' '.join(off)}",
        )
    if not box.gpus.cards:
        return unavailable("no GPU: ranks talk through Gloo")
    return fine("no setting slows NCCL")


def _names(word: str, known: tuple[str, ...]) -> bool:
    """Returns True if a word of NCCL_SOCKET_IFNAME matches an interface: by prefix, or with = exactly."""
    name = word.removeprefix("=")
    return any(one == name if word.startswith("=") else one.startswith(name) for one in known)


def infiniband(box: MachineFacts) -> CheckResult:
    """Checks whether InfiniBand can be used, where there is any."""
    network = box.network
    if not network.infiniband:
        return unavailable("no active InfiniBand port")
    finding = f"InfiniBand {some(network.infiniband)}"
    over_tcp = "it goes over TCP: several times slower between hosts"
    if not network.verbs:
        return warning(
            f"{finding}, but no /dev/infiniband/uverbs* that this user may open",
            f"NCCL can't use it: {over_tcp}",
            container="docker run --device=/dev/infiniband --ulimit memlock=-1:-1 --network=host …",
            kubernetes="resources: {limits: {rdma/hca_shared_devices_a: 1}}   (your device plugin's name)",
            slurm="srun --container-mounts=/dev/infiniband …   (Pyxis)",
            host="ls -l /dev/infiniband; sudo modprobe ib_uverbs",
        )
    missing = {one.partition(":")[0] for one in network.infiniband} - set(network.listed or ())
    if missing:
        package = "apt-get install --yes libibverbs1 ibverbs-providers"
        lacks = "libibverbs.so.1 isn't there"
        if network.listed is not None:
            lists = some(network.listed) if network.listed else "no device"
            lacks = f"libibverbs lists {lists}: the provider for {some(sorted(missing))} isn't there"
        return warning(
            f"{finding}, but {lacks}",
            f"NCCL opens this library by its name; without it, {over_tcp}",
            container=f"an image FROM this one, with: USER root; RUN apt-get update && {package}",
            host=f"sudo {package}   (in a job: an image with them)",
        )
    if box.gpus.cards and not network.peer_memory:
        return warning(
            f"{finding}, but the kernel module nvidia_peermem isn't loaded",
            "without it, or DMA-BUF, what GPUs send goes through the host's memory",
            kubernetes="GPU operator: --set driver.rdma.enabled=true",
            host="on every host: sudo modprobe nvidia_peermem",
        )
    return fine(f"{finding} can be used: libibverbs lists {some(network.listed or ())}")


NETWORK_CHECKS = (("net.nccl", nccl), ("net.infiniband", infiniband))
