"""What a run was: configuration, code, environment, data and outcome, for the run folder's manifest.json."""

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.config.recipe import Recipe
from trainer.config.redact import redact, redact_words
from trainer.config.section import config_hash
from trainer.data.sampling.plan import Plan
from trainer.distributed.parallel import World
from trainer.host.nvml import driver_version
from trainer.host.stamp import read_stamp
from trainer.launch.nodes.discover import job_of
from trainer.train.resume import FORMAT, Attempt, Stored, differences
from trainer.version import __version__

# Of the launcher, for its ranks: what the user typed.
COMMAND_VARIABLE = "TRAINER_COMMAND"
# From whoever starts the container: inside nothing tells.
IMAGE_VARIABLE = "TRAINER_IMAGE_DIGEST"


def make_manifest(
    recipe: Recipe,
    name: str,
    world: World,
    plan: Plan,
    threads: int,
    data: Mapping[str, Any],
    fingerprint: Mapping[str, str],
    notes: Sequence[str],
    step: int = 0,
    stored: Stored | None = None,
) -> dict[str, Any]:
    """What this run is, for people and for machines.

    Args:
        recipe: The configuration.
        name: Of the recipe.
        world: The ranks.
        plan: Its order.
        threads: Intra-op threads of each rank.
        data: From the task, for those who use the weights.
        fingerprint: From `trainer.train.run.data_of`.
        notes: Lines for people.
        step: Steps done before this attempt.
        stored: What the earlier attempts left, or None.
    """
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    commit, dirty = _commit()
    config = recipe.model_dump(mode="json")
    # By --resume force alone: what trained the steps before is not what this manifest says.
    changed = differences(stored.config, redact(config)) if stored else []
    for what, before in (stored.fingerprint if stored else {}).items():
        if before != fingerprint.get(what):
            changed.append(f"{what}: {before}, now {fingerprint.get(what)}")
    attempt = Attempt(
        started=now,
        step=step,
        ranks=world.size,
        threads=threads,
        log_every=recipe.log.every,
        changed=changed,
        config_hash=config_hash(recipe),
        jsonl="jsonl" in recipe.log.to,
        checksums=recipe.log.fingerprints,
        job=job_of(os.environ),
    )
    attempts = [*(stored.attempts if stored else []), attempt]
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "recipe": name,
        "run_id": (stored.run_id if stored else "") or uuid.uuid4().hex,
        "config": config,
        "config_hash": config_hash(recipe),
        "seed": recipe.seed,
        "command": command(os.environ, sys.argv),
        "started": attempts[0].started,
        "ended": None,
        "restarts": len(attempts) - 1,
        "attempts": [one.model_dump() for one in attempts],
        "commit": commit,
        "dirty": dirty,
        "lock": lock_hash(Path(sys.prefix)),
        "image": os.environ.get(IMAGE_VARIABLE) or None,
        "versions": _versions(world.device),
        "device": _device(world.device),
        "data": data,
        "fingerprint": dict(fingerprint),
        "host": platform.node(),
        "pid": os.getpid(),
        "world_size": world.size,
        "threads": threads,
        "steps": plan.steps,
        "gradient_accumulation_steps": plan.micro_batches // world.size,
        "notes": notes,
        "weights": {},
        "anomalies": 0,
        "status": "running",
    }
    redacted: dict[str, Any] = redact(manifest)
    return redacted


def outcome(folder: Path) -> dict[str, Any]:
    """What the manifest says when an attempt is over: when, and the number of anomalies."""
    try:
        anomalies = len((folder / "anomalies.jsonl").read_bytes().splitlines())
    except OSError:
        anomalies = 0
    return {"ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "anomalies": anomalies}


def file_hash(file: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while chunk := content.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def command(environ: Mapping[str, str], argv: Sequence[str]) -> str:
    """What the user typed, without secrets: of the launcher, or a rank's own under a plain torchrun."""
    return environ.get(COMMAND_VARIABLE) or shlex.join(redact_words(["trainer", *argv[1:]]))


def lock_hash(prefix: Path) -> str | None:
    """SHA-256 of the wheels.lock that an environment was installed from; None where nobody knows."""
    stamp = read_stamp(prefix)
    return None if stamp.changing else stamp.lock


def _versions(device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    nccl = torch.cuda.nccl.version() if cuda and torch.distributed.is_nccl_available() else None
    return {
        "trainer": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": _installed("torchvision"),
        "numpy": np.__version__,
        "pillow": _installed("pillow"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "driver": driver_version(),
    }


def _installed(name: str) -> str | None:
    """The version of a package, which isn't imported for that: torchvision takes seconds."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _device(device: torch.device) -> dict[str, Any]:
    """The device of the ranks; `gpus` are those of rank 0's host that the job may use."""
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    on_gpu = device.type == "cuda"
    return {
        "kind": device.type,
        "name": gpus[device.index or 0] if on_gpu else platform.processor() or platform.machine(),
        "gpus": gpus if on_gpu else [],
        "cpu": _cpu(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _cpu() -> str | None:
    """The processor's name, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None)


def _commit() -> tuple[str | None, bool | None]:
    """Commit of the code that runs, with "+" for uncommitted changes, and whether there are; else None."""
    git = ["git", "-C", str(Path(__file__).parents[1])]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None, None
    dirty = bool(changed.stdout.strip())
    return commit.stdout.strip() + "+" * dirty, dirty
