"""Verdict on a run and its replay: identical, or the first difference and those of the environments."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.folder import Damaged, Unreadable, read_weights
from trainer.commands.verify.recorded import Recorded, Segment
from trainer.observe.checksums import ChecksumRow, FirstDifference
from trainer.train.provenance import file_hash

_SHOWN = 3
_LINES = 5
# Fields of a manifest that can change the bits, in the order in which differences are reported.
_ENVIRONMENT = (
    *("versions.torch", "versions.cuda", "versions.cudnn", "versions.nccl"),
    *("device.name", "device.gpus", "device.cpu_capability", "device.cpu", "threads", "world_size"),
    *("commit", "versions.trainer", "versions.numpy", "versions.torchvision", "versions.pillow"),
    *("versions.python", "versions.driver", "lock", "image"),
)


def differing_weights(run: Recorded, folder: Path) -> list[str]:
    """Returns differences of the final weights, as lines; none if the run has no final weights."""
    lines = []
    for name, digest in run.manifest.weights.items():
        ours, theirs = run.path / name, folder / name
        if not theirs.exists() or file_hash(theirs) != digest:
            lines.append(f"{name}: {_tensors_that_differ(ours, theirs)}")
    return lines


def _tensors_that_differ(ours: Path, theirs: Path) -> str:
    if missing := [file for file in (ours, theirs) if not os.path.lexists(file)]:
        return f"{'the run' if missing[0] == ours else 'the replay'} has none"
    try:
        before, now = read_weights(ours), read_weights(theirs)
    except (Damaged, Unreadable):
        return "it can't be read"
    odd = [
        name
        for name in dict.fromkeys([*before, *now])
        if name not in before or name not in now or not _same_bits(before[name], now[name])
    ]
    if not odd:
        return "all tensors are identical, and the file's header is another (its metadata)"
    return _some(odd, max(len(before), len(now)))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def differences_here(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns differences of two manifests' environments, as "name: before, now after".

    The most important come first. A field that the older manifest lacks is no difference.
    """
    lines = []
    for name in _ENVIRONMENT:
        section, _, key = name.rpartition(".")
        recorded, here = (manifest.get(section, {}) if section else manifest for manifest in (before, now))
        if key in recorded and recorded[key] != here.get(key):
            lines.append(f"{name}: {_shown(recorded[key])}, now {_shown(here.get(key))}")
    return lines


def identical(
    run: Recorded, rows: Sequence[ChecksumRow], until: int, parts: Sequence[Segment], here: Sequence[str]
) -> str:
    """Formats the verdict on a run that was replayed bit for bit."""
    metrics = sum(len(row.metrics) for row in rows)
    tensors = sum(len(row.tensors) for row in rows)
    files = [*run.manifest.weights] if until == run.manifest.last_step else []
    lines = [
        f"{run.path}: identical",
        f"  {until:,} of {run.manifest.last_step:,} steps on {_who(parts)}: {len(rows)} records with "
        f"{metrics} metrics, and {tensors:,} fingerprints of {max(len(row.tensors) for row in rows)} tensors",
    ]
    if files:
        lines.append(f"  final weights: {', '.join(files)}")
    if here:
        lines += ["  although this differs:", *(f"    {line}" for line in here)]
    return "\n".join(lines)


def different(
    run: Recorded,
    found: FirstDifference | None,
    weights: Sequence[str],
    here: Sequence[str],
    odd: Sequence[str] = (),
) -> str:
    """Formats the verdict on a run that differs, or (`odd`) contradicts itself."""
    lines = [f"{run.path}: differs", *(f"  {line}" for line in odd[:_LINES])]
    if len(odd) > _LINES:
        lines.append(f"  and {len(odd) - _LINES} more of that kind")
    if found is not None:
        where = f"  first at step {found.step}: "
        if found.tensors:
            where += _some(found.tensors, found.of)
        lines.append(
            where + "; ".join([""] * bool(found.tensors) + [f"{n} {a}, now {b}" for n, a, b in found.metrics])
        )
        apart = found.step - found.after
        if apart > 1:
            lines.append(
                f"  it began in one of the steps {found.after + 1} to {found.step}: "
                f"recorded every {apart} steps"
            )
    lines += [f"  final weights: {line}" for line in weights]
    if here:
        lines.append(f"  the first that differs of the environment: {here[0]}")
        lines += [f"    also {line}" for line in here[1:]]
    else:
        lines.append("  nothing differs that was recorded of the environment")
    return "\n".join([*lines, *_hints(run)])


def _hints(run: Recorded) -> list[str]:
    hints = []
    if run.manifest.device.kind == "cuda" and not run.manifest.config.get("deterministic"):
        hints.append("  deterministic=false: on a GPU sums may come in another order each time")
    if run.manifest.dirty:
        hints.append("  the run's code had uncommitted changes, which nothing recorded")
    return hints


def _who(parts: Sequence[Segment]) -> str:
    each = [
        f"{part.ranks} rank{'s' * (part.ranks > 1)} of {part.threads} thread{'s' * (part.threads > 1)}"
        for part in parts
    ]
    return ", then ".join(each)


def _some(names: Sequence[str], of: int) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{shown}{' …' if len(names) > _SHOWN else ''} ({len(names)} of {of} tensors)"


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
