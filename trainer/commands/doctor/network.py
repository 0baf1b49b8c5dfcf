"""What ranks talk through, and the ports that people's browsers want."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.commands.doctor.facts import Box, Finding, Network, bad, fine, unavailable, warn
from trainer.commands.doctor.helpers import some
from trainer.host.reading import kind_of, text_of, within

_SECONDS = 0.3  # a name server that doesn't answer takes 5 s and more


def read_network(root: Path, environ: Mapping[str, str], load: Callable[[str], Any] = ctypes.CDLL) -> Network:
    """Looks at interfaces, name, ports and InfiniBand; sends nothing but a question for this host's name.

    Args:
        root: Folder that stands for "/".
        environ: For the ports.
        load: Opens a shared library by its name, as dlopen does.
    """
    try:
        names = sorted(entry.name for entry in (root / "sys/class/net").iterdir())
    except OSError:
        names = []
    host = socket.gethostname()
    active = [
        f"{file.parent.parent.parent.name}:{file.parent.name}"
        for file in sorted((root / "sys/class/infiniband").glob("*/ports/*/state"))
        if "ACTIVE" in text_of(file)
    ]
    verbs = list((root / "dev/infiniband").glob("uverbs*"))
    modules = [root / "sys/module" / name for name in ("nvidia_peermem", "nv_peer_mem")]
    return Network(
        interfaces=tuple(name for name in names if name != "lo"),
        host=host,
        resolves=within(_SECONDS, lambda: _resolves(host), None),
        taken={what: port for what, port in wanted_ports(environ).items() if is_taken(port)},
        infiniband=tuple(active),
        verbs=any(os.access(device, os.R_OK | os.W_OK) for device in verbs),
        peer_memory=any(kind_of(module) for module in modules),
        listed=verbs_devices(load) if active else None,
    )


def verbs_devices(load: Callable[[str], Any]) -> tuple[str, ...] | None:
    """The devices that libibverbs lists, as NCCL asks it; None where it can't be loaded.

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


def wanted_ports(environ: Mapping[str, str]) -> dict[str, int]:
    """Ports by what wants them: torchrun's defaults, and those of this project's services."""
    found = {}
    for what, variable, usual in (
        ("the ranks' rendezvous (MASTER_PORT)", "MASTER_PORT", 29500),
        ("JupyterLab (JUPYTER_PORT)", "JUPYTER_PORT", 8888),
        ("TensorBoard (TENSORBOARD_PORT)", "TENSORBOARD_PORT", 6006),
    ):
        text = environ.get(variable, "")
        found[what] = int(text) if text.isdecimal() and 0 < int(text) < 65536 else usual
    return found


def is_taken(port: int) -> bool:
    """Whether somebody listens on a port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except PermissionError:
            return False
        except OSError:
            return True
    return False


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def host(box: Box) -> Finding:
    """Whether this host's own name has an address."""
    network = box.network
    if not network.interfaces:
        return unavailable("no network but loopback: ranks of one host need no more")
    if network.resolves:
        return fine(f"{network.host} has an address")
    slow = network.resolves is None
    return warn(
        f"{network.host} {f'got no address within {_SECONDS:g} s' if slow else 'has no address'}",
        "Gloo and torchrun look their own host up: starts wait, or ranks of other hosts can't connect",
        host=f"echo '127.0.1.1 {network.host}' | sudo tee -a /etc/hosts; or export GLOO_SOCKET_IFNAME="
        f"{network.interfaces[0]}",
        docker=f"docker run --hostname {network.host} …   (Docker writes it into /etc/hosts)",
        compose=f"hostname: {network.host}",
        kubernetes="a headless Service with publishNotReadyAddresses: true, and subdomain: in the pod",
        slurm="torchrun --rdzv-endpoint=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -1):29500 …; "
        "trainer train finds the other nodes itself",
    )


def ports(box: Box) -> Finding:
    """Whether the ports are free that will be asked for."""
    taken = box.network.taken
    if not taken:
        return fine(f"ports {', '.join(map(str, wanted_ports(box.environ).values()))} of 127.0.0.1 are free")
    port = next(iter(taken.values()))
    return warn(
        "; ".join(f"port {number} is taken: {what}" for what, number in taken.items()),
        "what asks for it next can't start; trainer train itself takes a free one",
        host=f"ss -ltnp 'sport = :{port}' shows who; or choose others: MASTER_PORT=29501 make up "
        "JUPYTER_PORT=8889 TENSORBOARD_PORT=6007",
        docker="docker run -p 127.0.0.1:8889:8888 …",
        compose="JUPYTER_PORT=8889 TENSORBOARD_PORT=6007 docker compose up",
        kubernetes="ports of a pod are its own: another container of it listens there",
        slurm="export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
    )


def nccl(box: Box) -> Finding:
    """Whether settings and library of NCCL and Gloo are right."""
    environ, network, software = box.environ, box.network, box.software
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        words = [word for word in environ.get(name, "").split(",") if word]
        known = (*network.interfaces, "lo")
        if words and not words[0].startswith("^") and not any(_names(word, known) for word in words):
            judge = warn if name.startswith("NCCL") and not box.gpus.cards else bad
            return judge(
                f"{name}={environ[name]}: there is {some(known)}",
                "ranks can't connect: no interface has that name",
                host=f"unset {name}",
                docker=f"docker run --network=host …   (to have the host's interfaces), or without {name}",
                compose="network_mode: host",
                kubernetes=f"leave {name} out of env: (in a pod the interface is eth0)",
                slurm=f"unset {name}, or name an interface that every node has",
            )
    off = [name for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") if environ.get(name) == "1"]
    off += ["NCCL_IB_DISABLE"] if environ.get("NCCL_IB_DISABLE") == "1" and network.infiniband else []
    if off:
        return warn(
            f"{', '.join(off)}=1",
            "NCCL takes a slower way; such a line often stays from a search for a fault",
            host=f"unset {' '.join(off)}",
            docker=f"docker run without -e {off[0]}=1",
            slurm=f"unset {' '.join(off)}",
        )
    old = [name for name in ("NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING") if name in environ]
    if old:
        return warn(
            f"{', '.join(old)}: torch calls it TORCH_{old[0]} now",
            "the old name will have no effect",
            host=f"unset {' '.join(old)}",
        )
    searched = [one for one in software.searched if "nccl" in one]
    there = [name for name in software.installed if name.startswith("nvidia-nccl-")]
    wrong = [
        name
        for name in there
        if software.wanted.get(name, software.installed[name]) != software.installed[name]
    ]
    if searched or wrong:
        return warn(
            some(searched or [f"{name} {software.installed[name]}" for name in wrong]),
            "it is another NCCL than torch's own: ranks of different versions can't talk",
            host="unset LD_LIBRARY_PATH LD_PRELOAD" if searched else "make clean-venv && make venv",
            docker="docker run -e LD_LIBRARY_PATH= …" if searched else "docker run --rm IMAGE …",
            slurm="module unload nccl",
        )
    if not box.gpus.cards:
        return unavailable("no GPU: ranks talk through Gloo")
    return fine("NCCL is torch's own, with no setting that slows it")


def _names(word: str, known: tuple[str, ...]) -> bool:
    """Whether one of NCCL's words means an interface: by its first letters, or with = all of them."""
    name = word.removeprefix("=")
    return any(one == name if word.startswith("=") else one.startswith(name) for one in known)


def infiniband(box: Box) -> Finding:
    """Whether InfiniBand can be used, if it is there."""
    network = box.network
    if not network.infiniband:
        return unavailable("no active InfiniBand port")
    said = f"InfiniBand {some(network.infiniband)}"
    if not network.verbs:
        return warn(
            f"{said}, but no /dev/infiniband/uverbs* that this user may open",
            "NCCL goes over TCP: several times slower between hosts",
            docker="docker run --device=/dev/infiniband --ulimit memlock=-1:-1 --network=host …",
            compose="devices: [/dev/infiniband]; ulimits: {memlock: -1}; network_mode: host",
            kubernetes="resources: {limits: {rdma/hca_shared_devices_a: 1}}   (your device plugin's name)",
            slurm="srun --container-mounts=/dev/infiniband …   (Pyxis; Apptainer has it)",
            host="ls -l /dev/infiniband; sudo modprobe ib_uverbs",
        )
    missing = {one.partition(":")[0] for one in network.infiniband} - set(network.listed or ())
    if missing:
        package = "apt-get install --yes libibverbs1 ibverbs-providers"
        lacks = "libibverbs.so.1 isn't there"
        if network.listed is not None:
            lists = some(network.listed) if network.listed else "no device"
            lacks = f"libibverbs lists {lists}: the provider for {some(sorted(missing))} isn't there"
        return warn(
            f"{said}, but {lacks}",
            "NCCL opens this library by its name; without it, it goes over TCP: several times slower "
            "between hosts",
            host=f"sudo {package}",
            docker=f"an image FROM this one, with: USER root; RUN apt-get update && {package}",
            slurm=f"an image with libibverbs1 and ibverbs-providers ({package})",
        )
    if box.gpus.cards and not network.peer_memory:
        return warn(
            f"{said}, but the kernel module nvidia_peermem isn't loaded",
            "without it, or DMA-BUF, what GPUs send goes through the host's memory",
            host="sudo modprobe nvidia_peermem",
            docker="of the host: sudo modprobe nvidia_peermem",
            kubernetes="GPU operator: --set driver.rdma.enabled=true",
            slurm="sudo modprobe nvidia_peermem on every node (an administrator's)",
        )
    return fine(f"{said} can be used: libibverbs lists {some(network.listed or ())}")


CHECKS = (
    ("net.host", host),
    ("net.ports", ports),
    ("net.nccl", nccl),
    ("net.infiniband", infiniband),
)
