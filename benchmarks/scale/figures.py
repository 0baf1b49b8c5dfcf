"""The figures that a job's behavior on many GPUs follows from, each with its unit and its source."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, model_validator

from trainer.config.recipe_file import override
from trainer.config.section import Section, validated
from trainer.config.yaml_text import parse_yaml
from trainer.errors import BadInputError

BASES = ("measured", "assumed", "code", "given")  # what a source begins with
DEFAULT_S = 600.0  # checkpoint.minutes, as it is if nobody sets it
_FILE_BYTES = 1 << 20


class Figures(Section):
    """Figures of a job. A step is an optimizer step; each GPU does the same work on any number of them.

    Links are those of one GPU, in one direction. What is of the whole job says so.
    """

    samples_per_micro_batch_size: int = Field(..., ge=1, le=1 << 24, description="of one GPU")
    micro_batches_per_step: int = Field(..., ge=1, le=1 << 20, description="of one GPU: accumulation")
    forward_s: float = Field(..., gt=0, le=1e6, description="seconds of a micro-batch's forward pass")
    backward_s: float = Field(..., gt=0, le=1e6, description="seconds of its backward pass, nothing sent")
    update_s: float = Field(..., ge=0, le=1e6, description="seconds of the optimizer's update")
    bucket_bytes: tuple[float, ...] = Field(
        ..., min_length=1, max_length=512, description="gradients by DDP bucket, in the order they are ready"
    )
    bucket_ready_share: tuple[float, ...] = Field(
        ..., min_length=1, max_length=512, description="share of backward that is done when each is ready"
    )
    gpus_per_node: int = Field(..., ge=1, le=1024, description="GPUs that share a node's own links")
    node_alpha_s: float = Field(..., ge=0, le=10, description="seconds of a message within a node, empty")
    node_bytes_per_s: float = Field(..., gt=0, le=1e15, description="bytes/s within a node")
    network_alpha_s: float = Field(..., ge=0, le=10, description="seconds of a message between nodes, empty")
    network_bytes_per_s: float = Field(..., gt=0, le=1e15, description="bytes/s between nodes")
    checkpoint_bytes: float = Field(..., gt=0, le=1e15, description="of one checkpoint; rank 0 writes it")
    host_copy_bytes_per_s: float = Field(
        ..., gt=0, le=1e15, description="of the copy that the training waits for"
    )
    disk_bytes_per_s: float = Field(..., gt=0, le=1e15, description="of the write in the background")
    read_bytes_per_s: float = Field(
        ..., gt=0, le=1e15, description="of the storage, all nodes together: at a start each reads it all"
    )
    start_s: float = Field(..., ge=0, le=1e6, description="seconds from the command to the first step")
    detect_s: float = Field(..., ge=0, le=1e6, description="seconds from a failure to the next start")
    node_mtbf_hours: float = Field(..., gt=0, le=1e9, description="mean time between failures of one node")
    store_request_s: float = Field(..., gt=0, le=10, description="seconds of one request to rank 0's store")
    gloo_groups: int = Field(..., ge=0, le=64, description="groups in which every rank meets every other")
    stored_bytes_per_sample: float = Field(..., ge=0, le=1e12, description="bytes a sample is read as")
    loader_cpu_s_per_sample: float = Field(..., ge=0, le=1e6, description="CPU seconds of a loader worker")
    steps_per_row: int = Field(..., ge=1, le=1 << 30, description="log.every")
    row_bytes: float = Field(..., ge=0, le=1e12, description="bytes of a row in all files of the run folder")
    row_s: float = Field(..., ge=0, le=1e4, description="host seconds of a row; all ranks wait for rank 0")

    @model_validator(mode="after")
    def _buckets(self) -> "Figures":
        ready = self.bucket_ready_share
        if len(ready) != len(self.bucket_bytes):
            raise ValueError("bucket_bytes and bucket_ready_share are two lists of one length")
        if any(size < 1 for size in self.bucket_bytes) or not all(0 <= share <= 1 for share in ready):
            raise ValueError("a bucket has a byte or more, and is ready within backward: a share from 0 to 1")
        if list(ready) != sorted(ready):
            raise ValueError("bucket_ready_share: buckets are in the order in which they are ready")
        return self

    @property
    def samples_per_step(self) -> int:
        """Samples per step of one GPU."""
        return self.samples_per_micro_batch_size * self.micro_batches_per_step


class Job(Section):
    """Figures, and where each comes from.

    Attributes:
        about: One line.
        figures: The figures.
        sources: By name of a figure: "measured: the command", "assumed: the publication", "code: the place".
    """

    about: str = Field("", max_length=500, description="one line that the table begins with")
    figures: Figures
    sources: dict[str, str] = Field(..., description="where each figure comes from")

    @model_validator(mode="after")
    def _every_figure_has_a_source(self) -> "Job":
        names = Figures.model_fields
        if odd := sorted(self.sources.keys() - names.keys()):
            raise ValueError(f"sources.{odd[0]}: there is no such figure")
        for name in names:
            basis, _, text = self.sources.get(name, "").partition(":")
            if basis not in BASES or not text.strip():
                raise ValueError(
                    f"sources.{name} is missing or says nothing: begin it with one of "
                    f"{', '.join(f'{one}:' for one in BASES)} and say from where"
                )
        return self


def read_job(path: Path, settings: Sequence[str] = (), comm: Path | None = None) -> Job:
    """Reads a file of figures (YAML or JSON).

    Args:
        path: The file.
        settings: NAME=VALUE of figures that replace the file's.
        comm: What `python -m benchmarks comm --json` printed: its link replaces the node's own, or
            the one between nodes where it was measured on several hosts.

    Raises:
        BadInputError: If a file can't be read, or a figure is missing, unknown or impossible.
    """
    values = parse_yaml(_text(path), str(path))
    if not isinstance(values, dict) or not isinstance(values.get("figures"), dict):
        raise BadInputError(f"{path}: no file of figures: it needs the keys about, figures and sources")
    sources = values.get("sources")
    if not isinstance(sources, dict):
        raise BadInputError(f"{path}: 'sources' is missing: say where each figure comes from")
    sources = dict(sources)
    figures = dict(values["figures"])
    if comm is not None:
        link = read_link(comm)
        where = "network" if link.between_hosts else "node"
        figures |= {f"{where}_alpha_s": link.alpha_s, f"{where}_bytes_per_s": link.bytes_per_s}
        from_it = f"measured: python -m benchmarks comm --json, {comm.name}"
        sources |= {f"{where}_alpha_s": from_it, f"{where}_bytes_per_s": from_it}
    for setting in settings:
        name = setting.partition("=")[0].strip()
        figures = override(figures, [setting])
        if name in Figures.model_fields:
            sources[name] = f"given: --set {name}"
    validated(Figures, figures, str(path))  # names the figure itself where one is wrong
    return validated(Job, {**values, "figures": figures, "sources": sources}, str(path))


class Link(NamedTuple):
    """A link between two ranks: how many there were and whether on several hosts, seconds, bytes/s."""

    ranks: int
    between_hosts: bool
    alpha_s: float
    bytes_per_s: float


def read_link(path: Path) -> Link:
    """The link that `python -m benchmarks comm --json` saw.

    Its line is of whole all-reduces, seconds = alpha_s + bytes / bytes_per_s; on a ring of n ranks these are
    2 (n - 1) messages one after the other, each of an n-th of the bytes.

    Raises:
        BadInputError: If that isn't in the file.
    """
    try:
        found = json.loads(_text(path))
        ranks, alpha, speed = int(found["ranks"]), float(found["alpha_s"]), float(found["bytes_per_s"])
        if ranks < 2 or not alpha >= 0 or not speed > 0:
            raise ValueError("no link")
    except (ValueError, KeyError, TypeError) as error:
        raise BadInputError(
            f"{path}: not what `benchmarks comm --json` prints on two ranks or more: ranks, alpha_s "
            "and bytes_per_s are looked for"
        ) from error
    messages = 2 * (ranks - 1)
    return Link(ranks, int(found.get("hosts", 1)) > 1, alpha / messages, speed * messages / ranks)


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _FILE_BYTES:
            raise BadInputError(f"{path}: larger than 1 MiB, so no file of figures")
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path}: not a text file in UTF-8") from error
    except OSError as error:
        raise BadInputError(f"{path}: can't be read ({error.strerror}); give a file of figures") from error


def as_mapping(job: Job) -> dict[str, Any]:
    """A job as plain values, for JSON and YAML."""
    return job.model_dump(mode="json")
