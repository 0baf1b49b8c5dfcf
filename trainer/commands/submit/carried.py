"""Mounts for the local paths that a configuration names."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.commands.submit import container
from trainer.commands.submit.spec import JobPlace, JobSpec, Site
from trainer.config.models import HF
from trainer.config.recipe_file import override, read_recipe
from trainer.errors import BadInputError
from trainer.host.disks import read_mount

# What a container mounts or brings: it can't be read from here.
INSIDE = ("/data/", "/workspace/", "/cache/", "/opt/")
# The keys that hold paths.
PATHS = ("data.path", "data.cache", "model.pretrained", "language.tokenizer", "task", "checkpoint.folder")
_MODEL, _MIX = "model.name", "data.mix"
_OWN_DISKS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "ramfs", "overlay")


def local_paths(spec: JobSpec) -> dict[str, str]:
    """Returns the keys that name a path outside of every container, with that path."""
    values = _values(spec)
    found = {key: _value(values, key) for key in (*PATHS, _MODEL)}
    model = found[_MODEL].removeprefix(HF)  # a folder of the library transformers, or no path at all
    found[_MODEL] = model if found[_MODEL].startswith(HF) and Path(model).absolute().is_dir() else ""
    sets = (f"evaluation.sets.{name}.path" for name in _mapping(values, "evaluation.sets"))
    found |= {key: _value(values, key) for key in sets}
    found |= {f"{_MIX}.{path}": path for path in _mapping(values, _MIX)}
    return {key: path for key, path in found.items() if path and not _is_there(spec, key, path)}


def _values(spec: JobSpec) -> dict[str, Any]:
    unread = spec.recipe.startswith(INSIDE) and spec.recipe_text is None
    return override({} if unread else read_recipe(spec.recipe), spec.all_settings())


def _value(values: Any, key: str) -> str:
    found = _at(values, key)
    return found if isinstance(found, str) else ""


def _mapping(values: Any, key: str) -> dict[str, Any]:
    found = _at(values, key)
    return found if isinstance(found, dict) else {}


def _at(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values


def _is_there(spec: JobSpec, key: str, path: str) -> bool:
    if key == "task":
        # A recipe that is a task's file names itself, wherever it is read.
        return not path.endswith(".py") or Path(path).absolute() == Path(spec.recipe).absolute()
    if f"{path}/".startswith(f"{container.DATA}/"):
        return spec.data is not None
    return "://" in path or path.startswith((*INSIDE, "hub:", "torchvision:"))


def carried(spec: JobSpec, place: JobPlace) -> JobSpec:
    """Returns the job with mounts for its local paths, and with the paths inside the containers.

    Raises:
        BadInputError: If a path can't be mounted.
    """
    mix = dict[str, str]()
    for key, path in local_paths(spec).items():
        here = Path(path).absolute()
        mixed = key.startswith(f"{_MIX}.")
        key = _MIX if mixed else key  # noqa: PLW2901
        if key == "data.cache":
            raise BadInputError(
                f"{key}={path}: containers don't see it; give --cache {path}, and --set {key}=/cache/data"
            )
        if place in ("kubernetes", "kubeflow"):
            volume = "--data pvc:CLAIM" if key == "data.path" else "--data or --runs"
            raise BadInputError(
                f"{key}={path}: pods don't see this machine's files: put it on a volume, give its claim by "
                f"{volume}, and its path there, --set {key}={container.DATA}/…"
            )
        if key == "checkpoint.folder" and not _seen(spec, here):
            raise BadInputError(
                f"{key}={path}: containers don't see it; leave it out, or give one below "
                f"{container.RUNS_MOUNT}, which --runs mounts"
            )
        if place != "slurm" and not here.exists():
            raise BadInputError(f"{key}={path}: no such file or folder here that could be mounted")
        changes: dict[str, Any] = {}
        if seen := _seen(spec, here):
            target = seen
        elif key != "data.path":
            name = _free_name(spec.files, here)
            target = f"{container.RECIPE_MOUNT}/{name}"
            changes = {"files": {**spec.files, name: str(here)}}
        elif spec.data is None:
            folder = here.parent if here.is_file() else here
            target = container.DATA if folder == here else f"{container.DATA}/{here.name}"
            changes = {"data": str(folder)}
        else:
            raise BadInputError(
                f"{key}={path}: only --data {spec.data} is mounted; leave one of the two out, or give a path "
                f"below {container.DATA}"
            )
        if mixed:
            mix[path] = target
        settings = () if mixed else (f"{key}={HF if key == _MODEL else ''}{target}",)
        spec = spec.model_copy(update={**changes, "settings": (*spec.settings, *settings)})
    if weights := _mapping(
        _values(spec), _MIX
    ):  # also where none of them lies here: data.path isn't set then
        mounted = json.dumps({mix.get(path, path): weight for path, weight in weights.items()})
        spec = spec.model_copy(update={"settings": (*spec.settings, f"{_MIX}={mounted}")})
    return spec


def _free_name(files: Mapping[str, str], here: Path) -> str:
    """A name to mount a file under: its own, unless another file has it."""
    names = (here.name, *(f"{number}-{here.name}" for number in range(1, len(files) + 1)))
    return next(name for name in names if files.get(name, str(here)) == str(here))


def _seen(spec: JobSpec, here: Path) -> str:
    """Returns the path of a file in a folder that is mounted anyway, or ""."""
    for folder, where in (
        (spec.runs, container.RUNS_MOUNT),
        (spec.data, container.DATA),
        (spec.cache, container.CACHE),
    ):
        if (
            folder is not None
            and not folder.startswith("pvc:")
            and here.is_relative_to(Path(folder).absolute())
        ):
            return str(Path(where) / here.relative_to(Path(folder).absolute()))
    return ""


def unseen_folders(spec: JobSpec, site: Site, other: Mapping[str, str]) -> list[str]:
    """Returns a line for each folder or file of the job on a local disk, which compute nodes may not see.

    Args:
        spec: The job.
        site: The cluster's settings.
        other: Further paths, by the option that names them.
    """
    folders = {"--runs": spec.runs, "--data": spec.data, "--cache": spec.cache}
    if site.container == "venv":
        folders["--venv"] = site.venv
    if spec.recipe_text is not None:
        folders["the recipe"] = spec.recipe
    folders |= {f"the file {name}": file for name, file in spec.files.items()} | dict(other)
    lines = []
    for option, folder in folders.items():
        kind = read_mount(Path(folder).absolute()).kind if folder else ""
        if kind in _OWN_DISKS:
            lines.append(
                f"{option} {folder} lies on a disk of this machine ({kind}): every node of the job must "
                "see it, so keep it on the cluster's file system (a head node may export this one)"
            )
    return lines
