"""Values of a job from the options, and the template that they are filled into."""

import argparse
import hashlib
import json
import os
import posixpath
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, meta
from jinja2.sandbox import SandboxedEnvironment
from markupsafe import Markup

from trainer.commands.job import TEMPLATES
from trainer.config.recipe_file import provisional
from trainer.config.redact import is_secret, redact_text
from trainer.errors import EXIT_DONE, BadInputError
from trainer.host.environment import IMAGE_DIGEST
from trainer.host.files import read_bounded

_CLUSTERS = ("kubernetes", "kubeflow")
_DEFAULTS: dict[str, Any] = {
    "settings": [],
    "nodes": "1",
    "gpus_per_node": "0",
    "nproc_per_node": 1,
    "shm_size": "2G",
    "time": "1-00:00",
    "grace": 90,
    "venv": ".venv",
    "volume": [],
    "env": [],
    "env_from": [],
    "master_port": 29500,
}
_CPUS, _GB = 4, 16  # for each GPU of a node; for a node without any
# Options that make other values than one of their own name; every template has the command.
_VALUES_OF = {
    "gpus_per_node": {"gpus"},
    "time": {"minutes", "seconds"},
    "volume": {"volumes", "mounts"},
    **{name: {"command"} for name in ("settings", "out", "grace", "nproc_per_node", "venv")},
}
# What follows a stop: the ranks' grace, then the launcher's own end, before the place kills what is left.
_LAUNCHER_SECONDS = 30
# What the image writes to, as its root is read-only.
_SCRATCH = ("/tmp", "/home/trainer", "/cache")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d+):(?P<minutes>\d\d)(?::(?P<seconds>\d\d))?", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# By these a launcher hears of its node, so that they are nobody else's to set.
_OURS = re.compile(r"NNODES|NODE_RANK|MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE|LOCAL_.*|PET_.*|SLURM_.*")


class Volume(NamedTuple):
    """A folder or a claim, and where the container sees it."""

    source: str
    target: str
    read_only: bool


def print_job(options: argparse.Namespace) -> int:
    """Runs `trainer job`."""
    place, environment = options.place, make_environment(options.place)
    name = str(options.template or TEMPLATES[place])
    source = _text(name) if options.template else environment.loader.get_source(environment, name)[0]  # type: ignore[union-attr]
    if options.print_template:
        sys.stdout.write(source)
        return EXIT_DONE
    given = {key: value for key, value in vars(options).items() if value is not None}
    values = job_values(place, given)
    try:
        used = set(_used(environment, source))
        if unknown := sorted(used - values.keys()):
            known = ", ".join(sorted(values))
            raise BadInputError(f"{name}: no value is called {', '.join(unknown)}; there are {known}")
        for option in given.keys() - {"command", "run", "place", "recipe", "template", "print_template"}:
            makes = (
                {"gpu_type"}
                if option == "gpus_per_node" and values["gpu_type"]
                else _VALUES_OF.get(option, {option})
            )
            if not used & makes:
                raise BadInputError(
                    f"--{option.replace('_', '-')} {given[option]}: {name} has no place for it"
                )
        text = environment.from_string(source).render(values)
    except BadInputError:
        raise
    except Exception as error:  # a template of the user's own may raise anything
        line = getattr(error, "lineno", None)
        raise BadInputError(f"{name}{f', line {line}' if line else ''}: {error}") from error
    sys.stdout.write(text)
    return EXIT_DONE


def make_environment(place: str) -> Environment:
    """Returns the templates' environment, which quotes each value for the shell, or as JSON for YAML."""

    def quoted(value: Any) -> Any:
        if isinstance(value, Markup):
            return value
        if place in _CLUSTERS:
            return json.dumps(value, ensure_ascii=False, default=str)
        return shlex.quote(str(value))

    environment = SandboxedEnvironment(
        loader=PackageLoader("trainer", "commands/job/templates"),
        undefined=StrictUndefined,
        finalize=quoted,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    del environment.globals["namespace"]  # a value of ours
    return environment


def _text(path: str) -> str:
    try:
        return read_bounded(Path(path)).decode()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "not a text in UTF-8"
        raise BadInputError(f"--template {path}: can't be read ({why}); give another") from error


def _used(environment: Environment, source: str) -> Iterator[str]:
    """Yields the variables of a template and of those that it includes."""
    tree = environment.parse(source)
    yield from meta.find_undeclared_variables(tree)
    for name in filter(None, meta.find_referenced_templates(tree)):
        yield from _used(environment, environment.loader.get_source(environment, name)[0])  # type: ignore[union-attr]


def job_values(place: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of the templates.

    Args:
        place: Where the job runs.
        given: The options that were given, by their names.

    Raises:
        BadInputError: For the first that is wrong.
    """
    for name, value in given.items():
        for text in value if isinstance(value, list) else [value]:
            _check_text(
                f"--{name.replace('_', '-')}", str(text), path=name in ("out", "venv", "volume", "env_from")
            )
    options = {**_DEFAULTS, **given}
    recipe, settings, image = options["recipe"], options["settings"], options.get("image")
    lowest, highest = _nodes(place, options["nodes"])
    gpus, gpu_type = _gpus(options["gpus_per_node"])
    options = {"cpus_per_task": _CPUS * max(1, gpus), "mem": f"{_GB * max(1, gpus)}G", **options}
    ranks = gpus or options["nproc_per_node"]
    for option, clash, why in (
        ("nproc_per_node", gpus, "with GPUs there is a rank for each"),
        ("venv", image, "the image has its own"),
        ("master_port", place == "kubeflow", "a TrainJob's nodes meet at a port of its own"),
    ):
        if clash and option in given:
            raise BadInputError(f"--{option.replace('_', '-')} {given[option]}: {why}; leave it out")
    for name in ("nproc_per_node", "cpus_per_task", "grace", "master_port"):
        if not 0 < options[name] < 65536:
            raise BadInputError(f"--{name.replace('_', '-')} {options[name]}: give 1 to 65535")
    minutes, stop = minutes_of(options["time"]), options["grace"] + _LAUNCHER_SECONDS
    if minutes * 60 <= stop + 60:
        raise BadInputError(
            f"--time {options['time']}: the signal to stop comes {stop} s before the end, so that is too "
            "short; give more, or a shorter --grace"
        )
    if image is None and place != "slurm":
        raise BadInputError("--image is missing: give a reference, best with its digest")
    if image is not None and (not image or image.startswith("-")):
        raise BadInputError(
            f"--image {image}: is no reference, which begins with a letter or digit; give another"
        )
    _check_recipe(recipe, settings, lowest * ranks if lowest == highest else 0)
    out = options.get("out") or default_out(recipe, settings)
    volumes = [_volume(place, text) for text in options["volume"]]
    container = _container(image) if place == "slurm" else ""
    out, run = (str(Path(out).absolute()),) * 2 if image is None else (out, _on_volume(out, volumes))
    per_node = ["--gpus", str(gpus)] if gpus else ["--nproc-per-node", str(ranks)]
    program = "trainer" if image else str(Path(options["venv"]).absolute() / "bin" / "trainer")
    days, rest = divmod(minutes, 24 * 60)
    return {
        "place": place,
        "name": _name(out),
        "command": [program, "train", recipe, *per_node, "--out", out, "--grace", str(options["grace"])]
        + [word for one in settings for word in ("--set", one)],
        "run": run,
        "nodes": options["nodes"] if place == "slurm" else lowest,
        "min_nodes": lowest,
        "max_nodes": highest,
        "gpus": gpus,
        "gpu_type": gpu_type,
        "ranks": ranks,
        "cpus_per_task": options["cpus_per_task"],
        "mem": _size("--mem", options["mem"]) if options["mem"] != "none" else None,
        "shm_size": _size("--shm-size", options["shm_size"]),
        "minutes": minutes,
        "seconds": minutes * 60,
        "time_limit": f"{days}-" * (days > 0) + f"{rest // 60:02}:{rest % 60:02}:00",
        "stop_seconds": stop,
        "container": container,
        "image": _enroot(image) if image and container == "pyxis" else image,
        "volumes": volumes,
        "mounts": [f"{one.source}:{one.target}" + ":ro" * one.read_only for one in volumes],
        "scratch": [where for where in _SCRATCH if where not in {one.target for one in volumes}],
        "env": _variables(options["env"], image, gpus),
        "env_from": options["env_from"]
        if place in _CLUSTERS
        else [str(Path(one).absolute()) for one in options["env_from"]],
        "master_port": options["master_port"],
        "user": _user(place, options.get("user")),
        **{name: options.get(name) for name in ("partition", "account", "qos", "namespace")},
    }


def _check_text(option: str, text: str, path: bool) -> None:
    """Refuses control characters; in a path `%`, which Slurm replaces; in its names `\\`, which it drops."""
    if _CONTROL.search(text):
        raise BadInputError(f"{option} {text!r}: holds a control character; leave it out")
    if path and "%" in text:
        raise BadInputError(f"{option} {text}: no % in a path, which Slurm replaces; give another")
    if option in ("--partition", "--account", "--qos") and "\\" in text:
        raise BadInputError(f"{option} {text}: no \\ in a name, which sbatch drops; give another")


def minutes_of(text: str) -> int:
    """Parses a time limit of Slurm to minutes: `D-HH:MM`, `HH:MM`, `HH:MM:SS`, or plain minutes.

    Raises:
        BadInputError: If it is none of these, or zero.
    """
    minutes = int(text) if re.fullmatch("[0-9]{1,7}", text) else 0
    if found := _TIME.fullmatch(text):
        days, hours, small, seconds = (
            int(found[name] or 0) for name in ("days", "hours", "minutes", "seconds")
        )
        minutes = (days * 24 + hours) * 60 + small + (seconds > 0)
    if not 1 <= minutes <= 366 * 24 * 60:
        raise BadInputError(f"--time {text}: give minutes, HH:MM, HH:MM:SS or D-HH:MM, up to 366 days")
    return minutes


def _nodes(place: str, text: str) -> tuple[int, int]:
    """Returns the lowest and the highest number of nodes."""
    found = re.fullmatch(r"([1-9][0-9]{0,3})(?:-([1-9][0-9]{0,3}))?", text)
    lowest, highest = (int(found[1]), int(found[2] or found[1])) if found else (2, 1)
    if lowest > highest or (lowest < highest and place != "slurm"):
        ways = (
            "a number, as 2, or a range, as 2-4" if place == "slurm" else f"a number ({place} has no ranges)"
        )
        raise BadInputError(f"--nodes {text}: give {ways}")
    return lowest, highest


def _gpus(text: str) -> tuple[int, str]:
    """Returns the number of GPUs of a node, and their type or ""."""
    found = re.fullmatch(r"(?:([\w.-]+):)?([0-9]{1,2})", text, re.ASCII)
    if not found:
        raise BadInputError(f"--gpus-per-node {text}: give a number, as 8, or TYPE:N, as h100:8")
    return int(found[2]), found[1] or ""


def _size(option: str, text: str) -> str:
    if not re.fullmatch("[1-9][0-9]{0,6}[MGT]", text):
        raise BadInputError(f"{option} {text}: give a size, as 64G (M, G or T)")
    return text


def _user(place: str, text: str | None) -> tuple[int, int] | None:
    """Returns UID and GID; None: the image's, or those of the namespace."""
    if text is None:
        return (os.getuid(), os.getgid()) if place == "docker" else (1000, 1000)
    if text == "none":
        return None
    found = re.fullmatch("([0-9]{1,10}):([0-9]{1,10})", text)
    if not found or max(map(int, found.groups())) > 2**31 - 1:
        raise BadInputError(f"--user {text}: give two numbers, UID:GID, as 1000:1000; or none")
    if place in _CLUSTERS and int(found[1]) == 0:
        raise BadInputError(f"--user {text}: these pods never run as root; give another")
    return int(found[1]), int(found[2])


def _volume(place: str, text: str) -> Volume:
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not source or not target.startswith("/") or mode not in ("", "ro", "rw") or re.search('[,"]', text):
        raise BadInputError(f'--volume {text}: give SOURCE:TARGET or SOURCE:TARGET:ro, without , and "')
    there = source if place in _CLUSTERS else str(Path(source).absolute())
    return Volume(there, posixpath.normpath(target), mode == "ro")


def _container(image: str | None) -> str:
    """Returns what brings a step of Slurm into the image; "" without one."""
    if image is None:
        return ""
    return "apptainer" if image.startswith("docker://") or image.endswith(".sif") else "pyxis"


def _enroot(image: str) -> str:
    """Formats a reference as enroot does: `#` after the registry's host, and no tag beside a digest."""
    if image.startswith(("/", "./")) or image.endswith(".sqsh"):
        return image
    host, slash, rest = re.sub(r":[^:/@]+@", "@", image).partition("/")
    return (
        f"{host}#{rest}"
        if slash and ("." in host or ":" in host or host == "localhost")
        else host + slash + rest
    )


def _on_volume(out: str, volumes: list[Volume]) -> str:
    """Returns the run folder on the host, or in the claim."""
    inside = PurePosixPath(posixpath.normpath(posixpath.join("/workspace", out)))
    for volume in sorted(volumes, key=lambda one: -len(one.target)):
        if inside.is_relative_to(volume.target):
            if volume.read_only:
                break
            return posixpath.join(volume.source, inside.relative_to(volume.target))
    raise BadInputError(
        f"--out {out}: on no --volume that may be written, so that the run would end with the container; "
        f"give --volume SOURCE:{inside.parent}"
    )


def _variables(words: list[str], image: str | None, gpus: int) -> dict[str, str]:
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not _VARIABLE.fullmatch(name):
            raise BadInputError(f"--env {word}: give NAME=VALUE")
        if _OURS.fullmatch(name):
            raise BadInputError(f"--env {name}: is set by what starts the nodes; leave it out")
        if value and (is_secret(name) or redact_text(value) != value):
            raise BadInputError(
                f"--env {name} looks like a secret, which isn't written down; give --env-from"
            )
        found[name] = value
    digest = (image or "").partition("@")[2]
    # The image asks for every GPU: where NVIDIA's runtime is the default one, a container gets them all.
    fixed = {"NVIDIA_VISIBLE_DEVICES": "void"} if image and not gpus else {}
    return {**({IMAGE_DIGEST: digest} if digest else {}), **fixed, **found}


def default_out(recipe: str, settings: list[str]) -> str:
    """Returns the same run folder for the same recipe and settings: a second job resumes the first one's."""
    stem = re.sub(r"[^a-z0-9]+", "-", Path(recipe).stem.lower())[:32].strip("-") or "job"
    return f"runs/{stem}-{hashlib.sha256(json.dumps([recipe, *settings]).encode()).hexdigest()[:8]}"


def _name(out: str) -> str:
    """Returns a name of a job from its run folder; it begins with a letter, as that of a Service."""
    name = re.sub(r"[^a-z0-9]+", "-", Path(out).name.lower()).strip("-")
    return (name if name[:1].isalpha() else f"job-{name}")[:46].strip("-")


def _check_recipe(name: str, settings: list[str], ranks: int) -> None:
    """Checks the recipe now instead of when the job starts, if it can be read here."""
    if Path(name).suffix in (".yaml", ".yml", ".py") and not Path(name).exists():
        print(
            f"trainer: warning: {name} isn't here: its keys are checked when the job begins", file=sys.stderr
        )
        return
    recipe, chosen_there = provisional(name, settings)
    batch, micro_batch_size = recipe.data.global_batch_size, recipe.data.micro_batch_size
    if ranks and not chosen_there and batch % (micro_batch_size * ranks):
        raise BadInputError(
            f"data.global_batch_size={batch} is not a multiple of data.micro_batch_size={micro_batch_size} x "
            f"{ranks} ranks: change one of them, or --nodes, or the ranks of a node"
        )
