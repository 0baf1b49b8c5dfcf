"""Starts processes for variants, and reads the results that they write."""

import contextlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL
from types import MappingProxyType

import numpy as np
import torch

from trainer.commands.check.compare import as_float64
from trainer.commands.check.plain import StepTensors
from trainer.commands.check.training import Subject, Training
from trainer.commands.check.variants import Trained, Variant, VariantLaunch
from trainer.errors import EXIT_BAD_INPUT
from trainer.host.files import write_whole
from trainer.launch.launcher import launch
from trainer.train.start.local_ranks import plan_local_ranks

_RANK = "trainer.commands.check.rank"
_GRACE_SECONDS = 5.0


def launched(
    ranks: int, module: str = _RANK, more: Mapping[str, str] = MappingProxyType({})
) -> VariantLaunch:
    """Starts processes that train variants on so many ranks, one after another, with another hash seed.

    Args:
        ranks: Number of processes.
        module: Their module.
        more: Further entries of their request.
    """

    def train(subject: Subject, variants: Sequence[Variant], folder: Path) -> dict[str, Trained]:
        request = {
            "name": subject.name,
            "recipe": subject.recipe.model_dump(mode="json"),
            "double": subject.double,
            "variants": [
                {"name": one.name, "edits": dict(one.edits), "stop_after": one.stop_after} for one in variants
            ],
            "folder": str(folder),
            **more,
        }
        local = plan_local_ranks(subject.recipe, None, ranks)
        seed = "1" if os.environ.get("PYTHONHASHSEED", "0") != "1" else "2"
        local = local._replace(environment={**local.environment, "PYTHONHASHSEED": seed})
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            code, _ = launch(module, request, local, grace_seconds=_GRACE_SECONDS, output=DEVNULL)
        ended = " ".join(errors.getvalue().split())[:300] or "its process left nothing"
        if code != EXIT_BAD_INPUT:  # a refusal is no crash
            ended = f"crash: {ended}"
        return {variant.name: _taken(folder, variant.name, ended) for variant in variants}

    return train


def leave(folder: Path, name: str, found: Trained) -> None:
    """Writes the result of a variant, for another process to read."""
    if isinstance(found, str):
        write_whole(folder / f"{name}.txt", found)
        return
    steps = enumerate(found.steps)
    arrays = {f"{step}/{key}": as_float64(t) for step, seen in steps for key, t in seen.items()}
    did = {f"did {key}": np.array(value) for key, value in found.did.items()}
    with (folder / f"{name}.npz").open("wb") as file:
        np.savez(file, count=np.array(len(found.steps)), **did, **arrays)  # type: ignore[arg-type]


def _taken(folder: Path, name: str, ended: str) -> Trained:
    if (folder / f"{name}.txt").exists():
        return (folder / f"{name}.txt").read_text("utf-8")
    if not (folder / f"{name}.npz").exists():
        return ended
    with np.load(folder / f"{name}.npz", allow_pickle=False) as file:
        seen: list[StepTensors] = [{} for _ in range(int(file["count"]))]
        for key in file.files:
            step, slash, tensor = key.partition("/")
            if slash:
                seen[int(step)][tensor] = torch.from_numpy(file[key])
        did = {key.removeprefix("did "): int(file[key]) for key in file.files if key.startswith("did ")}
    return Training(seen, did)
