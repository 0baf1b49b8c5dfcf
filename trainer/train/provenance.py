"""Manifest of a run: its configuration, code, environment and data."""

import os
import platform
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

from trainer.config.section import hash_of
from trainer.host.environment import IMAGE_DIGEST
from trainer.host.files import hash_of_rest
from trainer.host.kernel import processor
from trainer.host.nvml import driver_version
from trainer.host.stacks import lock_hash, read_stacks, stack_of, unsupported
from trainer.host.startup import waiting
from trainer.launch.nodes import job_of
from trainer.runs.differences import differences, extends, hidden, other_arithmetic, other_data
from trainer.runs.manifest import Attempt, BegunFrom, Device, Manifest, Pretrained
from trainer.train.components.task import described_data, identity_of_task, task_changes
from trainer.train.state import Run
from trainer.version import ARITHMETIC, __version__


def make_manifest(
    run: Run,
    name: str,
    command: str,
    fingerprint: Mapping[str, str],
    notes: Sequence[str],
    stored: Manifest | None = None,
    begun_from: BegunFrom | None = None,
    pretrained: Pretrained | None = None,
) -> Manifest:
    """Makes the manifest of a run with the attempt that begins now.

    Args:
        run: The run, with its checkpoint loaded.
        name: Name of the recipe.
        command: The command as it was typed, without secrets.
        fingerprint: Fingerprints of the data, from `trainer.train.components.task.data_of`.
        notes: Lines for the user.
        stored: The manifest of earlier attempts, or None.
        begun_from: Checkpoint of another run that a new run begins from, or None.
        pretrained: Source and hash of the pretrained weights, or None.
    """
    recipe, world, threads = run.recipe, run.world, torch.get_num_threads()
    commit, dirty = _commit()
    config = recipe.model_dump(mode="json")
    kept, hashes = hidden(config, stored)
    # Only by --resume force: earlier steps were trained with other values than this manifest has.
    changed = []
    if stored is not None:
        changed = [
            *differences(stored.config, config, stored.redacted),
            *task_changes(stored, run.task),
            *other_data(stored, fingerprint),
            *other_arithmetic(stored.arithmetic),
        ]
    attempt = Attempt(
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        step=run.state.step,
        ranks=world.size,
        threads=threads,
        log_every=recipe.log.every,
        changed=changed,
        extends=stored is not None and bool(run.state.step) and extends(stored, config),
        config_hash=hash_of(kept),
        jsonl="jsonl" in recipe.log.to,
        checksums=recipe.log.fingerprints,
        arithmetic=ARITHMETIC,
        job=job_of(os.environ),
    )
    attempts = [*(stored.attempts if stored else []), attempt]
    run_id = stored.run_id if stored else uuid.uuid4().hex
    return Manifest(
        recipe=name,
        run_id=run_id,
        begun_from=stored.begun_from if stored else begun_from,
        config=kept,
        redacted=hashes,
        config_hash=hash_of(kept),
        seed=recipe.seed,
        command=command,
        started=attempts[0].started,
        restarts=len(attempts) - 1,
        attempts=attempts,
        commit=commit,
        dirty=dirty,
        lock=lock_hash(Path(sys.prefix)),
        image=os.environ.get(IMAGE_DIGEST) or None,
        versions=_versions(world.device),
        first_arithmetic=attempts[0].arithmetic,
        device=_device(world.device),
        data=described_data(run.task),
        fingerprint=dict(fingerprint),
        identity=identity_of_task(run.task),
        pretrained=pretrained,
        host=platform.node(),
        pid=os.getpid(),
        world_size=world.size,
        threads=threads,
        waiting=waiting(os.environ),
        parameters={
            "all": sum(p.numel() for p in run.state.model.parameters()),
            "trained": sum(p.numel() for p in run.gradients.parameters),
        },
        metric=run.task.metric,
        lower_is_better=run.task.lower_is_better,
        planned_steps=run.steps,
        gradient_accumulation_steps=run.gradient_accumulation_steps,
        notes=[*_support(lock_hash(Path(sys.prefix))), *notes],
        trackers=dict(stored.trackers) if stored else {},
        weights={},
        status="running",
    )


def file_hash(file: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with file.open("rb") as content:
        return hash_of_rest(content)


def _support(lock: str | None) -> list[str]:
    stack = stack_of(lock or "", torch.__version__, torch.version.cuda or "", read_stacks())
    ended = unsupported(stack) if stack else ""
    return [ended] if ended else []


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
    """Returns the version of a package without importing it (torchvision takes seconds); None if missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _device(device: torch.device) -> Device:
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    on_gpu = device.type == "cuda"
    return Device(
        kind="cuda" if on_gpu else "cpu",
        name=gpus[device.index or 0] if on_gpu else platform.processor() or platform.machine(),
        gpus=gpus if on_gpu else [],
        cpu=processor(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
    )


def _commit() -> tuple[str | None, bool | None]:
    """Returns the commit of this code, with "+" for uncommitted changes, and True if there are; else None."""
    try:
        # A project whose folder holds the environment with this package has another repository around it.
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        commit, dirty = _git("rev-parse", "HEAD"), bool(_git("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return commit + "+" * dirty, dirty


def _git(*words: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
