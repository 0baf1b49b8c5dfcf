"""GPUs: the driver, the cards, and whether the installed stack is made for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.commands.doctor.facts import Box, Card, Finding, Gpus, bad, fine, unavailable, warn
from trainer.commands.doctor.helpers import size, some
from trainer.commands.doctor.stacks import fitting, numbers, read_stacks, stack_of
from trainer.host.affinity import gpu_nodes
from trainer.host.nvml import ask, visible_gpus
from trainer.host.reading import kind_of, text_of

# NVML's numbers (nvml.h, nvmlReturn_t).
_NO_PERMISSION, _NOT_LOADED, _NO_LIBRARY, _LOST, _MISMATCH, _UNKNOWN = 4, 9, 12, 15, 18, 999
_NOT_OURS = {2, 3, _NO_PERMISSION, 6}  # invalid, not supported, not found
# Brands whose cards forward compatibility refuses: GeForce and Titan, with and without RTX.
_CONSUMER = {5, 6, 15, 16}
_PEER_REASONS = {
    1: "the chipset can't",
    2: "the GPU can't",
    3: "they hang on different I/O hubs",
    4: "a key of the driver forbids it",
}
GPUS_OF_A_CONTAINER = {
    "docker": "docker run --gpus all …",
    "compose": "deploy: {resources: {reservations: {devices: [{driver: nvidia, count: all, "
    "capabilities: [gpu]}]}}}",
    "kubernetes": "resources: {limits: {nvidia.com/gpu: 1}}",
    "slurm": "#SBATCH --gpus-per-node=1   (Apptainer: apptainer exec --nv …)",
}


def read_gpus(nvml: Any, root: Path, environ: Mapping[str, str]) -> Gpus:
    """Asks NVML, and the files that the driver leaves without it.

    Args:
        nvml: The module pynvml, or what stands for it.
        root: Folder that stands for "/".
        environ: For CUDA_VISIBLE_DEVICES and LD_LIBRARY_PATH.
    """
    kernel = re.search(r"Module.*?\s(\d+\.\d+[.\d]*)", text_of(root / "proc/driver/nvidia/version"))
    seen = Gpus(
        kernel=kernel[1] if kernel else "",
        nodes=bool(kind_of(root / "dev/nvidiactl")),
        compat=_compat(root, environ),
    )
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        code = int(getattr(error, "value", 0) or _UNKNOWN)
        return replace(seen, problem=str(error), code=code)
    try:
        handles, wrong = visible_gpus(nvml, environ)
        cards = [_card(nvml, handle, place, root) for place, handle in enumerate(handles)]
        words = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        for number in range(ask(nvml, "nvmlDeviceGetCount") or 0):
            meant = "CUDA_VISIBLE_DEVICES" not in environ or str(number) in words
            if meant and (lost := _lost(nvml, number)):
                cards.append(Card(number, f"GPU {number}", lost=lost))
        peers = []
        for one, first in enumerate(handles[:16]):
            for other, second in enumerate(handles[:one]):
                status = ask(nvml, "nvmlDeviceGetP2PStatus", first, second, 0)
                if status:  # None: it doesn't tell
                    peers.append((other, one, _PEER_REASONS.get(status, "not supported")))
        driver = _words(ask(nvml, "nvmlSystemGetDriverVersion"))
        return replace(seen, driver=driver, cards=tuple(cards), wrong=wrong, peers=tuple(peers))
    finally:
        ask(nvml, "nvmlShutdown")


def _words(answer: Any) -> str:
    return answer.decode() if isinstance(answer, bytes) else str(answer or "")


def _lost(nvml: Any, number: int) -> str:
    try:
        nvml.nvmlDeviceGetHandleByIndex(number)
    except nvml.NVMLError as error:  # those of other jobs are counted, too, but may not be asked
        return "" if getattr(error, "value", 0) in _NOT_OURS else str(error)
    return ""


def _card(nvml: Any, handle: Any, place: int, root: Path) -> Card:
    capability = ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    lost, total, used = "", 0, 0
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        total, used = memory.total, memory.used
    except nvml.NVMLError as error:
        if getattr(error, "value", 0) in (_LOST, 16):  # 16: it wants a reset
            lost = str(error)
    bus = _words(getattr(ask(nvml, "nvmlDeviceGetPciInfo", handle), "busId", ""))
    node = gpu_nodes([bus], root)[0] if bus else None
    index = ask(nvml, "nvmlDeviceGetIndex", handle)
    return Card(
        index=place if index is None else index,
        name=_words(ask(nvml, "nvmlDeviceGetName", handle)),
        architecture=f"sm_{capability[0]}{capability[1]}" if capability else "",
        total=total,
        used=used,
        node=-1 if node is None else node,
        data_centre=ask(nvml, "nvmlDeviceGetBrand", handle) not in _CONSUMER,
        lost=lost,
    )


def _compat(root: Path, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Versions of libcuda in folders named compat that the dynamic loader looks into before the driver's."""
    folders = [folder for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if "compat" in folder]
    for file in sorted((root / "etc/ld.so.conf.d").glob("*.conf")):
        folders += [line.strip() for line in text_of(file).splitlines() if "compat" in line]
    found = dict[str, None]()
    for folder in folders:
        for file in sorted((root / folder.lstrip("/")).glob("libcuda.so.*.*")):
            found[file.name.removeprefix("libcuda.so.")] = None
    return tuple(found)


def nvml(box: Box) -> Finding:  # noqa: PLR0911
    """Whether NVIDIA's driver answers."""
    gpus = box.gpus
    if not gpus.problem:
        return fine(f"driver {gpus.driver}, {len(gpus.cards)} GPUs to use")
    if gpus.code == _MISMATCH:
        return bad(
            f"NVML: {gpus.problem}",
            "the driver was updated under its loaded kernel module, or a container has another one's library",
            host="sudo reboot   (or unload and load the module nvidia)",
            docker="after that docker run … again: a container keeps the library that it was started with",
        )
    if gpus.code == _NO_PERMISSION:
        return bad(
            f"NVML: {gpus.problem}",
            "/dev/nvidia* isn't this user's to open",
            docker='docker run --group-add "$(stat -c %g /dev/nvidiactl)" …',
            host="ls -l /dev/nvidia*; add this user to the group that owns them",
        )
    if gpus.nodes and gpus.code == _NO_LIBRARY:
        return bad(
            "the GPU's device files are here, but not NVML's library (libnvidia-ml.so.1)",
            "the container was given the driver without the part that tools need",
            docker="docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility …",
            compose="environment: {NVIDIA_DRIVER_CAPABILITIES: 'compute,utility'}",
            kubernetes="env: [{name: NVIDIA_DRIVER_CAPABILITIES, value: 'compute,utility'}]",
        )
    if gpus.code in (_NO_LIBRARY, _NOT_LOADED) and not gpus.kernel:
        return unavailable("no NVIDIA driver here: it trains on the CPU")
    if gpus.kernel and gpus.code == _NO_LIBRARY:
        return warn(
            f"the host has NVIDIA's driver {gpus.kernel}, but no GPU reaches this container",
            "it was started without GPUs: it trains on the CPU",
            **GPUS_OF_A_CONTAINER,
        )
    return bad(
        f"NVML: {gpus.problem}",
        "a container loses its GPUs when systemd reloads while it runs; else a GPU or the driver failed",
        docker="docker restart CONTAINER; against it docker run --device=/dev/nvidiactl "
        '--device=/dev/nvidia0 …, or "exec-opts": ["native.cgroupdriver=cgroupfs"] in daemon.json',
        kubernetes="kubectl delete pod NAME   (its controller starts it again)",
        slurm="scontrol update nodename=NODE state=drain reason=gpu   (an administrator's)",
        host="sudo dmesg | grep -i -e xid -e nvrm",
    )


def visible(box: Box) -> Finding:
    """Whether CUDA_VISIBLE_DEVICES names GPUs that there are."""
    words = box.environ.get("CUDA_VISIBLE_DEVICES")
    if box.gpus.problem:
        return unavailable("no GPU can be asked for")
    if box.gpus.wrong:
        return bad(
            f"CUDA_VISIBLE_DEVICES={words}: {box.gpus.wrong} is none of the GPUs here",
            "CUDA sees no GPU from the first wrong word on",
            host="unset CUDA_VISIBLE_DEVICES   (nvidia-smi -L lists what there is)",
            slurm="leave CUDA_VISIBLE_DEVICES alone: Slurm sets it for the GPUs of the job",
        )
    if words is not None and not words.strip():
        return warn("CUDA_VISIBLE_DEVICES is empty", "it hides every GPU", host="unset CUDA_VISIBLE_DEVICES")
    return fine("every GPU may be used" if words is None else f"CUDA_VISIBLE_DEVICES={words}")


def lost(box: Box) -> Finding:
    """Whether every GPU answers."""
    if not box.gpus.cards:
        return unavailable("no GPU")
    gone = [card for card in box.gpus.cards if card.lost]
    if gone:
        return bad(
            f"{some(f'{card.name}: {card.lost}' for card in gone)}",
            "the GPU fell off the bus or wants a reset; runs on it hang or fail",
            host="sudo nvidia-smi --gpu-reset -i INDEX, or reboot; sudo dmesg | grep -i xid says why",
            kubernetes="kubectl cordon NODE and reset the GPU there",
            slurm="sbatch --exclude=NODE …, and tell the administrator",
        )
    return fine("every GPU answers")


def driver(box: Box) -> Finding:
    """The driver against the installed stack's floor; names the stack that would fit."""
    gpus, stacks = box.gpus, read_stacks()
    if not gpus.driver:
        return unavailable("no driver answers")
    stack = stack_of(box.software, stacks)
    if stack is None:  # a torch of the user's own: what its CUDA needs is in the table as well
        same = [one for one in stacks.values() if numbers(one.cuda)[:1] == numbers(box.software.cuda)[:1]]
        if not same:
            return unavailable(f"torch {box.software.torch} is of no stack that is known here")
        stack = same[0]
    if numbers(gpus.driver) < numbers(stack.floor):
        best = fitting(gpus, stacks)
        said = f"driver {gpus.driver} is older than {stack.floor}, which CUDA {stack.cuda} needs"
        if best is None:
            update = f"update the driver to {stack.floor} at least"
            return bad(said, "CUDA won't start, and no other stack fits this driver and GPU", host=update)
        return bad(
            said, f"CUDA won't start; the stack {best.name} fits, or a newer driver", **_with_stack(best.name)
        )
    if numbers(gpus.driver) < numbers(stack.native):
        return fine(
            f"driver {gpus.driver} runs CUDA {stack.cuda}, without JIT of PTX (from {stack.native} on)"
        )
    return fine(f"driver {gpus.driver} runs CUDA {stack.cuda}")


def _with_stack(name: str) -> dict[str, str]:
    return {
        "host": f"make train STACK={name}",
        "docker": f"docker run --gpus all trainer:{name}-train …",
        "compose": f"image: trainer:{name}-train",
        "kubernetes": f"image: REGISTRY/trainer:{name}-train",
        "slurm": f"srun --container-image=REGISTRY/trainer:{name}-train …   (Pyxis)",
    }


def architecture(box: Box) -> Finding:
    """Whether the installed torch has code for every GPU."""
    stacks = read_stacks()
    cards = [card for card in box.gpus.cards if card.architecture]
    if not cards:
        return unavailable("no GPU")
    stack = stack_of(box.software, stacks)
    if stack is None:
        return unavailable(f"torch {box.software.torch} is of no stack that is known here")
    without = [card for card in cards if not stack.covers(card.architecture)]
    if without:
        best = fitting(box.gpus, stacks)
        others = {
            "host": "CUDA_VISIBLE_DEVICES=0 trainer train …   (the numbers of other GPUs, if there are)",
            "docker": "docker run --gpus '\"device=0\"' …   (the same)",
        }
        return bad(
            f"{some(f'{card.name} ({card.architecture})' for card in without)}: torch {stack.torch} has code "
            f"for {', '.join(stack.architectures)}",
            'it ends with "no kernel image is available for execution on the device"'
            + (f"; the stack {best.name} fits" if best else "; no stack fits"),
            **(_with_stack(best.name) if best else others),
        )
    return fine(f"torch has code for {', '.join(sorted({card.architecture for card in cards}))}")


def compat(box: Box) -> Finding:
    """The state of forward compatibility (cuda-compat)."""
    gpus = box.gpus
    if not gpus.driver:
        return unavailable("no driver answers")
    if not gpus.compat:
        return fine("forward compatibility isn't used: the driver's own libcuda is")
    found = gpus.compat[0]
    take_out = {
        "host": "take …/compat out of LD_LIBRARY_PATH and of /etc/ld.so.conf.d, then ldconfig",
        "docker": "docker run -e LD_LIBRARY_PATH= …   (an image with its cuda-compat package removed)",
    }
    if numbers(found) < numbers(gpus.driver):
        return bad(
            f"libcuda {found} of cuda-compat comes before the driver's own, which is newer ({gpus.driver})",
            "CUDA ends with error 803: a user-mode driver must not be older than the kernel's",
            **take_out,
        )
    consumer = [card for card in gpus.cards if not card.data_centre]
    if consumer and numbers(found)[:1] > numbers(gpus.driver)[:1]:
        return bad(
            f"libcuda {found} of cuda-compat comes first, and {consumer[0].name} is no data-centre GPU",
            "CUDA ends with error 804: forward compatibility is for data-centre GPUs",
            **take_out,
        )
    return fine(f"forward compatibility: libcuda {found} on driver {gpus.driver}")


def memory(box: Box) -> Finding:
    """Whether somebody else fills the GPUs."""
    cards = [card for card in box.gpus.cards if card.total]
    if not cards:
        return unavailable("no GPU")
    full = [card for card in cards if card.used > max(0.1 * card.total, 2 << 30)]
    if full:
        return warn(
            some(f"GPU {card.index}: {size(card.used)} of {size(card.total)} are taken" for card in full),
            "another process holds memory there, or the display does",
            host="nvidia-smi shows who; CUDA_VISIBLE_DEVICES=… chooses other GPUs",
            slurm="#SBATCH --exclusive, or ask for GPUs with --gpus-per-node",
        )
    return fine(f"GPU memory is free ({size(cards[0].total)} each)")


def peer(box: Box) -> Finding:
    """Whether the GPUs reach each other's memory."""
    if len(box.gpus.cards) < 2:
        return unavailable("fewer than two GPUs")
    if box.gpus.peers:
        pairs = some(f"{one} and {other} ({why})" for one, other, why in box.gpus.peers)
        return warn(
            f"GPUs without access to each other: {pairs}",
            "NCCL copies through the host's memory, and /dev/shm, which is slower",
            host="nvidia-smi topo -p2p r; disable ACS in the BIOS, or choose GPUs of one switch",
            docker="docker run --shm-size=1g …   (NCCL needs it then)",
        )
    return fine("every pair of GPUs has access to each other")


CHECKS = (
    ("gpu.nvml", nvml),
    ("gpu.visible", visible),
    ("gpu.lost", lost),
    ("gpu.driver", driver),
    ("gpu.architecture", architecture),
    ("gpu.compat", compat),
    ("gpu.memory", memory),
    ("gpu.peer", peer),
)
