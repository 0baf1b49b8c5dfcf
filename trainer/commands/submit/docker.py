"""A job as one `docker run`."""

import csv
import io
import shlex
from pathlib import Path

from trainer.commands.submit import container
from trainer.commands.submit.spec import JobSpec, Site, folder_of
from trainer.errors import BadInputError


def words(spec: JobSpec) -> list[str]:
    """The words of the command line.

    Raises:
        BadInputError: For several nodes, or a claim instead of a folder.
    """
    if spec.nodes > 1:
        raise BadInputError(
            f"--nodes {spec.nodes}: docker run starts one container; use --on compose, slurm or kubernetes"
        )
    line = ["docker", "run", "--detach", "--name", spec.name, "--user", spec.user]
    line += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only"]
    line += ["--cpus", str(spec.cpus_per_node), "--memory", f"{spec.memory_gib}g"]
    line += ["--shm-size", f"{spec.shm_gib}g", "--ulimit", f"stack={container.STACK_BYTES}"]
    line += ["--stop-timeout", str(spec.stop_seconds)]
    line += ["--gpus", str(spec.gpus_per_node)] if spec.gpus_per_node else []
    for where in (*container.SCRATCH.values(), *([] if spec.cache else [container.CACHE])):
        line += ["--tmpfs", f"{where}:exec"]
    for folder, where, written in mounts(spec, "docker"):
        line += ["--mount", _fields("type=bind", f"source={folder}", f"target={where}", *_access(written))]
    for name, value in container.variables(spec).items():
        line += ["--env", f"{name}={value}"]
    return [*line, container.check_image(spec), *container.timed(spec)]


def render(spec: JobSpec, _site: Site) -> str:
    """The command line, an option a line.

    Raises:
        BadInputError: As of `words`.
    """
    text = ""
    for word in words(spec):
        begins = word.startswith("--") or word in (spec.image, "timeout", "trainer")
        text += (" \\\n  " if begins else " ") + shlex.quote(word) if text else word
    return f"{text}\n"


def mounts(spec: JobSpec, place: str) -> list[tuple[Path, str, bool]]:
    """Folders and files of this machine, where the container sees them, and whether it may write there."""
    found = [(folder_of(place, "runs", spec.runs), container.RUNS, True)]
    if spec.data:
        found.append((folder_of(place, "data", spec.data), container.DATA, False))
    if spec.cache:
        found.append((folder_of(place, "cache", spec.cache), container.CACHE, True))
    return found + [(file, there, False) for file, there in container.files(spec)]


def _access(written: bool) -> list[str]:
    return [] if written else ["readonly"]


def _fields(*fields: str) -> str:
    """The engine reads --mount as a line of CSV: a folder's name may hold a comma."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()
