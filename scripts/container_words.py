"""The words that run an image as this user, on this folder, with some of the host's GPUs."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from engine_checks import (
    ROOT,
    image_digest,
    is_rootless,
)

from trainer.host.engine import run_words
from trainer.host.environment import IMAGE_DIGEST
from trainer.host.gpus import Gpu, host_gpus, visible_gpus


def gpus_here() -> tuple[list[Gpu], list[str]]:
    """The host's GPUs, and what CUDA_VISIBLE_DEVICES leaves, as words that CUDA and the engine both take."""
    gpus = host_gpus() or []
    visible, _ = visible_gpus([gpu.uuid for gpu in gpus], os.environ.get("CUDA_VISIBLE_DEVICES"))
    return gpus, visible


def gpu_words(gpus: Sequence[Gpu], chosen: Sequence[str], order: str) -> list[str]:
    """The options of `docker run` that give a container these GPUs and no other.

    Args:
        gpus: The host's.
        chosen: Those to give.
        order: CUDA_DEVICE_ORDER.
    """
    if not chosen:
        return []
    if len(chosen) == len(gpus) and list(chosen) == [gpu.index for gpu in gpus]:
        return ["--gpus", "all"]
    if (
        len({gpu.name for gpu in gpus}) > 1
        and order != "PCI_BUS_ID"
        and any(one.isdecimal() for one in chosen)
    ):
        # CUDA numbers GPUs of several kinds by speed, the engine by the bus: let CUDA choose.
        return ["--gpus", "all", "--env", f"CUDA_VISIBLE_DEVICES={','.join(chosen)}"]
    return ["--gpus", f'"device={",".join(chosen)}"']


def docker_words(
    image: str, gpus: Sequence[str], data: str = "", *, rootless: bool, digest: str = ""
) -> list[str]:
    """`docker run` as this user, on this folder, with no capability that isn't needed."""
    user, group, tty = os.getuid(), os.getgid(), sys.stdin.isatty() and sys.stdout.isatty()
    # Under a rootless engine the container's root is this user. Where root calls, the checkout may be
    # somebody else's: the entrypoint becomes that user, and needs the capabilities for it.
    as_root = rootless or user == 0
    # A cache for each user: compiled code in it is run.
    mounts = [(str(ROOT), "/workspace", True), (f"trainer-cache-{user}", "/cache", True)]
    mounts += [(data, data, False)] if data else []
    variables = {"PYTHONPATH": "/workspace", **({IMAGE_DIGEST: digest} if digest else {})}
    words = run_words("0:0" if as_root else f"{user}:{group}", 2, 40, mounts, variables)
    # By these the user may read what a group shares. A rootless engine doesn't know the host's.
    shares = [] if as_root else sorted(set(os.getgroups()) - {0, group})
    words += [f"--group-add={one}" for one in shares]
    words += ["--cap-add=SETUID", "--cap-add=SETGID", "--cap-add=KILL"] if as_root else []
    return [*words, "--rm", *(["--interactive", "--tty"] if tty else []), *gpus, image]


def container_words(image: str, gpus: Sequence[Gpu], chosen: Sequence[str], data: str) -> list[str]:
    """`docker run` of an image here, with some of the host's GPUs and a folder (or "") to show."""
    words = gpu_words(gpus, chosen, os.environ.get("CUDA_DEVICE_ORDER", ""))
    data = data and str(Path(data).resolve())
    return docker_words(image, words, data, rootless=is_rootless(), digest=image_digest(image))


def say(line: str) -> None:
    """Tells what was chosen, before what runs says anything."""
    print(f"runtime: {line}", flush=True)


def show(words: Sequence[str]) -> None:
    """Prints a command as one would type it."""
    print(" ".join(shlex.quote(word) for word in words), flush=True)
