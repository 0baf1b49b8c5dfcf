"""Turns the options of `trainer submit` into a job, checks it, and submits it to one of the places."""

import argparse
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from pydantic import ValidationError

from trainer.commands.submit import docker, environment, kubernetes, slurm
from trainer.commands.submit.carried import INSIDE, carried, local_paths, unseen_folders
from trainer.commands.submit.spec import OPTIONS, JobPlace, JobSpec, Site, pinned
from trainer.config.recipe_file import provisional, read_recipe
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError, writing
from trainer.host.files import read_bounded
from trainer.host.gpus import host_gpus

_EFA = "vpc.amazonaws.com/efa"
_RECIPE_FILES = (".yaml", ".yml", ".py")


def launch_job(options: argparse.Namespace) -> int:
    """Runs `trainer submit`; returns 1 if the engine or cluster refused the job."""
    place = cast(JobPlace, options.place)
    given = {name: value for name, value in vars(options).items() if value is not None}
    site = _model(Site, {name: given[name] for name in Site.model_fields if name in given})
    _check_place(place, site)
    spec = _model(JobSpec, job_fields(options, place))
    entered = place != "slurm" or site.container != "venv"
    if entered:
        spec = carried(spec, place)
    text = JOB_PLACES[place].render(spec, site)
    check_here(place, spec)
    _check_recipe(spec)
    if place == "slurm":
        for line in unseen_folders(spec, site, {} if entered else local_paths(spec)):
            _warn(line)
    if spec.image and not pinned(spec.image):
        _warn(
            f"--image {spec.image} is not a digest: the tag may be another image tomorrow, in which a run "
            "that goes on isn't the same"
        )
    if options.dry_run:
        print(text.rstrip("\n"))
        return EXIT_DONE
    return submit(place, spec, site, text)


def job_fields(options: argparse.Namespace, place: JobPlace) -> dict[str, Any]:
    """Returns the fields of the job that the options set.

    Raises:
        BadInputError: If --nnodes or --env is malformed.
    """
    least, _, most = options.nnodes.rpartition(":")
    if not most.isdecimal() or (least and not least.isdecimal()):
        raise BadInputError(f"--nnodes {options.nnodes}: give a number, or MIN:MAX")
    caller = f"{os.getuid()}:{os.getgid()}" if place == "docker" else None
    fields = {
        **vars(options),
        "nnodes": int(most),
        "min_nnodes": int(least) if least else None,
        "user": options.user or caller,
        "environment": _environment(options, place),
        "recipe_text": _text(options.recipe),
    }
    return {name: fields[name] for name in JobSpec.model_fields if fields.get(name) is not None}


def _environment(options: argparse.Namespace, place: JobPlace) -> dict[str, str]:
    """Returns the environment variables of a job; none may be a secret."""
    found = dict(map(_variable, options.env))
    for name, value in found.items():
        environment.refuse_secret(name, value, place)
    # EFA's devices are reached by libfabric, and not by verbs.
    if options.rdma and not options.rdma.startswith(_EFA):
        # NCCL ends the run where it can't, instead of taking TCP without a word.
        found = {"NCCL_NET": "IB", **found}
    return found


def _check_place(place: JobPlace, site: Site) -> None:
    """Refuses options that a place doesn't support.

    Raises:
        BadInputError: For the first such option.
    """
    cluster = place in environment.CLUSTERS
    for name, supported, instead in (
        ("queue", cluster, "Slurm's are --partition and --qos"),
        ("service_account", cluster, "pods have one"),
        ("sbatch_arg", place == "slurm", "change what --dry-run prints, as by kustomize"),
        ("rdma", cluster or place == "slurm", "its container is on this machine"),
    ):
        if getattr(site, name) and not supported:
            raise BadInputError(f"--{name.replace('_', '-')}: {place} has none; {instead}")
    if site.rdma and (site.rdma == "host") == cluster:
        wanted = "RESOURCE=N, as rdma/hca_shared_devices_a=1 (kubectl describe node shows it)"
        raise BadInputError(f"--rdma {site.rdma}: on {place} give {wanted if cluster else 'host'}")
    if site.rdma and site.rdma.startswith(_EFA):
        _warn(
            f"--rdma {site.rdma}: NCCL reaches EFA by a plugin (aws-ofi-nccl), which the image doesn't have"
        )


def _variable(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals:
        raise BadInputError(f"--env {word}: give NAME=VALUE")
    return name, value


def _text(recipe: str) -> str | None:
    """Reads a local recipe file; None if it is a name, or a path inside the container."""
    path = Path(recipe)
    if path.suffix not in _RECIPE_FILES or (recipe.startswith(INSIDE) and not path.exists()):
        return None
    read_recipe(recipe)  # says what is wrong with it
    return read_bounded(path).decode()


def _model(model: type[Any], fields: dict[str, Any]) -> Any:
    """Makes a model of fields, or raises one line that names the option.

    Raises:
        BadInputError: For the first field that is wrong.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        problem = error.errors()[0]
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] != "value_error":
            message = message[:1].lower() + message[1:]
        name, given = str(problem["loc"][0]) if problem["loc"] else "", f" {problem['input']}"
        if not name:  # of several fields: it begins with the first one's name
            name, _, message = message.partition(": ")
            given = ""
        option = "--" + OPTIONS.get(name, name).replace("_", "-")
        raise BadInputError(f"{option}{given}: {message}") from error


def _check_recipe(spec: JobSpec) -> None:
    """Checks the recipe now instead of when the job starts.

    Raises:
        BadInputError: If the recipe or a setting is wrong.
    """
    if spec.recipe.startswith(INSIDE) and spec.recipe_text is None:
        _warn(f"{spec.recipe} can't be read here: its keys are checked when the job begins")
        return
    recipe, chosen_there = provisional(spec.recipe, spec.all_settings())
    batch, micro_batch_size = recipe.data.global_batch_size, recipe.data.micro_batch_size
    ranks = spec.nnodes * spec.ranks
    if not chosen_there and spec.min_nnodes is None and batch % (micro_batch_size * ranks):
        raise BadInputError(
            f"data.global_batch_size={batch} is not a multiple of data.micro_batch_size={micro_batch_size} x "
            f"{ranks} ranks: change one of them, or --nnodes, or the ranks of a node"
        )


def _warn(line: str) -> None:
    print(f"trainer: warning: {line}", file=sys.stderr)


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
        found = log[1].replace("%j", number) if log else ""
        follow = ["tail", "-F", found] if found else ["squeue", "--job", number]
        return follow, ["scancel", number]
    selected = ["--selector", f"app.kubernetes.io/instance={spec.name}"]
    many = ["--max-log-requests", str(spec.nnodes), "--prefix"] if spec.nnodes > 1 else []
    follow = ["kubectl", "logs", "--namespace", site.namespace, "--follow", *many, *selected]
    return follow, ["kubectl", "delete", "--filename", str(file)]
