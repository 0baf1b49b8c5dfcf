#!/usr/bin/env python3
"""Renders scripts/kubernetes and scripts/slurm by the code behind `trainer submit`; --check only compares.

The image in them is a placeholder that no registry has: put your own reference there, with its digest, which
stands in the variable TRAINER_IMAGE_DIGEST as well (a run's manifest says by it which image it ran in).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from trainer.commands.submit import container, kubernetes, slurm
from trainer.commands.submit.places import JOB_PLACES
from trainer.commands.submit.spec import JobPlace, JobSpec, Site

_HEAD = """\
# Rendered by scripts/render_examples.py; `trainer submit … --dry-run` renders your own.
# The image is a placeholder: put the reference of yours there, and its digest in TRAINER_IMAGE_DIGEST.
"""
FOLDER = Path(__file__).resolve().parent / "kubernetes"
SLURM_FOLDER = FOLDER.with_name("slurm")
IMAGE = f"registry.example/trainer@sha256:{64 * '0'}"
# What all examples are: an ImageNet training with its data, runs and compiled kernels on claims.
COMMON: dict[str, Any] = {
    "recipe": "resnet50-imagenet",
    # The recipe's global batch of 256, shared out to as many as 32 ranks.
    "settings": ("data.micro_batch_size=8",),
    "name": "resnet50",
    "image": IMAGE,
    "data": "pvc:imagenet",
    "runs": "pvc:runs",
    "cache": "pvc:cache",
}
GPUS: dict[str, Any] = {"gpus_per_node": 8, "cpus_per_node": 96, "memory_gib": 512, "shm_gib": 16}
EXAMPLES: dict[str, tuple[JobPlace, JobSpec, Site]] = {
    "job.yaml": ("kubernetes", JobSpec(**COMMON, **GPUS, nnodes=2), Site()),
    "jobset.yaml": ("kubernetes", JobSpec(**COMMON, **GPUS, nnodes=2), Site(jobset=True)),
    "trainjob.yaml": ("kubeflow", JobSpec(**COMMON, **GPUS, nnodes=2), Site()),
}
ON_HOSTS = {**COMMON, "data": "/shared/imagenet", "runs": "/shared/runs", "cache": "/shared/cache"}
SLURM: dict[str, tuple[JobSpec, Site]] = {
    "pyxis.sbatch": (JobSpec(**ON_HOSTS, **GPUS, nnodes=2), Site()),
    "apptainer.sbatch": (JobSpec(**ON_HOSTS, **GPUS, nnodes=2), Site(container="apptainer")),
    "venv.sbatch": (
        JobSpec(**ON_HOSTS, **GPUS, nnodes=2),
        Site(container="venv", venv="/shared/trainer/.venv"),
    ),
    "elastic.sbatch": (JobSpec(**ON_HOSTS, **GPUS, nnodes=4, min_nnodes=2), Site()),
}
BASE = JobSpec(**COMMON, gpus_per_node=1, cpus_per_node=8, memory_gib=64, shm_gib=8)
OVERLAYS = {
    "one-node": JobSpec(**COMMON, **GPUS),
    "several-nodes": JobSpec(**COMMON, **GPUS, nnodes=4),
    "cpu": JobSpec(**COMMON, nproc_per_node=2, cpus_per_node=8, memory_gib=32),
}


def slurm_files() -> dict[str, str]:
    """Returns the expected files of scripts/slurm: names and texts."""
    return {name: slurm.render(spec, site) for name, (spec, site) in SLURM.items()}


def files() -> dict[str, str]:
    """Returns the expected files of scripts/kubernetes: relative names and texts."""
    found = {
        name: _headed(JOB_PLACES[place].render(spec, site)) for name, (place, spec, site) in EXAMPLES.items()
    }
    base = list(yaml.safe_load_all(kubernetes.render(BASE, Site())))
    found["kustomize/base/job.yaml"] = _headed(container.to_yaml(*base))
    found["kustomize/base/kustomization.yaml"] = _headed(_kustomization(resources=["job.yaml"]))
    for name, spec in OVERLAYS.items():
        folder = f"kustomize/overlays/{name}"
        documents = list(yaml.safe_load_all(kubernetes.render(spec, Site())))
        kinds = {document["kind"]: document for document in documents}
        changed, patches = {}, []
        for before in base:
            kind = before["kind"]
            if operations := difference(before, kinds.pop(kind)):
                changed[f"{folder}/{kind.lower()}-patch.yaml"] = _headed(
                    yaml.dump(operations, Dumper=container.Plain, sort_keys=False)
                )
                target = {"kind": kind, "name": before["metadata"]["name"]}
                patches.append({"path": f"{kind.lower()}-patch.yaml", "target": target})
        added = [f"{kind.lower()}.yaml" for kind in kinds]
        found |= {f"{folder}/{kind.lower()}.yaml": _headed(container.to_yaml(kinds[kind])) for kind in kinds}
        found[f"{folder}/kustomization.yaml"] = _headed(
            _kustomization(resources=["../../base", *added], patches=patches)
        )
        found |= changed
    return found


def difference(before: Any, after: Any, path: str = "") -> list[dict[str, Any]]:
    """The JSON patch (RFC 6902) that makes one value of another; lists of words are replaced as a whole."""
    if before == after:
        return []
    lists = isinstance(before, list) and isinstance(after, list) and len(before) == len(after)
    if lists and all(isinstance(entry, dict) for entry in [*before, *after]):
        pairs = enumerate(zip(before, after, strict=True))
        return [one for index, pair in pairs for one in difference(*pair, f"{path}/{index}")]
    if not isinstance(before, dict) or not isinstance(after, dict):
        return [{"op": "replace", "path": path, "value": after}]
    operations = []
    for key in dict.fromkeys([*before, *after]):
        inside = f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}"
        if key not in after:
            operations.append({"op": "remove", "path": inside})
        elif key not in before:
            operations.append({"op": "add", "path": inside, "value": after[key]})
        else:
            operations += difference(before[key], after[key], inside)
    return operations


def _kustomization(**fields: Any) -> str:
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    return container.to_yaml({**head, **fields})


def _headed(text: str) -> str:
    return f"{_HEAD}{text}"


def main() -> int:
    """Writes the files, or compares them."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing; code 1: something is old")
    options = parser.parse_args()
    wanted = {FOLDER / name: text for name, text in files().items()}
    wanted |= {SLURM_FOLDER / name: text for name, text in slurm_files().items()}
    kept = [*FOLDER.rglob("*.yaml"), *SLURM_FOLDER.glob("*.sbatch")]
    there = {path: path.read_text() for path in kept}
    for path in sorted({*wanted, *there}):
        if wanted.get(path) != there.get(path):
            print(f"{'old' if options.check else 'written'}: {path.relative_to(FOLDER.parent)}")
    if options.check:
        return int(wanted != there)
    for path in there:
        if path not in wanted:
            path.unlink()
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
