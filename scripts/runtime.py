#!/usr/bin/env python3
"""Runs what `make up`, `down` and `shell` ask of Compose, with the GPUs where the engine can give them.

It says what and why. An image that is missing is built first. The standard library is enough.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_checks import (
    ROOT,
    call,
    check_engine,
    check_ports,
    check_stack,
    container_gpus,
    image_digest,
    last_line,
)

from trainer.errors import BadInputError
from trainer.host.environment import IMAGE_DIGEST

SERVICES = {"jupyter": "JUPYTER_PORT", "tensorboard": "TENSORBOARD_PORT", "ssh": "SSH_PORT"}
COMPOSE, GPU_FILE = "docker-compose.yml", "scripts/compose/gpu.yml"
PROJECT, ONE_OFF = "com.docker.compose.project", "com.docker.compose.oneoff=True"
HERE = f"label=com.docker.compose.project.working_dir={ROOT}"
NAME = "COMPOSE_PROJECT_NAME"


def say(line: str) -> None:
    """Tells what was chosen, before what runs says anything."""
    print(f"runtime: {line}", flush=True)


def run(words: Sequence[str], **options: Any) -> int:
    """Prints a command as one would type it, and runs it; returns its exit code."""
    print(shlex.join(words), flush=True)
    return subprocess.call(words, **options)


def services_of(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the services, as Compose reads its files and .env for this stack and image.

    Raises:
        BadInputError: If there is no Compose, or it can't read them.
    """
    if options.stack:
        os.environ["STACK"] = check_stack(options.stack).name
    check_engine("compose")
    if options.image:
        os.environ["TRAINER_DEV_IMAGE"] = options.image
    name_project()
    told = call("docker", "compose", "-f", COMPOSE, "config", "--format", "json")
    if told.returncode:
        raise BadInputError(f"docker compose: {last_line(told.stderr)}")
    services: dict[str, Any] = json.loads(told.stdout)["services"]
    return services


def compose_of(image: str) -> list[str]:
    """Returns `docker compose` with the GPU file where containers of an image then see GPUs."""
    os.environ[IMAGE_DIGEST] = image_digest(image)
    seen, blind = container_gpus(image)
    kinds = ", ".join(f"{count} x {name}" for name, count in Counter(seen).items())
    say(f"with {GPU_FILE}: containers see {kinds}" if seen else f"without {GPU_FILE}, on the CPU: {blind}")
    return ["docker", "compose", "-f", COMPOSE, *(["-f", GPU_FILE] if seen else [])]


def shell(options: argparse.Namespace) -> None:
    """`make shell`: bash in the dev image, or a command, as the owner of the checkout."""
    data = options.data and str(Path(options.data).resolve())
    if data and not Path(data).is_dir():
        raise BadInputError(f"DATA={options.data} is no folder: the engine would make an empty one there")
    image = services_of(options)["jupyter"]["image"]
    _get(image)
    mount = ["--volume", f"{data}:{data}:ro"] if data else []
    words = [*compose_of(image), "run", "--rm", *mount, "jupyter", *(options.words or ["bash"])]
    print(shlex.join(words), flush=True)
    os.execvp(words[0], words)  # so that signals and the exit code are its own


def up(options: argparse.Namespace) -> None:
    """`make up`: JupyterLab and TensorBoard."""
    services = services_of(options)
    for image in sorted({one["image"] for one in services.values()}):
        _get(image)
    compose = ("docker", "compose", "-f", COMPOSE)
    listed = call(*compose, "ps", "--services", "--status", "running").stdout.split()
    ports = {one: services[one]["ports"][0]["published"] for one in SERVICES if one in services}
    check_ports({SERVICES[one]: port for one, port in ports.items() if one not in listed})
    image = services["jupyter"]["image"]
    say(f"image {image}")
    words = [*compose_of(image), "up", "--detach", "--wait", "--no-build", *options.words]
    if listed:  # begun by Compose alone, say, which doesn't tell them the image's digest
        say(f"what runs already stays as it is ({', '.join(listed)}): make down first to start it anew")
        words.append("--no-recreate")
    if code := run(words):
        _say_why()
        raise SystemExit(code)
    logs = call("docker", "compose", "logs", "--no-log-prefix", "jupyter").stdout
    # It names its address inside the container, too.
    urls = re.findall(rf"http://127\.0\.0\.1:{ports['jupyter']}/\S*lab\?token=\S+", logs)
    if services["jupyter"]["environment"].get("JUPYTER_TOKEN"):  # which JupyterLab doesn't print
        urls = [f"http://127.0.0.1:{ports['jupyter']}/lab, with your JUPYTER_TOKEN"]
    print(f"\nJupyterLab   {urls[-1] if urls else 'docker compose logs jupyter shows its address'}")
    print(f"TensorBoard  http://127.0.0.1:{ports['tensorboard']}")


def _get(image: str) -> None:
    """Builds an image of a stack, or pulls another, if the engine doesn't have it."""
    if image_digest(image):
        return
    words = ["docker", "pull", image]
    if own := re.fullmatch(r"trainer:(.+)-(train|dev)", image):
        script = str(ROOT / "scripts/image.py")
        words = [sys.executable, script, "build", "--stack", own[1], "--target", own[2]]
    say(f"no image {image} here: {'building' if own else 'pulling'} it first")
    if run(words):
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
    running = call("docker", "ps", "--filter", HERE, "--format", f'{{{{.Label "{PROJECT}"}}}}').stdout.split()
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
    check_engine("compose")
    left = call("docker", "ps", "--quiet", "--filter", HERE, "--filter", f"label={ONE_OFF}").stdout.split()
    if left:  # of clients that were killed: `docker compose down` leaves them
        say(f"what docker compose run left runs until its checkpoint is written ({len(left)})")
        run(["docker", "stop", "--time", "40", *left], stdout=subprocess.DEVNULL)
    profiles = ["--profile", "train", "--profile", "ssh", "down"]
    code = run(["docker", "compose", *profiles, *options.words])
    # Of other names: those of earlier versions, and of commands that were typed in a folder below.
    asked = call("docker", "ps", "--all", "--filter", HERE, "--format", f'{{{{.Label "{PROJECT}"}}}}').stdout
    for project in sorted(set(asked.split())):
        code = run(["docker", "compose", "--project-name", project, *profiles, "--remove-orphans"]) or code
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
    actions = {action.__name__: action for action in (shell, up, down)}
    add = parser.add_argument
    add("action", choices=actions)
    add("--stack", default="", metavar="NAME", help="folder of stacks/; default: what Compose takes")
    add("--image", default="", metavar="TAG", help="an image instead of the stack's")
    add("--data", default="", metavar="DIR", help="a folder to show to the shell's container, read-only")
    parser.epilog = "What follows -- is for the shell, `compose up` or `compose down`."
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:end], argparse.Namespace(words=sys.argv[end + 1 :]))
    os.environ["PWD"] = str(Path.cwd())  # by which Compose names the project; older ones don't ask the system
    try:
        actions[options.action](options)
    except BadInputError as error:
        print(f"runtime: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
