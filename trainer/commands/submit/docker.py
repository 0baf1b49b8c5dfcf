"""A job as one `docker run`."""

import shlex
from pathlib import Path

from trainer.commands.submit import container
from trainer.commands.submit.environment import from_files
from trainer.commands.submit.spec import JobSpec, Site, folder_of
from trainer.errors import BadInputError
from trainer.host.engine import run_words


def run_line(spec: JobSpec, site: Site) -> list[str]:
    """Returns the words of the command line.

    Raises:
        BadInputError: For several nodes, a claim instead of a folder, or a file of variables it can't use.
    """
    if spec.nnodes > 1:
        raise BadInputError(
            f"--nnodes {spec.nnodes}: docker run starts one container; use --on slurm or kubernetes"
        )
    variables = container.variables(spec)
    shown = [(str(source), target, written) for source, target, written in _mounts(spec)]
    line = run_words(container.fixed_user(spec), spec.shm_gib, spec.stop_seconds, shown, variables)
    line += ["--detach", "--name", spec.name, "--read-only"]
    line += ["--cpus", str(spec.cpus_per_node), "--memory", f"{spec.memory_gib}g"]
    line += ["--gpus", str(spec.gpus_per_node)] if spec.gpus_per_node else []
    for path in from_files(site):
        line += ["--env-file", str(path)]
    for where in container.scratch(spec):
        line += ["--tmpfs", f"{where}:exec"]
    return [*line, container.check_image(spec), *container.timed(spec)]


def render(spec: JobSpec, site: Site) -> str:
    """Formats the command line, an option per line.

    Raises:
        BadInputError: As `run_line`.
    """
    text = ""
    for word in run_line(spec, site):
        begins = word.startswith("--") or word in (spec.image, "timeout", "trainer")
        text += (" \\\n  " if begins else " ") + shlex.quote(word) if text else word
    return f"{text}\n"


def _mounts(spec: JobSpec) -> list[tuple[Path, str, bool]]:
    """Returns local folders and files, their paths inside the container, and whether they are writable."""
    found = [(folder_of("docker", "runs", spec.runs), container.RUNS_MOUNT, True)]
    if spec.data:
        found.append((folder_of("docker", "data", spec.data), container.DATA, False))
    if spec.cache:
        found.append((folder_of("docker", "cache", spec.cache), container.CACHE, True))
    return found + [(file, target, False) for file, target in container.files(spec)]
