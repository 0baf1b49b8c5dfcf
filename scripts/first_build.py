#!/usr/bin/env python3
"""Builds a stack's images from their real bases, proves them, and leaves a log that can be sent: one command.

Pulls both bases by digest, installs the conda locks of every stack, builds both images twice and compares
their digests, then runs the container tests, Compose, a training and a resume. scripts/publish.py pushes
what this has tested, and nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from ssl import create_default_context
from typing import NamedTuple

from bases import Base, pinned
from engine_checks import ROOT, call, check_disk, check_engine, image_digest, last_line
from explicit_lock import LockError
from failures import FAILURES, FULL, Failure, explain, logged
from first_build_page import Row, section, write_page
from image import (
    CERTIFICATES,
    DEFAULT,
    TARGETS,
    VERIFY_GB,
    CommandError,
    Request,
    archive_words,
    build_words,
    check_store,
    checked_facts,
    commit_of,
    differences,
    labels_of,
    read_stack,
    run,
    scratch,
)
from image_archives import read_layers
from locked import read_locks

from trainer.errors import BadInputError
from trainer.host.limits import read_limits

FOLDER = ROOT / "build" / "first-build"
# Two builds of train (VERIFY_GB), what dev adds, both images in the engine, and an environment for the tests;
# with --prune the first build's layers go before the second one. Reckoned, not measured.
NEED_GB, NEED_PRUNED_GB = 70.0, 50.0
PROJECT = "trainer-first-build"
RESERVED = (
    "MAKEFLAGS",
    "MAKELEVEL",
    "MFLAGS",
    "TRAINER_STAND_IN",
    "TRAINER_IMAGE",
    "COMPOSE_FILE",
    "JUPYTER_TOKEN",
)


class Given(NamedTuple):
    """Options of the build."""

    stack: str
    compression: str
    prune: bool
    advisories: Path | None
    need_gb: float


def free_gb() -> float:
    """Returns the free gigabytes of the engine's disk, or of this machine's for a remote engine."""
    folder = Path(call("docker", "info", "--format", "{{.DockerRootDir}}").stdout.strip() or ROOT)
    return shutil.disk_usage(folder if folder.is_dir() else ROOT).free / 1e9


class Steps:
    """The steps that passed, each with its result."""

    def __init__(self, since: Callable[[], str]) -> None:
        """Takes the function that returns the output since the step before."""
        self.rows: list[Row] = []
        self._since = since

    def __call__(self, name: str, step: Callable[[], str], failures: Sequence[Failure] = FAILURES) -> None:
        """Runs a step.

        Raises:
            BadInputError: If it fails: its name, why, and what to do.
        """
        print(f"\nfirst-build: {name} ({datetime.now(timezone.utc):%H:%M:%S} UTC)", flush=True)
        self._since()
        begun = time.monotonic()
        try:
            saw = step()
        except (BadInputError, LockError, OSError) as error:
            told = str(error) if isinstance(error, OSError) else self._since()
            of_command = isinstance(error, (CommandError, OSError))
            raise BadInputError(f"{name}: {(of_command and explain(told, failures)) or error}") from None
        self.rows.append(Row(name, saw, time.monotonic() - begun, free_gb()))
        print(f"first-build: {name}: {saw}; {self.rows[-1].free_gb:.1f} GB free", flush=True)


def check_machine(given: Given) -> str:
    """Checks the engine and the disk; says what they are."""
    check_engine(build=True, compose=True)
    check_store()
    check_disk(given.need_gb)
    versions = [
        call("docker", "version", "--format", "{{.Server.Version}}").stdout.strip(),
        call("docker", "buildx", "version").stdout.strip(),
        call("docker", "compose", "version", "--short").stdout.strip(),
    ]
    limits = read_limits()
    there = f"{platform.platform()}, {limits.cpus:g} CPUs, {limits.memory_bytes / 2**30:.0f} GiB"
    proxies = sorted(name for name in os.environ if name.lower().endswith("_proxy"))
    engine = f"Docker {versions[0]}, {versions[1]}, Compose {versions[2]}"
    return f"{engine}; {there}; proxies set: {', '.join(proxies) or 'none'}"


def check_network(stacks: Sequence[str]) -> str:
    """Asks each host of the conda locks for a package's header, with the certificates that a build gets.

    Raises:
        BadInputError: If one doesn't answer.
    """
    context = create_default_context(cafile=str(CERTIFICATES) if CERTIFICATES.is_file() else None)
    urls = {one.url for stack in stacks for one in read_locks(ROOT / "stacks" / stack).conda}
    hosts = {url.split("/")[2]: url for url in sorted(urls, reverse=True)}
    for url in hosts.values():
        asked = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "conda_env"})
        try:
            urllib.request.urlopen(
                asked, timeout=60, context=context if url.startswith("https:") else None
            ).close()
        except (
            urllib.error.HTTPError
        ) as error:  # it answers; a package that is gone is named when it is fetched
            if error.code in (401, 403, 407):
                raise BadInputError(explain(f"{url}: HTTP {error.code}")) from None
        except (OSError, ValueError) as error:
            raise BadInputError(explain(f"{url}: {error}") or f"{url}: {error}") from None
    return (
        f"{', '.join(hosts)} answers, certificates {CERTIFICATES if CERTIFICATES.is_file() else 'of Python'}"
    )


def pull(base: Base) -> str:
    """Pulls a base by its digest.

    Raises:
        BadInputError: If it can't be pulled; for a digest that is gone, with the one that the name has now.
    """
    words = ("docker", "pull", "--quiet", "--platform=linux/amd64")
    print("+", *words, base.ref, flush=True)
    done = call(*words, base.ref, timeout=3600)
    if done.returncode == 0:
        return base.ref
    print(done.stderr, flush=True)
    if call(*words, base.name, timeout=3600).returncode == 0:
        found = call("docker", "image", "inspect", "--format", "{{index .RepoDigests 0}}", base.name).stdout
        now = found.strip().partition("@")[2]
        raise BadInputError(
            f"{base.name} is there, but no longer as {base.digest}; it is {now} now: look at what changed, "
            f"then put that into the Dockerfile ({base.stage}) and say so in CHANGELOG.md"
        )
    raise BadInputError(f"{base.ref}: {explain(done.stderr) or last_line(done.stderr)}")


def install_locks(stack: str, conda: Base) -> str:
    """Installs the conda locks of a stack in a container of the Miniconda base, which goes afterwards."""
    allowed = [one.rsplit("-", 2)[0] for one in read_stack(stack)["conda"].get("md5_only", [])]
    mounts = ["-v", f"{ROOT / 'stacks'}:/stacks:ro", "-v", f"{ROOT / 'scripts'}:/scripts:ro"]
    if CERTIFICATES.is_file():
        mounts += ["-v", f"{CERTIFICATES.resolve()}:/run/ca:ro", "-e", "SSL_CERT_FILE=/run/ca"]
    make = "/opt/conda/bin/python -B /scripts/conda_env.py --conda /opt/conda/bin/conda"
    locks = [
        f"{make} /stacks/{stack}/conda.lock /opt/env"
        + "".join([" --allow-md5", *(f" {one}" for one in allowed)] * bool(allowed))
    ]
    if (ROOT / "stacks" / stack / "conda-dev.lock").is_file():
        locks.append(f"{make} /stacks/{stack}/conda-dev.lock /opt/env --add")
    run("docker", "run", "--rm", "--entrypoint=/bin/sh", *mounts, conda.ref, "-ec", " && ".join(locks))
    return f"{len(read_locks(ROOT / 'stacks' / stack).conda)} packages, hashes checked, by Miniconda's conda"


def build_twice(request: Request, folder: Path, labels: dict[str, str], prune: bool) -> str:
    """Builds an image twice, loads the second one, whose bytes are the first one's; returns its digest.

    Raises:
        BadInputError: If they differ.
    """
    stack = read_stack(request.stack)
    first, second = (folder / f"{request.target}-{number}.tar" for number in (1, 2))
    run(*archive_words(request, stack, labels, first))
    if prune:
        run("docker", "buildx", "prune", "--force", "--filter", "type=regular")
    # What dev has from train was compared with train.
    again = "--no-cache" if request.target == "train" else f"--no-cache-filter={request.target}"
    run(*archive_words(request, stack, labels, second, again))
    found = differences(first, second, request.compression)
    if found:
        raise BadInputError("; ".join(found))
    first.unlink()
    digest = read_layers(second).digest
    run("docker", "load", "--quiet", "--input", second)
    second.unlink()
    if image_digest(request.name) != digest:
        raise BadInputError(f"the engine loaded {request.name} as another image than {digest}")
    return digest


def build(given: Given, step: Steps) -> dict[str, str]:
    """Builds both images; returns their digests."""
    stack, digests = read_stack(given.stack), dict[str, str]()
    with scratch() as folder:
        for target in TARGETS:
            request = Request(given.stack, target, compression=given.compression)

            def twice(request: Request = request) -> str:
                labels = labels_of(request, stack, checked_facts(request, stack, folder), commit_of(ROOT))
                digests[request.target] = build_twice(request, folder, labels, given.prune)
                return f"two builds gave {digests[request.target]} ({given.compression} layers)"

            step(f"build {target}, twice", twice)
    return digests


def free_port() -> str:
    """Returns a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def compose_up(stack: str) -> str:
    """Starts JupyterLab and TensorBoard by the Compose file, waits until they answer, stops them."""
    os.environ |= {name: free_port() for name in ("JUPYTER_PORT", "TENSORBOARD_PORT", "SSH_PORT")}
    os.environ["STACK"] = stack
    words = ("docker", "compose", "--file", "docker-compose.yml", "--project-name", PROJECT)
    try:
        run(*words, "up", "--detach", "--wait", "--no-build")
        address = f"http://127.0.0.1:{os.environ['JUPYTER_PORT']}/api"
        with urllib.request.urlopen(address, timeout=60) as answer:
            return f"healthy; JupyterLab's /api says {answer.read(200).decode(errors='replace').strip()}"
    except CommandError:
        run(*words, "logs", "--tail=40")
        raise
    finally:
        run(*words, "down", "--volumes", "--timeout=20")


def train_and_resume(stack: str) -> str:
    """Trains the digits whole, and once more with a stop in the middle; the weights must be the same."""
    runs = FOLDER / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(parents=True)
    user = f"{os.getuid()}:{os.getgid()}"
    words = ["docker", "run", "--rm", "--network=none", f"--user={user}", "-v", f"{runs}:/workspace/runs"]
    words += [f"trainer:{stack}-train", "trainer", "train", "digits"]
    words += ["--set", "max_steps=40", "--set", "parallel.threads=1"]
    run(*words, "--out", "runs/whole")
    run(*words, "--out", "runs/cut", "--stop-after", "15", code=75)
    run(*words, "--out", "runs/cut", "--resume", "auto")
    hashes = []
    for name in ("whole", "cut"):
        newest = sorted((runs / name).glob("checkpoints/step-*/model.safetensors"))
        if not newest:
            raise BadInputError(f"{runs / name} has no checkpoint")
        hashes.append(hashlib.sha256(newest[-1].read_bytes()).hexdigest())
    if hashes[0] != hashes[1]:
        raise BadInputError(f"the resumed run's weights are {hashes[1]}, the whole one's {hashes[0]}")
    return f"40 steps, and 15 and 25 after a stop (exit code 75): weights {hashes[0][:16]}… both times"


def container_tests(stack: str) -> str:
    """Runs tests/container, which are of the default stack."""
    if stack != DEFAULT:
        return f"not run: they are of {DEFAULT}"
    os.environ["TRAINER_REQUIRE_IMAGES"] = "1"
    run("make", "image-test", f"STACK={stack}")
    return "make image-test passed"


def audit(given: Given) -> str:
    """Matches the locks with advisories, or says that nobody asked."""
    if given.advisories is None:
        return "off: no advisories were asked for (ADVISORIES=FILE, a JSON list of OSV records)"
    run("make", "audit", f"STACK={given.stack}", f"ADVISORIES={given.advisories}")
    return f"make audit found none that counts in {given.advisories.name}"


def prove(given: Given, step: Steps) -> dict[str, str]:
    """Runs all steps; returns the digests of the images."""
    stacks = sorted(path.parent.name for path in (ROOT / "stacks").glob("*/stack.toml"))
    bases = pinned()
    request = Request(given.stack, "train")
    step("engine and disk", lambda: check_machine(given))
    step("network and certificates", lambda: check_network(stacks))
    for base in bases:
        step(f"pull {base.name}", lambda base=base: pull(base))  # type: ignore[misc]
    for stack in stacks:
        step(f"conda locks of {stack}", lambda stack=stack: install_locks(stack, bases[0]))  # type: ignore[misc]

    def index() -> str:
        run(*build_words(request, read_stack(given.stack), "uv", "--output", "type=cacheonly"))
        return "uv by its hash, within a build"

    step("index of wheels", index)
    step("advisories", lambda: audit(given))
    digests = build(given, step)
    step("container tests", lambda: container_tests(given.stack), [FULL])
    step("docker compose up", lambda: compose_up(given.stack), [FULL])
    step("training and resume", lambda: train_and_resume(given.stack), [FULL])
    return digests


def main() -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--stack", default=DEFAULT, help="a folder of stacks/ (%(default)s)")
    add("--compression", choices=[*VERIFY_GB], default="gzip", help="of the layers (%(default)s)")
    add("--prune", action="store_true", help="empty the engine's build cache between builds, on a small disk")
    add("--advisories", type=Path, metavar="FILE", help="match the locks with these, as make audit does")
    add("--page", type=Path, default=ROOT / "docs/results/image.md", help="gets what was seen (%(default)s)")
    add(
        "--need-gb",
        type=float,
        metavar="GB",
        help=f"disk to ask for ({NEED_GB:g}, pruned {NEED_PRUNED_GB:g})",
    )
    options = parser.parse_args()
    need = options.need_gb if options.need_gb is not None else NEED_PRUNED_GB if options.prune else NEED_GB
    advisories = options.advisories.resolve() if options.advisories else None
    given = Given(options.stack, options.compression, options.prune, advisories, need)
    page, log, result = options.page.resolve(), FOLDER / "log.txt", FOLDER / f"{given.stack}.json"
    for name in RESERVED:
        os.environ.pop(name, None)
    os.chdir(ROOT)
    result.unlink(missing_ok=True)
    begun, commit = datetime.now(timezone.utc), commit_of(ROOT)
    why = ""
    with logged(log) as since:
        print(f"first-build: {given.stack}, commit {commit}, {begun:%Y-%m-%d %H:%M:%S} UTC", flush=True)
        step = Steps(since)
        try:
            read_stack(given.stack)
            digests = prove(given, step)
        except BadInputError as error:
            why = f"first-build: {error}; log: {log.relative_to(ROOT)}"
            print(why, flush=True)
        except KeyboardInterrupt:
            why = "first-build: interrupted"
    if why:
        print(why, file=sys.stderr)
        return 2
    write_page(page, section(given.stack, commit, begun, step.rows))
    about = {"stack": given.stack, "commit": commit, "begun": f"{begun:%Y-%m-%dT%H:%M:%SZ}"}
    bases = {base.name: base.digest for base in pinned()}
    steps = {row.name: row._asdict() for row in step.rows}
    result.write_text(
        json.dumps({**about, "images": digests, "bases": bases, "steps": steps}, indent=1) + "\n"
    )
    print(f"first-build: all of it passed; {page}; log: {log.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
