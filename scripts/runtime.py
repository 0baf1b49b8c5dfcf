#!/usr/bin/env python3
"""Runs what `make train`, `doctor`, `shell`, `up` and `down` ask for, in a container or in .venv.

It says which and why. Nothing here builds an image, but `up` does where it is missing, and says so. The
standard library is enough.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from container_words import container_words, gpus_here, say, show
from engine_checks import (
    ROOT,
    call,
    check_driver,
    check_engine,
    check_ports,
    check_stack,
    container_gpus,
    has_image,
    host_driver,
    image_digest,
    last_line,
)

from trainer.errors import BadInputError
from trainer.host.environment import IMAGE_DIGEST
from trainer.host.gpus import Gpu, chosen_gpus

SERVICES = {"jupyter": "JUPYTER_PORT", "tensorboard": "TENSORBOARD_PORT", "ssh": "SSH_PORT"}
COMPOSE, GPU_FILE = "docker-compose.yml", "scripts/compose/gpu.yml"
PROJECT, ONE_OFF = "com.docker.compose.project", "com.docker.compose.oneoff=True"
NAME = "COMPOSE_PROJECT_NAME"


@dataclass(frozen=True)
class Facts:
    """Facts that decide between container and .venv.

    Attributes:
        runtime: RUNTIME: auto, local or container.
        image: The image that would run.
        given: Whether it was named with IMAGE=, not taken from the stack.
        engine: Why no engine can be used, or "".
        present: Whether the engine has the image.
        gpus: The GPUs of the host that may be used, by UUID.
        seen: Those that a container sees.
        blind: Why it sees none, or "".
        outside: A path that the request names and a container wouldn't see, or "".
        conda: The stack, if its PyTorch comes from conda, so that .venv can't hold it; or "".
    """

    runtime: str = "auto"
    image: str = "trainer:x-train"
    given: bool = False
    engine: str = ""
    present: bool = True
    gpus: frozenset[str] = frozenset()
    seen: frozenset[str] = frozenset()
    blind: str = ""
    outside: str = ""
    conda: str = ""


def decide(facts: Facts) -> tuple[bool, str]:
    """Chooses: whether to use the container, and why.

    Raises:
        BadInputError: If what was asked for can't be had.
    """
    if facts.runtime not in ("auto", "local", "container"):
        raise BadInputError(f"RUNTIME is auto, local (.venv) or container, not {facts.runtime!r}")
    lacking = "RUNTIME=local" if facts.runtime == "local" else _lacking(facts)
    if not lacking:
        every = f", and it sees every GPU ({len(facts.gpus)})" if facts.gpus else ""
        return True, f"{facts.image} is here{every}"
    if facts.runtime == "container":
        raise BadInputError(f"RUNTIME=container: {lacking}")
    if facts.conda:
        raise BadInputError(
            f"STACK={facts.conda} is conda's, which .venv can't hold, and no container can run ({lacking}): "
            f"make image STACK={facts.conda}, or conda env create -f stacks/{facts.conda}/environment.yml"
        )
    return False, lacking


def _lacking(facts: Facts) -> str:
    """Returns why the container can't be used, or ""."""
    if facts.engine:
        return facts.engine
    if not facts.present:
        named = f"IMAGE={facts.image} can't be pulled" if facts.given else f"no image {facts.image}"
        stack = facts.image.partition(":")[2].removesuffix("-train")
        return named if facts.given else f"{named}; make image STACK={stack} builds it"
    unseen = facts.gpus - facts.seen
    if unseen:
        some = f"a container sees {len(facts.gpus) - len(unseen)} of {len(facts.gpus)} GPUs"
        return f"{some} ({facts.blind})" if facts.blind else some
    if facts.outside:
        return f"{facts.outside} is outside this folder and DATA, which is all that a container sees"
    return ""


def outside(words: Sequence[str], data: str) -> str:
    """The first path among a request's words that lies outside this folder and DATA, or "".

    Of other words than --out only what exists, or could be made, is taken for a path.
    """
    known = [ROOT, *([Path(data).resolve()] if data else [])]
    for before, word in zip(["", *words], words, strict=False):
        path = word.rpartition("=")[2]
        there = (ROOT / path).resolve() if path.startswith(("/", "../")) else ROOT
        is_path = "--out" in (before, word.partition("=")[0]) or there.exists() or there.parent.exists()
        if is_path and not any(there.is_relative_to(one) for one in known):
            return path
    return ""


def become(words: Sequence[str]) -> NoReturn:
    """Prints a command and becomes it: signals and the exit code are its own."""
    show(words)
    os.execvp(words[0], list(words))


def train(options: argparse.Namespace) -> None:
    """`make train`: in the container or in .venv."""
    if options.data and not Path(options.data).is_dir():
        raise BadInputError(f"DATA={options.data} is no folder: the engine would make an empty one there")
    local_lock = "/" in options.stack  # make train STACK=tests/compat/torch2.5
    stack = None if local_lock else check_stack(options.stack)
    image = options.image or f"trainer:{options.stack}-train"
    gpus, visible = gpus_here()
    if options.gpus and not visible:
        why = "CUDA_VISIBLE_DEVICES hides them all" if gpus else "nvidia-smi shows none here"
        raise BadInputError(f"GPUS={options.gpus}: {why}; leave GPUS out to train on the CPU")
    chosen = chosen_gpus(options.gpus, visible) if options.gpus else visible
    if stack and not options.image and visible:
        check_driver(stack, *host_driver())
    facts = _facts(options, image, [gpu for gpu in gpus if visible], bool(stack and stack.conda))
    container, why = decide(facts)
    say(f"{'container' if container else '.venv'}: {why}")
    if container:
        become([*container_words(image, gpus, chosen, options.data), "trainer", "train", *options.words])
    bootstrap = [sys.executable, str(ROOT / "scripts/bootstrap.py"), "--stack", options.stack]
    code = subprocess.call([*bootstrap, "--venv", options.venv, "--groups", "train"])
    if code:
        raise SystemExit(code)
    gpu_option = ["--gpus", options.gpus] if options.gpus else []
    become([f"{options.venv}/bin/trainer", "train", *options.words[:1], *gpu_option, *options.words[1:]])


def _facts(options: argparse.Namespace, image: str, gpus: Sequence[Gpu], conda: bool) -> Facts:
    """Asks the engine only what the choice needs."""
    common = {"runtime": options.runtime, "image": image, "conda": options.stack if conda else ""}
    given, uuids = bool(options.image), frozenset(gpu.uuid for gpu in gpus)
    if options.runtime not in ("auto", "container"):
        return Facts(**common)
    try:
        check_engine()
    except BadInputError as error:
        return Facts(**common, engine=str(error))
    present = has_image(image)
    if given and not present:
        show(["docker", "pull", image])
        present = subprocess.call(["docker", "pull", image]) == 0
    if not present:
        return Facts(**common, given=given, present=False)
    seen, blind = container_gpus(image) if gpus else ([], "")
    found = frozenset(gpu.uuid for gpu in seen)
    beyond = outside(options.words, options.data)
    return Facts(**common, given=given, gpus=uuids, seen=found, blind=blind, outside=beyond)


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
    for action in (train, doctor, shell, up, down):
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
        if action in (train, doctor):
            add("--venv", default=".venv", metavar="DIR", help="where .venv is (%(default)s)")
        if action is train:
            add("--runtime", default="auto", metavar="NAME", help="auto, local or container (%(default)s)")
            add("--gpus", default="", metavar="N|LIST", help="a count (2), or indices (0,1 or id:1)")
        add(
            "words",
            nargs="*",
            metavar="WORD",
            help="after --: of `trainer train` or `doctor`, the shell, `compose up` or `down`",
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
