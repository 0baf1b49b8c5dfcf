"""GPUs: the driver, the cards, and whether the installed stack supports them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.commands.doctor.facts import (
    Card,
    CheckResult,
    Gpus,
    MachineFacts,
    bad,
    fine,
    some,
    unavailable,
    variable,
    warning,
)
from trainer.config.sizes import GIB
from trainer.host.nvml import Nvml
from trainer.host.reading import kind_of, text_of
from trainer.host.stacks import numbers, read_stacks, stack_fitting
from trainer.observe.text import rough_size

# NVML's numbers (nvml.h, nvmlReturn_t).
_NO_PERMISSION, _NOT_LOADED, _NO_LIBRARY, _LOST, _MISMATCH = 4, 9, 12, 15, 18
_NOT_OURS = {2, 3, _NO_PERMISSION, 6}  # invalid, not supported, not found
# Brands whose cards forward compatibility refuses: GeForce and Titan, with and without RTX.
_CONSUMER = {5, 6, 15, 16}


def read_gpus(module: Any, root: Path, environ: Mapping[str, str]) -> Gpus:
    """Reads GPUs from NVML, and from the driver's files without it.

    Args:
        module: The pynvml module, or a stand-in.
        root: Folder that stands for "/".
        environ: Environment variables: CUDA_VISIBLE_DEVICES and LD_LIBRARY_PATH.
    """
    kernel = re.search(r"Module.*?\s(\d+\.\d+[.\d]*)", text_of(root / "proc/driver/nvidia/version"))
    seen = Gpus(
        kernel=kernel[1] if kernel else "",
        nodes=bool(kind_of(root / "dev/nvidiactl")),
        compat=_compat(root, environ),
    )
    with Nvml(environ, module=module) as nvml:
        if nvml.problem:
            return replace(seen, problem=nvml.problem.text, code=nvml.problem.code)
        cards = [_card(nvml, gpu, place) for place, gpu in enumerate(nvml.gpus)]
        words = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        for number in range(nvml.ask("nvmlDeviceGetCount") or 0):
            meant = "CUDA_VISIBLE_DEVICES" not in environ or str(number) in words
            _, refusal = nvml.asked("nvmlDeviceGetHandleByIndex", number)
            # Those of other jobs are counted, too, but may not be asked.
            if meant and refusal and refusal.code not in _NOT_OURS:
                cards.append(Card(number, f"GPU {number}", lost=refusal.text))
        driver = nvml.ask("nvmlSystemGetDriverVersion") or ""
        return replace(seen, driver=driver, cards=tuple(cards), wrong=nvml.wrong)


def _card(nvml: Nvml, gpu: Any, place: int) -> Card:
    capability = nvml.ask("nvmlDeviceGetCudaComputeCapability", gpu)
    memory, refusal = nvml.asked("nvmlDeviceGetMemoryInfo", gpu)
    index = nvml.ask("nvmlDeviceGetIndex", gpu)
    return Card(
        index=place if index is None else index,
        name=nvml.ask("nvmlDeviceGetName", gpu) or "",
        architecture=f"sm_{capability[0]}{capability[1]}" if capability else "",
        total=0 if memory is None else memory.total,
        used=0 if memory is None else memory.used,
        data_center=nvml.ask("nvmlDeviceGetBrand", gpu) not in _CONSUMER,
        lost=refusal.text if refusal and refusal.code in (_LOST, 16) else "",  # 16: it wants a reset
    )


def _compat(root: Path, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns versions of libcuda in folders named compat that the dynamic loader searches first."""
    folders = [folder for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if "compat" in folder]
    for file in sorted((root / "etc/ld.so.conf.d").glob("*.conf")):
        folders += [line.strip() for line in text_of(file).splitlines() if "compat" in line]
    found = dict[str, None]()
    for folder in folders:
        for file in sorted((root / folder.lstrip("/")).glob("libcuda.so.*.*")):
            found[file.name.removeprefix("libcuda.so.")] = None
    return tuple(found)


def nvml(box: MachineFacts) -> CheckResult:  # noqa: PLR0911
    """Checks whether NVIDIA's driver answers."""
    gpus = box.gpus
    if not gpus.problem:
        return fine(f"driver {gpus.driver}, {len(gpus.cards)} GPUs to use")
    if gpus.code == _MISMATCH:
        return bad(
            f"NVML: {gpus.problem}",
            "the driver was updated under its loaded kernel module, or a container has another one's library",
            host="on the host: sudo reboot   (or reload the module nvidia); then restart the containers",
        )
    if gpus.code == _NO_PERMISSION:
        return bad(
            f"NVML: {gpus.problem}",
            "/dev/nvidia* isn't this user's to open",
            container='docker run --group-add "$(stat -c %g /dev/nvidiactl)" …',
            host="ls -l /dev/nvidia*; add this user to the group that owns them",
        )
    if gpus.nodes and gpus.code == _NO_LIBRARY:
        return bad(
            "the GPU's device files are here, but not NVML's library (libnvidia-ml.so.1)",
            "the container was given the driver without the part that tools need",
            **variable("NVIDIA_DRIVER_CAPABILITIES", "compute,utility"),
        )
    if gpus.code in (_NO_LIBRARY, _NOT_LOADED) and not gpus.kernel:
        return unavailable("no NVIDIA driver here: it trains on the CPU")
    if gpus.kernel and gpus.code == _NO_LIBRARY:
        return warning(
            f"the host has NVIDIA's driver {gpus.kernel}, but no GPU reaches this container",
            "it was started without GPUs: it trains on the CPU",
            kubernetes="resources: {limits: {nvidia.com/gpu: 1}}",
            slurm="#SBATCH --gpus-per-node=1   (Apptainer: apptainer exec --nv …)",
            host="docker run --gpus all …   (Compose: docker compose -f … -f scripts/compose/gpu.yml)",
        )
    return bad(
        f"NVML: {gpus.problem}",
        "a container loses its GPUs when systemd reloads while it runs; else a GPU or the driver failed",
        container="docker restart CONTAINER; against it docker run --device=/dev/nvidiactl "
        '--device=/dev/nvidia0 …, or "exec-opts": ["native.cgroupdriver=cgroupfs"] in daemon.json',
        kubernetes="kubectl delete pod NAME   (its controller starts it again)",
        host="sudo dmesg | grep -i -e xid -e nvrm   (of a cluster's node: tell the administrator)",
    )


def visible(box: MachineFacts) -> CheckResult:
    """Checks whether CUDA_VISIBLE_DEVICES names existing GPUs."""
    words = box.environ.get("CUDA_VISIBLE_DEVICES")
    if box.gpus.problem:
        return unavailable("no GPU can be asked for")
    if box.gpus.wrong:
        return bad(
            f"CUDA_VISIBLE_DEVICES={words}: {box.gpus.wrong} is none of the GPUs here",
            "CUDA sees no GPU from the first wrong word on",
            slurm="leave CUDA_VISIBLE_DEVICES alone: Slurm sets it for the GPUs of the job",
            host="unset CUDA_VISIBLE_DEVICES   (nvidia-smi -L lists what there is)",
        )
    if words is not None and not words.strip():
        return warning(
            "CUDA_VISIBLE_DEVICES is empty", "it hides every GPU", host="unset CUDA_VISIBLE_DEVICES"
        )
    return fine("every GPU may be used" if words is None else f"CUDA_VISIBLE_DEVICES={words}")


def lost(box: MachineFacts) -> CheckResult:
    """Checks whether every GPU answers."""
    if not box.gpus.cards:
        return unavailable("no GPU")
    if gone := [card for card in box.gpus.cards if card.lost]:
        return bad(
            some(f"{card.name}: {card.lost}" for card in gone),
            "the GPU fell off the bus or wants a reset; runs on it hang or fail",
            kubernetes="kubectl cordon NODE and reset the GPU there",
            slurm="sbatch --exclude=NODE …, and tell the administrator",
            host="sudo nvidia-smi --gpu-reset -i INDEX, or reboot; sudo dmesg | grep -i xid says why",
        )
    return fine("every GPU answers")


def driver(box: MachineFacts) -> CheckResult:
    """Compares the driver with the minimum of the installed stack; names the stack that would fit."""
    gpus, stacks = box.gpus, read_stacks()
    if not gpus.driver:
        return unavailable("no driver answers")
    stack = box.software.stack()
    if stack is None:  # a torch of the user's own: what its CUDA needs is in the table as well
        same = [one for one in stacks.values() if numbers(one.cuda)[:1] == numbers(box.software.cuda)[:1]]
        if not same:
            return unavailable(f"torch {box.software.torch} is of no stack that is known here")
        stack = same[0]
    if numbers(gpus.driver) < numbers(stack.floor):
        best = _best(gpus)
        finding = f"driver {gpus.driver} is older than {stack.floor}, which CUDA {stack.cuda} needs"
        if not best:
            update = f"update the driver to {stack.floor} at least"
            return bad(finding, "CUDA won't start, and no other stack fits this driver and GPU", host=update)
        return bad(
            finding, f"CUDA won't start; the stack {best} fits, or a newer driver", **_with_stack(best)
        )
    if numbers(gpus.driver) < numbers(stack.native):
        return fine(
            f"driver {gpus.driver} runs CUDA {stack.cuda}, without JIT of PTX (from {stack.native} on)"
        )
    return fine(f"driver {gpus.driver} runs CUDA {stack.cuda}")


def _best(gpus: Gpus) -> str:
    """Returns the newest stack for a driver and GPUs; "" if none fits."""
    architectures = {card.architecture for card in gpus.cards if card.architecture}
    return stack_fitting(gpus.driver, architectures, read_stacks())


def _with_stack(name: str) -> dict[str, str]:
    return {
        "container": f"docker run --gpus all trainer:{name}-train …",
        "kubernetes": f"image: REGISTRY/trainer:{name}-train",
        "slurm": f"srun --container-image=REGISTRY/trainer:{name}-train …   (Pyxis)",
        "host": f"make train STACK={name}",
    }


def architecture(box: MachineFacts) -> CheckResult:
    """Checks whether the installed torch has code for every GPU."""
    cards = [card for card in box.gpus.cards if card.architecture]
    if not cards:
        return unavailable("no GPU")
    stack = box.software.stack()
    if stack is None:
        return unavailable(f"torch {box.software.torch} is of no stack that is known here")
    if without := [card for card in cards if not stack.covers(card.architecture)]:
        best = _best(box.gpus)
        others = {"host": "CUDA_VISIBLE_DEVICES=… trainer train …   (the numbers of other GPUs, if any)"}
        return bad(
            f"{some(f'{card.name} ({card.architecture})' for card in without)}: torch {stack.torch} has code "
            f"for {', '.join(stack.architectures)}",
            'it ends with "no kernel image is available for execution on the device"; '
            + (f"the stack {best} fits" if best else "no stack fits"),
            **(_with_stack(best) if best else others),
        )
    return fine(f"torch has code for {', '.join(sorted({card.architecture for card in cards}))}")


def compat(box: MachineFacts) -> CheckResult:
    """State of forward compatibility (cuda-compat)."""
    gpus = box.gpus
    if not gpus.driver:
        return unavailable("no driver answers")
    if not gpus.compat:
        return fine("forward compatibility isn't used: the driver's own libcuda is")
    found = gpus.compat[0]
    remedies = {
        "container": "docker run -e LD_LIBRARY_PATH= …   (an image with its cuda-compat package removed)",
        "host": "take …/compat out of LD_LIBRARY_PATH and of /etc/ld.so.conf.d, then ldconfig",
    }
    if numbers(found) < numbers(gpus.driver):
        return bad(
            f"libcuda {found} of cuda-compat comes before the driver's own, which is newer ({gpus.driver})",
            "CUDA ends with error 803: a user-mode driver must not be older than the kernel's",
            **remedies,
        )
    consumer = [card for card in gpus.cards if not card.data_center]
    if consumer and numbers(found)[:1] > numbers(gpus.driver)[:1]:
        return bad(
            f"libcuda {found} of cuda-compat comes first, and {consumer[0].name} is no data-center GPU",
            "CUDA ends with error 804: forward compatibility is for data-center GPUs",
            **remedies,
        )
    return fine(f"forward compatibility: libcuda {found} on driver {gpus.driver}")


def memory(box: MachineFacts) -> CheckResult:
    """Checks whether other processes fill the GPUs."""
    cards = [card for card in box.gpus.cards if card.total]
    if not cards:  # a GB10 or Jetson has no memory of its own to tell
        return unavailable("NVML says nothing of the GPU's memory" if box.gpus.cards else "no GPU")
    if full := [card for card in cards if card.used > max(0.1 * card.total, 2 * GIB)]:
        taken = (
            f"GPU {one.index}: {rough_size(one.used)} of {rough_size(one.total)} are taken" for one in full
        )
        return warning(
            some(taken),
            "another process holds memory there, or the display does",
            slurm="#SBATCH --exclusive, or ask for GPUs with --gpus-per-node",
            host="nvidia-smi shows who; CUDA_VISIBLE_DEVICES=… chooses other GPUs",
        )
    return fine(f"GPU memory is free ({rough_size(cards[0].total)} each)")


GPU_CHECKS = (
    ("gpu.nvml", nvml),
    ("gpu.visible", visible),
    ("gpu.lost", lost),
    ("gpu.driver", driver),
    ("gpu.architecture", architecture),
    ("gpu.compat", compat),
    ("gpu.memory", memory),
)
