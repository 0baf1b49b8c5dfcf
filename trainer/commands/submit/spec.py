"""A job, whatever runs it: recipe, resources, time limit, data and run folders."""

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from trainer.errors import BadInputError
from trainer.host.files import read_bounded

# What follows a stop: the ranks' grace, then the launcher's own end, before the place kills what is left.
_LAUNCHER_SECONDS = 30
# Begins with a letter: it is a Service's name too.
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
# A pod's name adds an index and a suffix, and a label holds 63 characters.
_LONGEST_NAME = 46
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# By these a launcher hears of its node, so that they are nobody else's to set.
_OURS = re.compile(r"NNODES|NODE_RANK|MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE|LOCAL_.*|PET_.*|SLURM_.*")
# Options that fields of the two models have another name than.
OPTIONS = {
    "minutes": "time",
    "memory_gib": "memory",
    "shm_gib": "shm",
    "grace_seconds": "grace",
    "environment": "env",
    "min_nnodes": "nnodes",
    "settings": "set",
}
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d+):(?P<minutes>\d\d)(?::(?P<seconds>\d\d))?")

# What Kubernetes calls a namespace, an object, an object that a label names too, and a resource that a device
# plugin has (a container's limit): RFC 1123, as its API server reads it (apimachinery, util/validation).
_LABEL = "[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_DOTTED = rf"{_LABEL}(?:\.{_LABEL})*"
_NAMESPACE = re.compile(rf"(?=.{{1,63}}$){_LABEL}")
OBJECT = re.compile(rf"(?=.{{1,253}}$){_DOTTED}")
_QUEUE = re.compile(rf"(?=.{{1,63}}$){_DOTTED}")
_RDMA = re.compile(
    rf"host|(?=.{{1,253}}/){_DOTTED}/[A-Za-z0-9](?:[A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?(=[1-9]\d*)?"
)
NO_USER = "none"
_USER = re.compile(rf"\d+:\d+|{NO_USER}")

JobPlace = Literal["docker", "slurm", "kubernetes", "kubeflow"]


def minutes_of(text: str) -> int:
    """Parses a time limit of Slurm to minutes: `D-HH:MM`, `HH:MM`, `HH:MM:SS`, or plain minutes.

    Raises:
        ValueError: If it is none of these, or zero.
    """
    if text.isdecimal():
        minutes = int(text)
    elif found := _TIME.fullmatch(text):
        days, hours, small, seconds = (
            int(found[name] or 0) for name in ("days", "hours", "minutes", "seconds")
        )
        minutes = (days * 24 + hours) * 60 + small + (seconds > 0)
    else:
        raise ValueError("give minutes, HH:MM, HH:MM:SS or D-HH:MM")
    if minutes < 1:
        raise ValueError("give at least a minute")
    return minutes


def _as(pattern: re.Pattern[str], words: str) -> AfterValidator:
    """Returns a validator for a pattern; `words` describe it in the error."""

    def check(value: str | None) -> str | None:
        if value is not None and not pattern.fullmatch(value):
            raise ValueError(words)
        return value

    return AfterValidator(check)


ODD_NAME = "a name there has a-z, 0-9, '-' and '.', a letter or digit before and after each '.', as team-a"
_Object = Annotated[str | None, _as(OBJECT, ODD_NAME)]
_Queue = Annotated[str | None, _as(_QUEUE, f"{ODD_NAME}, and at most 63 characters")]
_Namespace = Annotated[
    str,
    _as(
        _NAMESPACE,
        "a namespace has a-z, 0-9 and '-', a letter or digit first and last, at most 63 characters",
    ),
]


def _minutes(value: object) -> object:
    return minutes_of(value) if isinstance(value, str) else value


class JobSpec(BaseModel):
    """One job. Every place's file is rendered from this alone.

    Attributes:
        recipe: Name of a recipe, or a path inside the image or the mounted folders.
        settings: Settings of `--set`.
        name: Name of the job and of its run folder under `runs`: the same name resumes the same run.
        image: Reference of the image; with a digest it is the same tomorrow.
        nnodes: Hosts, or pods.
        min_nnodes: Minimum of nodes with which an elastic job continues; None: not elastic.
        gpus_per_node: GPUs, a rank each; 0: ranks on CPUs.
        nproc_per_node: Ranks per node without GPUs.
        cpus_per_node: CPU cores.
        memory_gib: Memory of a node in GiB, /dev/shm included.
        shm_gib: Upper limit of /dev/shm, in GiB.
        minutes: Time limit of one attempt.
        grace_seconds: Time for ranks from the signal to their exit, checkpoint included.
        data: Folder on the hosts, or `pvc:CLAIM`; mounted at /data, read-only.
        runs: Folder on the hosts, or `pvc:CLAIM`; mounted at /workspace/runs.
        cache: Folder on the hosts, or `pvc:CLAIM`; mounted at /cache. None: gone with the container.
        port: Port of the launchers' rendezvous on node 0; the ranks' is the next one.
        user: UID and GID, as `1000:1000`; `none`: those that Kubernetes gives the pods of a namespace.
        environment: Further environment variables.
        recipe_text: Content of a local recipe file, mounted into the containers.
        files: Further local files, mounted as /recipe/NAME, by that name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str = Field(min_length=1)
    settings: tuple[str, ...] = ()
    name: str = ""
    image: str = ""
    nnodes: int = Field(1, ge=1, le=4096)
    min_nnodes: int | None = Field(None, ge=1)
    gpus_per_node: int = Field(0, ge=0, le=64)
    nproc_per_node: int = Field(1, ge=1, le=1024)
    cpus_per_node: int = Field(4, ge=1, le=4096)
    memory_gib: int = Field(16, ge=1, le=1 << 16)
    shm_gib: int = Field(2, ge=1, le=1 << 16)
    minutes: Annotated[int, BeforeValidator(_minutes)] = Field(24 * 60, ge=1, le=366 * 24 * 60)
    grace_seconds: int = Field(90, ge=1, le=3600)
    data: str | None = None
    runs: str = "runs"
    cache: str | None = None
    port: int = Field(29500, ge=1024, le=65534)
    user: Annotated[str, _as(_USER, "give two numbers, UID:GID, as 1000:1000; or none")] = "1000:1000"
    environment: dict[str, str] = {}
    recipe_text: str | None = None
    files: dict[str, str] = {}

    @model_validator(mode="after")
    def _fits_together(self) -> "JobSpec":
        if not self.name:
            object.__setattr__(self, "name", _default_name(self.recipe, self.settings))
        if len(self.name) > _LONGEST_NAME or not _NAME.fullmatch(self.name):
            raise ValueError(
                f"name: '{self.name}' must be of a-z, 0-9 and -, begin with a letter, and have at most "
                f"{_LONGEST_NAME} characters"
            )
        if self.shm_gib >= self.memory_gib:
            raise ValueError(
                f"shm_gib: /dev/shm counts as memory: {self.shm_gib} GiB don't fit in {self.memory_gib}"
            )
        if self.minutes * 60 <= self.stop_seconds + 60:
            raise ValueError(
                f"minutes: the signal to stop comes {self.stop_seconds} s before the end, so {self.minutes} "
                "minutes are too short; give more, or a shorter --grace"
            )
        if self.gpus_per_node and self.nproc_per_node != 1:
            raise ValueError("nproc_per_node: with GPUs there is a rank for each; give one of the two")
        if self.min_nnodes is not None and self.min_nnodes > self.nnodes:
            raise ValueError(f"min_nnodes: {self.min_nnodes} is more than the {self.nnodes} nodes")
        for name in self.environment:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"environment: '{name}' is no name of a variable")
            if _OURS.fullmatch(name):
                raise ValueError(f"environment: {name} is set by what starts the nodes; leave it out")
        return self

    @property
    def ranks(self) -> int:
        """Ranks per node."""
        return self.gpus_per_node or self.nproc_per_node

    @property
    def stop_seconds(self) -> int:
        """Seconds from the signal until remaining processes may be killed."""
        return self.grace_seconds + _LAUNCHER_SECONDS

    @property
    def nnodes_text(self) -> str:
        """Value of the variable NNODES: `2`, or `1:2` for an elastic job."""
        return str(self.nnodes) if self.min_nnodes is None else f"{self.min_nnodes}:{self.nnodes}"

    def all_settings(self, data: str = "/data") -> list[str]:
        """Returns the settings of `--set` on each node, with the path of the data."""
        given = any(one.startswith(("data.path=", "data.mix=")) for one in self.settings)
        return [*self.settings, *([] if self.data is None or given else [f"data.path={data}"])]

    def command(self, runs: str = "runs", data: str = "/data") -> list[str]:
        """Returns the command of each node; it finds the others by NNODES, NODE_RANK, MASTER_ADDR,
        MASTER_PORT.

        (Or by what Slurm or Kubeflow set themselves, see `trainer.launch.nodes`.)

        Args:
            runs: Folder of the runs on a node; by default as in a container.
            data: Folder of the data on a node, if there is any; by default as in a container.
        """
        ranks = (
            ["--gpus", str(self.gpus_per_node)]
            if self.gpus_per_node
            else ["--nproc-per-node", str(self.ranks)]
        )
        return [
            *("trainer", "train", self.recipe, *ranks),
            *("--out", f"{runs}/{self.name}", "--grace", str(self.grace_seconds)),
            *(word for setting in self.all_settings(data) for word in ("--set", setting)),
        ]


class Site(BaseModel):
    """Settings of one cluster, none of which changes the job.

    Attributes:
        partition: Slurm partition.
        account: Slurm account.
        qos: Slurm quality of service.
        container: How a Slurm job enters the image; venv: it trains in an environment instead.
        venv: That environment, on a file system that every node has.
        namespace: Kubernetes namespace.
        jobset: A JobSet instead of an Indexed Job with a Service.
        sbatch_arg: Further options of sbatch, as `constraint=h100`.
        queue: A LocalQueue of Kueue, which decides when the job's pods are made.
        service_account: Service account of the pods.
        env_from: Sources of variables that no rendered file holds: `secret:NAME`, or `file:PATH`.
        rdma: `host`: the devices of Slurm's nodes; `RESOURCE=N`: what a device plugin of Kubernetes has.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    container: Literal["pyxis", "apptainer", "venv"] = "pyxis"
    venv: str = ".venv"
    namespace: _Namespace = "default"
    jobset: bool = False
    sbatch_arg: tuple[str, ...] = ()
    queue: _Queue = None
    service_account: _Object = None
    env_from: tuple[str, ...] = ()
    rdma: Annotated[
        str | None,
        _as(_RDMA, "give host (Slurm), or a device plugin's resource and a number from 1 on, as rdma/hca=1"),
    ] = None


def claim_of(place: str, what: str, where: str) -> str:
    """Returns the claim of `pvc:CLAIM`.

    Raises:
        BadInputError: If it is a folder, or no name of a claim.
    """
    kind, _, claim = where.partition(":")
    if kind == "pvc":
        if OBJECT.fullmatch(claim):
            return claim
        raise BadInputError(f"--{what} {where}: {claim!r} is no name of a claim: {ODD_NAME}")
    raise BadInputError(
        f"--{what} {where}: pods on {place} don't see this machine's folders; give a claim, as pvc:NAME"
    )


def folder_of(place: str, what: str, where: str) -> Path:
    """Returns the absolute folder on the hosts.

    Raises:
        BadInputError: If it is a claim.
    """
    if where.startswith("pvc:"):
        raise BadInputError(f"--{what} {where}: {place} has no claims; give a folder that every host has")
    return Path(where).absolute()


def text_of_option(option: str, path: Path) -> str:
    """Returns the text of a file that an option names.

    Raises:
        BadInputError: If it can't be read.
    """
    try:
        return read_bounded(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not a text in UTF-8"
        raise BadInputError(f"{option}: can't be read ({why})") from error


def pinned(image: str) -> bool:
    """Returns True if a reference has a digest, not only a tag."""
    return bool(re.search(r"@sha256:[0-9a-f]{64}$", image)) or image.endswith((".sqsh", ".sif"))


def _default_name(recipe: str, settings: tuple[str, ...]) -> str:
    """Returns a default name, the same for the same request: a second submission resumes the first's run."""
    stem = (
        re.sub(r"[^a-z0-9]+", "-", Path(recipe).stem.lower()).lstrip("-0123456789")[:32].strip("-") or "job"
    )
    return f"{stem}-{hashlib.sha256(json.dumps([recipe, *settings]).encode()).hexdigest()[:8]}"
