"""Several runs of one recipe in one image, to be compared."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.commands.submit.spec import JobSpec, pinned, text_of_option
from trainer.commands.submit.submit import job_folder
from trainer.config.yaml_text import parse_yaml
from trainer.errors import BadInputError, writing
from trainer.host.files import write_whole

_MOST = 1000


def jobs(path: Path, spec: JobSpec) -> list[dict[str, Any]]:
    """Returns the fields of each run's job.

    Args:
        path: A YAML file: `grid: {optim.lr: [0.1, 0.3], seed: [0, 1]}`, every combination; or
            `runs: [{optim.lr: 0.1}, {optim.lr: 0.3, seed: 1}]`.
        spec: What all have in common.

    Raises:
        BadInputError: If the file is none of these, or the image isn't named by its digest.
    """
    if spec.image and not pinned(spec.image):
        raise BadInputError(
            f"--image {spec.image}: the runs of a sweep must have the same image, so name it by its digest "
            "(HOST/NAME@sha256:…)"
        )
    found = []
    for number, point in enumerate(points(path)):
        settings = tuple(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in point.items())
        fields = spec.model_dump()
        fields |= {"name": f"{spec.name}-{number}", "settings": (*spec.settings, *settings)}
        found.append(fields)
    return found


def points(path: Path) -> list[dict[str, Any]]:
    """Returns the settings of each run of a sweep.

    Raises:
        BadInputError: If the file is no sweep.
    """
    values = parse_yaml(text_of_option(f"--sweep {path}", path), str(path))
    if not isinstance(values, dict) or len(values) != 1 or next(iter(values)) not in ("grid", "runs"):
        raise BadInputError(f"--sweep {path}: give grid: {{KEY: [A, B]}} or runs: [{{KEY: A}}, {{KEY: B}}]")
    found = list(_grid(path, values["grid"]) if "grid" in values else _listed(path, values["runs"]))
    if not 1 <= len(found) <= _MOST:
        raise BadInputError(f"--sweep {path}: {len(found)} runs; give 1 to {_MOST}")
    for number, point in enumerate(found):
        if point in found[:number]:
            raise BadInputError(f"--sweep {path}: {json.dumps(point)} stands there twice; remove one")
    return found


def _grid(path: Path, axes: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(axes, dict) or not all(isinstance(values, list) for values in axes.values()):
        raise BadInputError(f"--sweep {path}: grid holds a list of values for each key")
    sizes = 1
    for values in axes.values():
        sizes *= len(values)
    if sizes > _MOST:
        raise BadInputError(f"--sweep {path}: {sizes} runs; give 1 to {_MOST}")
    return (dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values()))


def _listed(path: Path, runs: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise BadInputError(f"--sweep {path}: runs holds a mapping of keys for each run")
    return iter(runs)


def folder(spec: JobSpec) -> str:
    """Returns a run's folder as seen from this machine, or its path in the claim."""
    return f"runs/{spec.name}" if spec.runs.startswith("pvc:") else str(Path(spec.runs) / spec.name)


def write_list(common: JobSpec, runs: list[JobSpec]) -> Path:
    """Writes the list of submitted runs, for their comparison; returns its path."""
    path = job_folder(common) / f"{common.name}-sweep.json"
    listed = [{"name": run.name, "folder": folder(run), "settings": run.settings} for run in runs]
    values = {"recipe": common.recipe, "image": common.image, "runs": listed}
    with writing(str(path), "give another --runs"):
        write_whole(path, json.dumps(values, indent=2) + "\n")
    return path
