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
    warning,
)
from trainer.host.nvml import Nvml
from trainer.host.reading import kind_of, text_of
from trainer.host.stacks import numbers, read_stacks, stack_fitting

# NVML's numbers (nvml.h, nvmlReturn_t).
_NO_PERMISSION, _NOT_LOADED, _NO_LIBRARY, _LOST, _RESET, _MISMATCH = 4, 9, 12, 15, 16, 18
_NOT_OURS = {2, 3, _NO_PERMISSION, 6}  # invalid, not supported, not found
# GKE's device plugin mounts the node's driver there, and no loader's cache names it.
_GKE = "/usr/local/nvidia/lib64"


def read_gpus(module: Any, root: Path, environ: Mapping[str, str]) -> Gpus:
    """Reads GPUs from NVML, and from the driver's files without it.

    Args:
        module: The pynvml module, or a stand-in.
        root: Folder that stands for "/".
        environ: Environment variables: CUDA_VISIBLE_DEVICES.
    """
    kernel = re.search(r"Module.*?\s(\d+\.\d+[.\d]*)", text_of(root / "proc/driver/nvidia/version"))
    unsearched = kind_of(root / _GKE.lstrip("/") / "libnvidia-ml.so.1")
    seen = Gpus(
        kernel=kernel[1] if kernel else "",
        nodes=bool(kind_of(root / "dev/nvidiactl")),
        unsearched=_GKE if unsearched else "",
    )
    with Nvml(environ, module=module) as nvml:
        if nvml.problem:
            return replace(seen, problem=nvml.problem.text, code=nvml.problem.code)
        cards = [_card(nvml, gpu) for gpu in nvml.gpus]
        words = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        for number in range(nvml.ask("nvmlDeviceGetCount") or 0):
            meant = "CUDA_VISIBLE_DEVICES" not in environ or str(number) in words
            _, refusal = nvml.asked("nvmlDeviceGetHandleByIndex", number)
            # Those of other jobs are counted, too, but may not be asked.
            if meant and refusal and refusal.code not in _NOT_OURS:
                cards.append(Card(f"GPU {number}", lost=refusal.text))
        driver = nvml.ask("nvmlSystemGetDriverVersion") or ""
        return replace(seen, driver=driver, cards=tuple(cards), wrong=nvml.wrong)


def _card(nvml: Nvml, gpu: Any) -> Card:
    capability = nvml.ask("nvmlDeviceGetCudaComputeCapability", gpu)
    _, refusal = nvml.asked("nvmlDeviceGetMemoryInfo", gpu)
    return Card(
        name=nvml.ask("nvmlDeviceGetName", gpu) or "",
        architecture=f"sm_{capability[0]}{capability[1]}" if capability else "",
        lost=refusal.text if refusal and refusal.code in (_LOST, _RESET) else "",
    )


def nvml(box: MachineFacts) -> CheckResult:
    """Checks whether NVIDIA's driver and every GPU answer."""
    gpus = box.gpus
    if gpus.problem:
        return _no_nvml(gpus, box.environ)
    if gone := [card for card in gpus.cards if card.lost]:
        return bad(
            some(f"{card.name}: {card.lost}" for card in gone),
            "the GPU fell off the bus or wants a reset; runs on it hang or fail",
            "sudo nvidia-smi --gpu-reset on the host, or reboot it; sudo dmesg | grep -i xid says why",
        )
    return fine(f"driver {gpus.driver}, {len(gpus.cards)} GPUs to use")


def _no_nvml(gpus: Gpus, environ: Mapping[str, str]) -> CheckResult:  # noqa: PLR0911
    if gpus.code == _MISMATCH:
        return bad(
            f"NVML: {gpus.problem}",
            "the driver was updated under its loaded kernel module, or a container has another one's library",
            "sudo reboot   (the host, or reload its module nvidia; then restart the containers)",
        )
    if gpus.code == _NO_PERMISSION:
        return bad(
            f"NVML: {gpus.problem}",
            "/dev/nvidia* isn't this user's to open",
            'docker run --group-add "$(stat -c %g /dev/nvidiactl)" …   (or add this user to that group)',
        )
    searched = environ.get("LD_LIBRARY_PATH", "")
    if gpus.code == _NO_LIBRARY and gpus.unsearched and gpus.unsearched not in searched.split(":"):
        value = f"{gpus.unsearched}:$LD_LIBRARY_PATH" if searched else gpus.unsearched
        return bad(
            f"NVML's library is in {gpus.unsearched}, which isn't searched",
            "GKE mounts the driver there and leaves it to the image to search it: it trains on the CPU",
            f"export LD_LIBRARY_PATH={value}   (in a pod: env: of the container)",
        )
    if gpus.code == _NO_LIBRARY and gpus.nodes:
        given = environ.get("NVIDIA_DRIVER_CAPABILITIES", "").split(",")
        return bad(
            "the GPU's device files are here, but not NVML's library (libnvidia-ml.so.1)",
            "the container was given the devices without the driver's libraries, or without those of tools",
            "docker run --gpus all …   (not --device=/dev/nvidia0: NVIDIA's container toolkit adds them)"
            if {"all", "utility"} & set(given)
            else "docker run -e NVIDIA_DRIVER_CAPABILITIES=compute,utility …",
        )
    if gpus.code == _NO_LIBRARY and gpus.kernel:
        return warning(
            f"the host has NVIDIA's driver {gpus.kernel}, but no GPU reaches this container",
            "it was started without GPUs: it trains on the CPU",
            "docker run --gpus all …   (Compose: -f scripts/compose/gpu.yml; a pod: nvidia.com/gpu: 1; "
            "Slurm: --gpus-per-node=1; Apptainer: --nv)",
        )
    if gpus.code in (_NO_LIBRARY, _NOT_LOADED):
        return unavailable("no NVIDIA driver here: it trains on the CPU")
    return bad(
        f"NVML: {gpus.problem}",
        "a container loses its GPUs when systemd reloads while it runs; else a GPU or the driver failed",
        "docker restart CONTAINER   (or delete the pod; sudo dmesg | grep -i -e xid -e nvrm says more)",
    )


def visible(box: MachineFacts) -> CheckResult:
    """Checks whether CUDA_VISIBLE_DEVICES names existing GPUs."""
    words = box.environ.get("CUDA_VISIBLE_DEVICES")
    unset = "unset CUDA_VISIBLE_DEVICES   (nvidia-smi -L lists what there is; in a job Slurm sets it)"
    if box.gpus.problem:
        return unavailable("no GPU can be asked for")
    if box.gpus.wrong:
        return bad(
            f"CUDA_VISIBLE_DEVICES={words}: {box.gpus.wrong} is none of the GPUs here",
            "CUDA sees no GPU from the first wrong word on",
            unset,
        )
    if words is not None and not words.strip():
        return warning("CUDA_VISIBLE_DEVICES is empty", "it hides every GPU", unset)
    return fine("every GPU may be used" if words is None else f"CUDA_VISIBLE_DEVICES={words}")


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
            return bad(finding, "CUDA won't start, and no other stack fits this driver and GPU", update)
        return bad(finding, f"CUDA won't start; the stack {best} fits, or a newer driver", _with_stack(best))
    if numbers(gpus.driver) < numbers(stack.native):
        return fine(
            f"driver {gpus.driver} runs CUDA {stack.cuda}, without JIT of PTX (from {stack.native} on)"
        )
    return fine(f"driver {gpus.driver} runs CUDA {stack.cuda}")


def _best(gpus: Gpus) -> str:
    """Returns the newest stack for a driver and GPUs; "" if none fits."""
    architectures = {card.architecture for card in gpus.cards if card.architecture}
    return stack_fitting(gpus.driver, architectures, read_stacks())


def _with_stack(name: str) -> str:
    return f"make train STACK={name}   (an image: trainer:{name}-train)"


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
        return bad(
            f"{some(f'{card.name} ({card.architecture})' for card in without)}: torch {stack.torch} has code "
            f"for {', '.join(stack.architectures)}",
            'it ends with "no kernel image is available for execution on the device"; '
            + (f"the stack {best} fits" if best else "no stack fits"),
            _with_stack(best)
            if best
            else "CUDA_VISIBLE_DEVICES=… trainer train …   (the numbers of other GPUs)",
        )
    return fine(f"torch has code for {', '.join(sorted({card.architecture for card in cards}))}")


GPU_CHECKS = (
    ("gpu.nvml", nvml),
    ("gpu.visible", visible),
    ("gpu.driver", driver),
    ("gpu.architecture", architecture),
)
