"""The site file: defaults of `trainer submit` by place, for all jobs submitted from this machine."""

import argparse
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StrictInt

from trainer.commands.submit.spec import OPTIONS, JobPlace
from trainer.config.redact import redact
from trainer.config.section import Section, validated
from trainer.config.yaml_text import in_yaml, parse_yaml
from trainer.errors import BadInputError
from trainer.host.files import read_bounded


def _absolute(where: str) -> str:
    """Makes a path absolute; a claim stays as it is."""
    kind, colon, path = (
        where.partition(":") if where.startswith(("file:", "pvc:", "secret:")) else ("", "", where)
    )
    if kind in ("pvc", "secret"):
        return where
    found = Path(path).expanduser()
    if not found.is_absolute():
        raise ValueError("give an absolute path or ~/…: a relative one would depend on where one submits")
    return f"{kind}{colon}{found}"


_Where = Annotated[str, AfterValidator(_absolute)]


class _Place(Section):
    """Defaults that every place may have."""

    image: str | None = Field(None, description="reference of the image")
    gpus_per_node: int | None = Field(None, description="a rank each")
    cpus_per_node: int | None = Field(None, description="cores")
    memory: int | None = Field(None, description="of a node, GiB")
    shm: int | None = Field(None, description="of /dev/shm, GiB")
    time: int | str | None = Field(None, description="of one attempt")
    grace: int | None = Field(None, description="for the checkpoint, seconds")
    data: _Where | None = Field(None, description="folder or pvc:CLAIM")
    runs: _Where | None = Field(None, description="folder or pvc:CLAIM")
    cache: _Where | None = Field(None, description="folder or pvc:CLAIM")
    port: int | None = Field(None, description="of the rendezvous")
    user: str | None = Field(None, description="UID:GID")
    env: dict[str, str | StrictInt] = Field({}, description="variables, no secrets")
    env_from: tuple[_Where, ...] = Field((), description="secret:NAME or file:PATH")


class _Slurm(_Place):
    partition: str | None = Field(None, description="of Slurm")
    account: str | None = Field(None, description="of Slurm")
    qos: str | None = Field(None, description="of Slurm")
    container: Literal["pyxis", "apptainer", "venv"] | None = Field(
        None, description="how it enters the image"
    )
    venv: _Where | None = Field(None, description="the environment of container venv")
    sbatch_arg: tuple[str, ...] = Field((), description="further options of sbatch")
    rdma: str | None = Field(None, description="host")


class _Cluster(_Place):
    namespace: str | None = Field(None, description="of Kubernetes")
    queue: str | None = Field(None, description="of Kueue")
    service_account: str | None = Field(None, description="of the pods")
    rdma: str | None = Field(None, description="RESOURCE=N")
    patch: tuple[_Where, ...] = Field((), description="files that are merged into the manifests")


class _Kubernetes(_Cluster):
    jobset: bool | None = Field(None, description="a JobSet instead of an Indexed Job")


class SiteFile(Section):
    """A section for each place; its keys are options of `trainer submit`, with _ for -."""

    docker: _Place = Field(default_factory=_Place)
    slurm: _Slurm = Field(default_factory=_Slurm)
    kubernetes: _Kubernetes = Field(default_factory=_Kubernetes)
    kubeflow: _Cluster = Field(default_factory=_Cluster)


def with_site_defaults(options: argparse.Namespace, place: JobPlace) -> None:
    """Fills in the site's defaults where the command line has none, and prints which on stderr.

    For lists (patches, options of sbatch, variables), the command line's entries follow the file's.

    Raises:
        BadInputError: If the file can't be read, or a key or value in it is wrong.
    """
    path = options.site or _default_path()
    if path is None or (options.site is None and not path.is_file()):
        return
    taken = {}
    for key, value in getattr(_read(path), place):
        name = _NAMES.get(key, key)
        given = getattr(options, name)
        if value in (None, (), {}) or (given not in (None, "", []) and not isinstance(given, list)):
            continue
        if isinstance(given, list):
            words = [f"{one}={text}" for one, text in value.items()] if isinstance(value, dict) else value
            setattr(options, name, [*(Path(word) if key == "patch" else word for word in words), *given])
        else:
            setattr(options, name, value if name != "minutes" else str(value))
        taken[key] = value
    if taken:
        # What names a secret may be seen.
        shown = {key: value if key == "env_from" else redact(value) for key, value in taken.items()}
        words = " ".join(f"{key}={in_yaml(_plain(value))}" for key, value in shown.items())
        print(f"site       {path}: {place}: {words}", file=sys.stderr)


# The options' names in the namespace that argparse makes.
_NAMES = {option: name for name, option in OPTIONS.items() if option not in ("env", "nnodes", "set")}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _default_path() -> Path | None:
    """Returns the default path; a relative XDG_CONFIG_HOME is ignored, as its specification says."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    home = os.environ.get("HOME", "")
    if not folder.startswith("/"):
        folder = f"{home}/.config" if home.startswith("/") else ""
    return Path(folder, "trainer", "site.yaml") if folder else None


def _read(path: Path) -> SiteFile:
    try:
        values = parse_yaml(read_bounded(path).decode(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not a text in UTF-8"
        raise BadInputError(f"--site {path}: can't be read ({why})") from error
    if not isinstance(values, dict | None):
        raise BadInputError(f"{path}: give a section for each place, as slurm: {{partition: gpu}}")
    places = ", ".join(SiteFile.model_fields)
    return validated(
        SiteFile, values or {}, str(path), f"it has sections {places}, with options of submit as keys"
    )
