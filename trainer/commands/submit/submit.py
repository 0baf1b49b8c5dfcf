"""Places that a job can run on; submits a rendered job."""

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from trainer.commands.submit import docker, kubernetes, slurm
from trainer.commands.submit.spec import JobPlace, JobSpec, Site
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError, writing
from trainer.host.gpus import host_gpus


class How(NamedTuple):
    """Rendering and submission of a job at one place.

    Attributes:
        tool: The program that submits it.
        ending: Suffix of the file's name.
        render: The text of the file; raises BadInputError if the place can't run such a job.
    """

    tool: str
    ending: str
    render: Callable[[JobSpec, Site], str]


JOB_PLACES: dict[JobPlace, How] = {
    "docker": How("docker", ".sh", docker.render),
    "slurm": How("sbatch", ".sbatch", slurm.render),
    "kubernetes": How("kubectl", ".yaml", kubernetes.render),
    "kubeflow": How("kubectl", ".yaml", kubernetes.render_train_job),
}


def check_here(place: JobPlace, spec: JobSpec) -> None:
    """Checks on this machine what can be known before the job is submitted.

    Raises:
        BadInputError: If a folder isn't there, or GPUs are too few.
    """
    if place != "docker":
        return
    for what, where in (("data", spec.data), ("cache", spec.cache)):
        if where and not Path(where).is_dir():
            raise BadInputError(f"--{what} {where}: no such folder here; make it first")
    gpus = host_gpus()
    if gpus is not None and spec.gpus_per_node > len(gpus):
        raise BadInputError(f"--gpus-per-node {spec.gpus_per_node}: nvidia-smi shows {len(gpus)}")


def submit(place: JobPlace, spec: JobSpec, site: Site, text: str) -> int:
    """Writes the job's file, submits it, and prints how to follow and stop the job.

    Raises:
        BadInputError: If the tool for it isn't on PATH.
    """
    tool, ending, _ = JOB_PLACES[place]
    if shutil.which(tool) is None:
        raise BadInputError(f"no {tool} on PATH, which --on {place} needs; --dry-run prints the file instead")
    file = job_folder(spec) / f"{spec.name}{ending}"
    _write(file, text)
    if place == "docker":
        # Of a run that ended: it goes on in a new container, of the same name. One that runs stays.
        subprocess.run(["docker", "rm", spec.name], capture_output=True, check=False)
    words = _submits(place, spec, site, file)
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        message = " ".join((done.stderr or done.stdout).split()) or f"it ended with code {done.returncode}"
        print(f"trainer: error: {tool}: {message.removeprefix(f'{tool}: ')}", file=sys.stderr)
        return EXIT_FAILED
    if place in ("kubernetes", "kubeflow") and re.search(r"job\S*/\S+ unchanged", done.stdout):
        print(
            f"trainer: error: {spec.name} is there already, as it stands in {file}: if it has ended, "
            f"kubectl delete -f {shlex.quote(str(file))} first; its run goes on",
            file=sys.stderr,
        )
        return EXIT_FAILED
    print(f"submitted  {shlex.join(words) if place != 'docker' else f'sh {shlex.quote(str(file))}'}")
    follow, stop = _afterwards(place, spec, site, file, text, done.stdout)
    print(f"follow     {shlex.join(follow)}\nstop       {shlex.join(stop)}")
    return EXIT_DONE


def job_folder(spec: JobSpec) -> Path:
    """Returns the folder of jobs' files: beside the run folders, which must be empty at first."""
    runs = Path("runs" if spec.runs.startswith("pvc:") else spec.runs)
    with writing(f"--runs {runs}"):
        (runs / ".jobs").mkdir(parents=True, exist_ok=True)
    return runs / ".jobs"


def _write(file: Path, text: str) -> None:
    """Writes a file that only its owner can read: variables may be secrets.

    Raises:
        BadInputError: If it can't be written; then there is no file.
    """
    try:
        file.unlink(missing_ok=True)
        file.touch(0o600)
        file.write_text(text, "utf-8")
    except OSError as error:
        with contextlib.suppress(OSError):
            file.unlink()
        raise BadInputError(f"{file}: can't be written ({error.strerror}); give another --runs") from error


def _submits(place: JobPlace, spec: JobSpec, site: Site, file: Path) -> list[str]:
    if place == "docker":
        return docker.run_line(spec, site)
    return ["sbatch", str(file)] if place == "slurm" else ["kubectl", "apply", "--filename", str(file)]


def _afterwards(
    place: JobPlace, spec: JobSpec, site: Site, file: Path, text: str, output: str
) -> tuple[Sequence[str], Sequence[str]]:
    """Returns the commands that follow the log, and that stop the job with a checkpoint."""
    if place == "docker":
        return ["docker", "logs", "--follow", spec.name], ["docker", "stop", spec.name]
    if place == "slurm":
        number = (re.findall(r"\d+", output) or ["JOB"])[-1]
        log = re.search(r"^#SBATCH --output=(\S+)", text, re.M)
        found = re.sub(r"%[jA]", number, log[1]).replace("%a", "0") if log else ""
        follow = ["tail", "-F", found] if found else ["squeue", "--job", number]
        return follow, ["scancel", number]
    selected = ["--selector", f"app.kubernetes.io/instance={spec.name}"]
    many = ["--max-log-requests", str(spec.nnodes), "--prefix"] if spec.nnodes > 1 else []
    follow = ["kubectl", "logs", "--namespace", site.namespace, "--follow", *many, *selected]
    return follow, ["kubectl", "delete", "--filename", str(file)]
