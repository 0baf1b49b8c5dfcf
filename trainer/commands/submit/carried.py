"""Mounts for the local paths that a configuration names."""

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
_MODEL = "model.name"
_OWN_DISKS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "ramfs", "overlay")


def local_paths(spec: JobSpec) -> dict[str, str]:
    """Returns the keys that name a path outside of every container, with that path."""
    unread = spec.recipe.startswith(INSIDE) and spec.recipe_text is None
    values = override({} if unread else read_recipe(spec.recipe), spec.all_settings())
    found = {key: _value(values, key) for key in (*PATHS, _MODEL)}
    model = found[_MODEL].removeprefix(HF)  # a folder of the library transformers, or no path at all
    found[_MODEL] = model if found[_MODEL].startswith(HF) and Path(model).absolute().is_dir() else ""
    return {key: path for key, path in found.items() if path and not _is_there(spec, key, path)}


def _value(values: Any, key: str) -> str:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values if isinstance(values, str) else ""


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
    for key, path in local_paths(spec).items():
        here = Path(path).absolute()
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
            target = f"{container.RECIPE_MOUNT}/{here.name}"
            changes = {"files": {**spec.files, here.name: str(here)}}
        elif spec.data is None:
            folder = here.parent if here.is_file() else here
            target = container.DATA if folder == here else f"{container.DATA}/{here.name}"
            changes = {"data": str(folder)}
        else:
            raise BadInputError(
                f"{key}={path}: only --data {spec.data} is mounted; leave one of the two out, or give a path "
                f"below {container.DATA}"
            )
        value = f"{HF}{target}" if key == _MODEL else target
        spec = spec.model_copy(update={**changes, "settings": (*spec.settings, f"{key}={value}")})
    return spec


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
