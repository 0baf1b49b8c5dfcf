"""Turns the options of `trainer submit` into jobs, checked before anything is submitted."""

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from trainer.commands.submit import environment, slurm, sweep
from trainer.commands.submit.carried import INSIDE, carried, local_paths, unseen_folders
from trainer.commands.submit.spec import OPTIONS, JobPlace, JobSpec, Site, pinned
from trainer.commands.submit.submit import JOB_PLACES, check_here, submit
from trainer.config.recipe_file import provisional, read_recipe
from trainer.errors import EXIT_DONE, BadInputError
from trainer.host.files import read_bounded

_EFA = "vpc.amazonaws.com/efa"
_RECIPE_FILES = (".yaml", ".yml", ".py")


def launch_job(options: argparse.Namespace) -> int:
    """Runs `trainer submit`; returns 1 if the engine or cluster refused the job."""
    place = cast(JobPlace, options.place)
    given = {name: value for name, value in vars(options).items() if value is not None}
    site = _model(Site, {name: given[name] for name in Site.model_fields if name in given})
    _check_place(place, site)
    spec = _model(JobSpec, job_fields(options, place))
    specs = [spec]
    if options.sweep:
        specs = [_model(JobSpec, fields) for fields in sweep.jobs(options.sweep, spec)]
    entered = place != "slurm" or site.container != "venv"
    if entered:
        spec, specs = carried(spec, place), [carried(one, place) for one in specs]
    # An array of Slurm is one job.
    array = place == "slurm" and bool(options.sweep)
    jobs = [spec] if array else specs
    files = (
        [slurm.render_array(specs, site, spec.name)]
        if array
        else [JOB_PLACES[place].render(one, site) for one in specs]
    )
    for one in specs:
        check_here(place, one)
        _check_recipe(one)
    if place == "slurm":
        for line in unseen_folders(spec, site, {} if entered else local_paths(spec)):
            _warn(line)
    if spec.image and not pinned(spec.image):
        _warn(
            f"--image {spec.image} is not a digest: the tag may be another image tomorrow, in which a run "
            "that goes on isn't the same"
        )
    if options.dry_run:
        print("\n---\n".join(text.rstrip("\n") for text in files))
        return EXIT_DONE
    for one, text in zip(jobs, files, strict=True):
        if code := submit(place, one, site, text):
            return code
    if options.sweep:
        listed = sweep.write_list(spec, specs)
        print(f"runs       {listed}")
        print(f"compare    {shlex.join(['trainer', 'report', *(sweep.folder(one) for one in specs)])}")
    return EXIT_DONE


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
