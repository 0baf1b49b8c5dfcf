#!/usr/bin/env python3
"""Runs what `make doctor`, `shell`, `up` and `down` ask for in containers of the image; it says what and why.

Nothing here builds an image, but `up` does where it is missing, and says so. The standard library is enough.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from engine_checks import (
    ROOT,
    call,
    check_engine,
    check_ports,
    check_stack,
    container_gpus,
    has_image,
    image_digest,
    is_rootless,
    last_line,
)

from trainer.errors import BadInputError
from trainer.host.environment import IMAGE_DIGEST
from trainer.host.gpus import Gpu, host_gpus, visible_gpus

SERVICES = {"jupyter": "JUPYTER_PORT", "tensorboard": "TENSORBOARD_PORT", "ssh": "SSH_PORT"}
COMPOSE, GPU_FILE = "docker-compose.yml", "scripts/compose/gpu.yml"
PROJECT, ONE_OFF = "com.docker.compose.project", "com.docker.compose.oneoff=True"
NAME = "COMPOSE_PROJECT_NAME"


def gpus_here() -> tuple[list[Gpu], list[str]]:
    """The host's GPUs, and what CUDA_VISIBLE_DEVICES leaves, as words that CUDA and the engine both take."""
    gpus = host_gpus() or []
    visible, _ = visible_gpus([gpu.uuid for gpu in gpus], os.environ.get("CUDA_VISIBLE_DEVICES"))
    return gpus, visible


def gpu_words(gpus: Sequence[Gpu], chosen: Sequence[str], order: str) -> list[str]:
    """The options of `docker run` that give a container these GPUs and no other.

    Args:
        gpus: The host's.
        chosen: Those to give.
        order: CUDA_DEVICE_ORDER.
    """
    if not chosen:
        return []
    if len(chosen) == len(gpus) and list(chosen) == [gpu.index for gpu in gpus]:
        return ["--gpus", "all"]
    if (
        len({gpu.name for gpu in gpus}) > 1
        and order != "PCI_BUS_ID"
        and any(one.isdecimal() for one in chosen)
    ):
        # CUDA numbers GPUs of several kinds by speed, the engine by the bus: let CUDA choose.
        return ["--gpus", "all", "--env", f"CUDA_VISIBLE_DEVICES={','.join(chosen)}"]
    return ["--gpus", f'"device={",".join(chosen)}"']


def docker_words(
    image: str, gpus: Sequence[str], data: str = "", *, rootless: bool, digest: str = ""
) -> list[str]:
    """`docker run` as this user, on this folder, with no capability that isn't needed."""
    user, group, tty = os.getuid(), os.getgid(), sys.stdin.isatty() and sys.stdout.isatty()
    # Under a rootless engine the container's root is this user. Where root calls, the checkout may be
    # somebody else's: the entrypoint becomes that user, and needs the capabilities for it.
    as_root = rootless or user == 0
    words = ["docker", "run", "--rm", "--user", "0:0" if as_root else f"{user}:{group}", "--cap-drop", "ALL"]
    words += ["--cap-add=SETUID", "--cap-add=SETGID", "--cap-add=KILL"] if as_root else []
    # Compilers recurse deeply.
    words += ["--security-opt", "no-new-privileges", "--ulimit", f"stack={64 << 20}"]
    words += ["--shm-size", "2g", "--stop-timeout", "40"]
    # A cache for each user: compiled code in it is run.
    mounts = [["type=bind", f"source={ROOT}", "target=/workspace"]]
    mounts += [["type=volume", f"source=trainer-cache-{user}", "target=/cache"]]
    mounts += [["type=bind", f"source={data}", f"target={data}", "readonly"]] if data else []
    for fields in mounts:
        # The engine reads --mount as a line of CSV: a folder's name may hold a comma.
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow(fields)
        words += ["--mount", line.getvalue()]
    words += ["--env", "PYTHONPATH=/workspace", *(["--env", f"{IMAGE_DIGEST}={digest}"] if digest else [])]
    # By these the user may read what a group shares. A rootless engine doesn't know the host's.
    shares = [] if as_root else sorted(set(os.getgroups()) - {0, group})
    words += [f"--group-add={one}" for one in shares]
    return [*words, *(["--interactive", "--tty"] if tty else []), *gpus, image]


def container_words(image: str, gpus: Sequence[Gpu], chosen: Sequence[str], data: str) -> list[str]:
    """`docker run` of an image here, with some of the host's GPUs and a folder (or "") to show."""
    words = gpu_words(gpus, chosen, os.environ.get("CUDA_DEVICE_ORDER", ""))
    data = data and str(Path(data).resolve())
    return docker_words(image, words, data, rootless=is_rootless(), digest=image_digest(image))


def say(line: str) -> None:
    """Tells what was chosen, before what runs says anything."""
    print(f"runtime: {line}", flush=True)


def show(words: Sequence[str]) -> None:
    """Prints a command as one would type it."""
    print(" ".join(shlex.quote(word) for word in words), flush=True)


def become(words: Sequence[str]) -> NoReturn:
    """Prints a command and becomes it: signals and the exit code are its own."""
    show(words)
    os.execvp(words[0], list(words))


def doctor(options: argparse.Namespace) -> None:
    """`make doctor`: looks at this machine from .venv, then at what a container of the image sees of it."""
    image = options.image or f"trainer:{check_stack(options.stack).name}-train"
    here = [f"{options.venv}/bin/trainer", "doctor", *options.words]
    show(here)
    code = subprocess.call(here)
    if code == 2:  # bad input: a container would say the same once more
        raise SystemExit(code)
    try:
        check_engine()
        if not has_image(image):
            raise BadInputError(f"no image {image}; make image STACK={options.stack} builds it")
    except BadInputError as error:
        say(f"not looked at from a container: {error}")
        raise SystemExit(code) from None
    gpus, visible = gpus_here()
    seen = visible and container_gpus(image)[0]
    words = container_words(image, gpus, visible if seen else [], options.data)
    words += ["trainer", "doctor", *options.words]
    say(f"from a container of {image}")
    show(words)
    raise SystemExit(max(code, subprocess.call(words)))


def shell(options: argparse.Namespace) -> None:
    """`make shell`: bash in the dev image."""
    check_stack(options.stack)
    check_engine()
    image = options.image or f"trainer:{options.stack}-dev"
    if not options.image and not has_image(image):
        raise BadInputError(f"no image {image}: make image STACK={options.stack} builds it")
    gpus, visible = gpus_here()
    if visible:
        seen, blind = container_gpus(image)
        say(f"without GPUs: {blind}" if blind else f"with the host's GPUs ({len(seen)} seen)")
        visible = visible if seen else []
    become([*container_words(image, gpus, visible, options.data), *(options.words or ["bash"])])


def up(options: argparse.Namespace) -> None:
    """`make up`: JupyterLab and TensorBoard, with the GPU file where it works."""
    if options.stack:
        os.environ["STACK"] = check_stack(options.stack).name
    check_engine(compose=True)
    if options.image:
        os.environ["TRAINER_DEV_IMAGE"] = options.image
    name_project()
    compose = ["docker", "compose", "-f", COMPOSE]
    told = call(*compose, "config", "--format", "json")  # Compose alone knows what its files and .env say
    if told.returncode:
        raise BadInputError(f"docker compose: {last_line(told.stderr)}")
    services = json.loads(told.stdout)["services"]
    if services["jupyter"]["environment"].get("TRAINER_IMAGE"):
        raise BadInputError("TRAINER_IMAGE is two: give TRAINER_DEV_IMAGE or TRAINER_TRAIN_IMAGE")
    for image in sorted({one["image"] for one in services.values()}):
        _get(image)
    listed = call(*compose, "ps", "--services", "--status", "running").stdout.split()
    ports = {one: services[one]["ports"][0]["published"] for one in SERVICES if one in services}
    check_ports({SERVICES[one]: port for one, port in ports.items() if one not in listed})
    image = services["jupyter"]["image"]
    seen, blind = container_gpus(image)
    say(f"image {image}")
    kinds = ", ".join(f"{count} x {name}" for name, count in Counter(gpu.name for gpu in seen).items())
    say(f"with {GPU_FILE}: containers see {kinds}" if seen else f"without {GPU_FILE}, on the CPU: {blind}")
    compose += ["-f", GPU_FILE] if seen else []
    compose += ["up", "--detach", "--wait", "--no-build", *options.words]
    if listed:  # begun by Compose alone, say, which doesn't tell them the image's digest
        say(f"what runs already stays as it is ({', '.join(listed)}): make down first to start it anew")
        compose.append("--no-recreate")
    show(compose)
    if code := subprocess.call(compose, env={**os.environ, IMAGE_DIGEST: image_digest(image)}):
        _say_why()
        raise SystemExit(code)
    logs = call("docker", "compose", "logs", "--no-log-prefix", "jupyter").stdout
    # It names its address inside the container, too.
    urls = re.findall(rf"http://127\.0\.0\.1:{ports['jupyter']}/\S*lab\?token=\S+", logs)
    if services["jupyter"]["environment"].get(
        "JUPYTER_TOKEN"
    ):  # JupyterLab doesn't print a token that it was given
        urls = [f"http://127.0.0.1:{ports['jupyter']}/lab, with your JUPYTER_TOKEN"]
    print(f"\nJupyterLab   {urls[-1] if urls else 'docker compose logs jupyter shows its address'}")
    print(f"TensorBoard  http://127.0.0.1:{ports['tensorboard']}")


def _get(image: str) -> None:
    """Builds an image of a stack, or pulls another, if the engine doesn't have it."""
    if has_image(image):
        return
    own = re.fullmatch(r"trainer:(.+)-(train|dev)", image)
    words = ["docker", "pull", image]
    if own:
        words = [
            sys.executable,
            str(ROOT / "scripts/image.py"),
            "build",
            "--stack",
            own[1],
            "--target",
            own[2],
        ]
    say(f"no image {image} here: {'building' if own else 'pulling'} it first")
    show(words)
    if subprocess.call(words):
        raise BadInputError(f"{image} can't be had; what failed stands above")


def name_project() -> None:
    """Writes the name of this checkout's Compose project to .env, where every `docker compose` reads it.

    docker-compose.yml's own name loses dots, slashes, capitals and letters beyond ASCII: two checkouts can be
    one project. A name that the user chose, in the environment or in .env, stays. A name that was written for
    another path (the checkout was copied or moved, and .env with it) is replaced.
    """
    file, own = ROOT / ".env", "trainer-" + hashlib.sha256(os.fsencode(ROOT)).hexdigest()[:10]
    new = not file.exists()
    text = "" if new else file.read_bytes().decode("utf-8", "surrogateescape")
    line = re.compile(rf"^[ \t]*(?:export[ \t]+)?{NAME}[ \t]*[=:][ \t]*[\"']?([^\s#\"']*).*\n?", re.MULTILINE)
    name = (line.findall(text) or [""])[-1]  # of several lines the last one counts
    copied = name != own and re.fullmatch("trainer-[0-9a-f]{10}", name) is not None
    elsewhere = [one for one in ("COMPOSE_ENV_FILES", "COMPOSE_DISABLE_ENV_FILE") if os.environ.get(one)]
    if os.environ.get(NAME) or (name and not copied and not elsewhere):
        return
    here = f"label=com.docker.compose.project.working_dir={ROOT}"
    running = call("docker", "ps", "--filter", here, "--format", f'{{{{.Label "{PROJECT}"}}}}').stdout.split()
    os.environ[NAME] = running[0] if running else own
    if running:  # another name would leave these running beside the new ones
        say(f"Compose project {running[0]}, which runs already: after make down, make up names it {own}")
        return
    why = f"{elsewhere[0]} is set" if elsewhere else "it is a link" if file.is_symlink() else ""
    kept = line.sub("", text) if copied else text
    kept += "\n" if kept and not kept.endswith("\n") else ""
    try:
        if not why:
            file.write_bytes(f"{kept}{NAME}={own}\n".encode("utf-8", "surrogateescape"))
    except OSError as error:
        why = str(error.strerror)
    if why:
        say(f".env isn't written ({why}): export {NAME}={own}, so that docker compose finds this project")
        return
    with contextlib.suppress(OSError):  # after sudo the owner of the checkout must be able to change it
        if new:
            os.chown(file, ROOT.stat().st_uid, ROOT.stat().st_gid)
    say(f"Compose project {own}: written to .env" + (f" in place of {name}" if copied else ""))


def down(options: argparse.Namespace) -> None:
    """`make down`: the services, and every container that Compose ever started in this folder."""
    check_engine(compose=True)
    here = f"label=com.docker.compose.project.working_dir={ROOT}"
    left = call("docker", "ps", "--quiet", "--filter", here, "--filter", f"label={ONE_OFF}").stdout.split()
    if left:  # of clients that were killed: `docker compose down` leaves them
        say(f"what docker compose run left runs until its checkpoint is written ({len(left)})")
        stop = ["docker", "stop", "--time", "40", *left]
        show(stop)
        subprocess.call(stop, stdout=subprocess.DEVNULL)
    asked = call("docker", "ps", "--all", "--filter", here, "--format", f'{{{{.Label "{PROJECT}"}}}}').stdout
    profiles = ["--profile", "train", "--profile", "ssh", "down"]
    own = ["docker", "compose", *profiles, *options.words]
    show(own)
    code = subprocess.call(own)
    # Of earlier versions, and of commands that were typed in a folder below.
    for project in sorted(set(asked.split())):
        more = ["docker", "compose", "--project-name", project, *profiles, "--remove-orphans"]
        if call(
            "docker", "ps", "--all", "--quiet", "--filter", f"label={PROJECT}={project}", "--filter", here
        ).stdout:
            show(more)
            code = subprocess.call(more) or code
    raise SystemExit(code)


def _say_why() -> None:
    """Tells what services said last that have ended, which Compose doesn't."""
    ended = call("docker", "compose", "ps", "--services", "--status", "exited").stdout.split()
    for service in ended:
        last = call("docker", "compose", "logs", "--no-log-prefix", "--tail", "1", service).stdout.strip()
        print(f"runtime: error: {service}: {last}", file=sys.stderr)
    print("runtime: what did start still runs; make down ends it", file=sys.stderr)


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for action in (doctor, shell, up, down):
        command = commands.add_parser(action.__name__, help=action.__doc__, description=action.__doc__)
        command.set_defaults(action=action)
        add = command.add_argument
        # Of `up` Compose knows the default, which .env may set.
        add(
            "--stack",
            default="" if action is up else "torch2.9-cu128",
            metavar="NAME",
            help="folder of stacks/",
        )
        add("--image", default="", metavar="TAG", help="an image instead of the stack's")
        add("--data", default="", metavar="DIR", help="a folder to show to the container, read-only")
        if action is doctor:
            add("--venv", default=".venv", metavar="DIR", help="where .venv is (%(default)s)")
        add(
            "words",
            nargs="*",
            metavar="WORD",
            help="after --: of `trainer doctor`, the shell, `compose up` or `down`",
        )
    options = parser.parse_args()
    os.environ["PWD"] = str(Path.cwd())  # by which Compose names the project; older ones don't ask the system
    try:
        options.action(options)
    except BadInputError as error:
        print(f"runtime: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
