#!/usr/bin/env python3
"""Builds a stack's image, the same each time; labels it; compares it with its stack, and two builds."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from engine_checks import (
    ROOT,
    call,
    check_disk,
    check_engine,
    check_stack,
    image_digest,
    last_line,
)
from image_tar import blob, read_layer
from locks import read_toml

from trainer.errors import BadInputError
from trainer.version import __version__

DEFAULT = "torch2.9-cu128"
TARGETS = ("train", "dev")
LABEL = "org.opencontainers.image"
# Of a build of the default stack: wheels in the cache, layers, their copies in the engine's store; and of one
# whose wheels are in layers already.
BUILD_GB, AGAIN_GB = 25.0, 8.0
# Of two builds of it: the wheels, and of each its layers, their blobs twice (first times, rewritten times),
# and its archive. Measured for zstd, which is as large as gzip; reckoned from that for uncompressed.
VERIFY_GB = {"uncompressed": 70.0, "gzip": 47.0}
STAND_IN = "/opt/stand-in"
PROXIES = [
    form(name) for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY") for form in (str, str.lower)
]
# Where a network has a certificate authority of its own, its certificates are here.
CERTIFICATES = Path(os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt"))


class Request(NamedTuple):
    """Options of a build.

    Attributes:
        stack: Name of a stack.
        target: train or dev.
        stand_in: An image that stands in for both bases where no registry can be reached; or "".
        tag: Of the image; "": by stack and target.
    """

    stack: str
    target: str
    stand_in: str = ""
    tag: str = ""

    @property
    def name(self) -> str:
        """The image's name."""
        return self.tag or f"trainer:{self.stack}-{self.target}"


def run(*words: str | Path) -> None:
    """Runs a command, after saying which.

    Raises:
        BadInputError: If it fails; what it printed says why.
    """
    print("+", " ".join(map(str, words)), flush=True)
    done = subprocess.run([str(word) for word in words], check=False)
    if done.returncode:
        raise BadInputError(f"`{' '.join(map(str, words[:4]))} …` failed (exit code {done.returncode})")


def build_words(
    request: Request, stack: Mapping[str, Any], labels: Mapping[str, str], *more: str
) -> list[str]:
    """Returns the command that builds an image."""
    words = ["docker", "buildx", "build", "--provenance=false", "--sbom=false", f"--target={request.target}"]
    arguments = {
        "STACK": request.stack,
        "TORCH_VERSION": stack["pins"]["torch"],
        "DRIVER": stack["driver"]["floor"],
        "SOURCE_DATE_EPOCH": str(stack["source_date_epoch"]),
        "ALLOW_MD5": " ".join(one.rsplit("-", 2)[0] for one in stack["conda"].get("md5_only", [])),
    }
    if request.stand_in:
        base = f"docker-image://{request.stand_in}"
        words += ["--build-context", f"conda-base={base}", "--build-context", f"debian-base={base}"]
        arguments |= {"CONDA_LOCKS": STAND_IN, "CONDA_MIRROR": STAND_IN, "ALLOW_MD5": ""}
    for name, value in arguments.items():
        words += ["--build-arg", f"{name}={value}"]
    for name, value in labels.items():
        words += ["--label", f"{name}={value}"]
    # By name: a proxy's password is on no command line, and BuildKit keeps them out of the image.
    words += [f"--build-arg={name}" for name in PROXIES if os.environ.get(name)]
    if CERTIFICATES.is_file():
        words += ["--secret", f"id=ca,src={CERTIFICATES}"]
    return [*words, *more, str(ROOT)]


def archive_words(
    request: Request,
    stack: Mapping[str, Any],
    labels: Mapping[str, str],
    archive: Path,
    *more: str,
    compression: str = "uncompressed",
) -> list[str]:
    """Returns the command that builds an OCI archive whose bytes depend on the sources alone."""
    made = f"type=oci,dest={archive},name={request.name},rewrite-timestamp=true"
    # By force: a layer that an earlier build left in the cache otherwise stays compressed as it was then.
    made += f",compression={compression},force-compression=true"
    return build_words(request, stack, labels, *more, "--output", made)


def labels_of(request: Request, stack: Mapping[str, Any], commit: str) -> dict[str, str]:
    """Returns the image's labels, from stack.toml, against which `check_facts` holds the image."""
    created = datetime.fromtimestamp(stack["source_date_epoch"], timezone.utc)
    labels = {
        f"{LABEL}.title": "trainer",
        f"{LABEL}.description": stack["about"],
        f"{LABEL}.version": __version__,
        f"{LABEL}.revision": commit,
        f"{LABEL}.created": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        f"{LABEL}.licenses": "Apache-2.0",
        f"{LABEL}.source": source_of(ROOT),
        "trainer.stack": request.stack,
        "trainer.python": "" if request.stand_in else stack["python"],
        "trainer.torch": stack["pins"]["torch"],
        **{f"trainer.{name}": stack["brings"][name] for name in ("cuda", "cudnn", "nccl")},
        "trainer.architectures": " ".join(stack["gpu"]["architectures"]),
        "trainer.driver": f">={stack['driver']['floor']}",
        "trainer.stand-in": "both bases" if request.stand_in else "",
    }
    return {name: value for name, value in labels.items() if value}


def mismatches(stack: Mapping[str, Any], facts: Mapping[str, Any], stand_in: bool) -> list[str]:
    """Returns differences between an image and stack.toml, a line each. A stand-in's Python is exempt."""
    wanted = {**stack["pins"], **stack["brings"], "architectures": stack["gpu"]["architectures"]}
    if not stand_in:
        wanted["python"] = stack["python"]

    def agree(name: str) -> bool:
        here, there = facts[name], wanted[name]
        if not isinstance(there, str):
            return sorted(here) == sorted(there)
        shorter = min(len(part.split(".")) for part in (here, there))  # cuDNN says three of its four numbers
        return str(here).split(".")[:shorter] == there.split(".")[:shorter]

    return [f"{name} is {facts[name]}, stack.toml says {wanted[name]}" for name in wanted if not agree(name)]


def commit_of(root: Path) -> str:
    """Returns the commit, with -dirty if files differ from it; "unknown" outside of git."""
    found = call("git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def source_of(root: Path) -> str:
    """Returns the URL of the source: TRAINER_SOURCE, else that in pyproject.toml; "" without either."""
    urls = read_toml(root / "pyproject.toml")["project"].get("urls", {})
    return os.environ.get("TRAINER_SOURCE") or str(urls.get("Source") or urls.get("Repository") or "")


def read_stack(name: str) -> Any:
    """Returns a stack's description.

    Raises:
        BadInputError: there is no such stack, or this Python has no tomllib.
    """
    if sys.version_info < (3, 11):
        raise BadInputError("needs Python 3.11 or newer (tomllib): name one with PYTHON=…")
    check_stack(name)
    return read_toml(ROOT / "stacks" / name / "stack.toml")


def check_facts(request: Request, stack: Mapping[str, Any]) -> None:
    """Asks the libraries in an image for their versions; an image that isn't its stack loses its name.

    Raises:
        BadInputError: They aren't the stack's.
    """
    words = ["docker", "run", "--rm", "--interactive", "--network=none", "--entrypoint=/opt/env/bin/python"]
    script = (ROOT / "scripts/image_facts.py").read_text()
    asked = subprocess.run(
        [*words, request.name, "-"], input=script, capture_output=True, text=True, check=False
    )
    wrong = [last_line(asked.stderr)]
    if asked.returncode == 0:
        wrong = mismatches(stack, json.loads(asked.stdout), bool(request.stand_in))
    if wrong:
        call("docker", "rmi", request.name)
        raise BadInputError(f"{request.name} isn't its stack: {'; '.join(wrong)}")


def build(request: Request) -> None:
    """Builds, loads and labels an image.

    Raises:
        BadInputError: If there is no engine or no space, the build fails, or the image isn't the stack.
    """
    stack = read_stack(request.stack)
    check_engine("buildx")
    check_disk(AGAIN_GB if image_digest(f"trainer:{request.stack}-train") else BUILD_GB)
    labels = labels_of(request, stack, commit_of(ROOT))
    # Into the engine as it is; the archive with the same bytes each time is for `push` and `verify`.
    # Not compressed: gzip takes minutes, and nothing is sent anywhere.
    into = f"type=image,name={request.name},unpack=true,compression=uncompressed,force-compression=true"
    if not has_containerd_store():
        into = f"type=docker,name={request.name}"
    run(*build_words(request, stack, labels, "--output", into))
    check_facts(request, stack)
    budget = stack.get("budget_gb", {}).get(
        request.target, "none"
    )  # measured with the stand-in for the bases
    print(f"image: {request.name} is built; {size_of(request.name) / 1e9:.2f} GB unpacked (budget: {budget})")
    if not request.tag:
        # The name that this day's image keeps when the next one is built.
        run("docker", "tag", request.name, f"{request.name}-{datetime.now(timezone.utc):%Y%m%d}")


def has_containerd_store() -> bool:
    """True if the engine uses containerd's image store."""
    return "io.containerd.snapshotter" in call("docker", "info", "--format", "{{.DriverStatus}}").stdout


def size_of(image: str) -> int:
    """Returns the bytes of an image's files."""
    done = call("docker", "run", "--rm", "--network=none", "--user=0", "--entrypoint=du", image, "-sxb", "/")
    if done.returncode and not done.stdout:
        raise BadInputError(f"{image} can't be run: {done.stderr.strip()[-200:]}")
    return int(done.stdout.split()[0])


def verify(request: Request, load: bool, prune: bool, need_gb: float | None) -> int:
    """Builds twice without cache and compares; returns 1 and names the files where the builds differ.

    Args:
        request: What to build.
        load: Give the engine the second build, whose bytes are the first one's, to be pushed: compressed by
            gzip, which everything reads.
        prune: Empty the engine's build cache between the builds, on a small disk.
        need_gb: Disk to ask for; None: what two builds of the default stack took.

    Raises:
        BadInputError: A build failed, or the image isn't its stack.
    """
    stack, compression = read_stack(request.stack), "gzip" if load else "uncompressed"
    check_engine("buildx")
    if not has_containerd_store():  # which rewrites times
        line = '{"features": {"containerd-snapshotter": true}} in daemon.json'
        raise BadInputError(f"this needs the engine's containerd image store: {line}")
    check_disk(VERIFY_GB[compression] if need_gb is None else need_gb)
    labels = labels_of(request, stack, commit_of(ROOT)) if load else {}
    # There is more room than in a /tmp in memory.
    where = os.environ.get("TMPDIR", "/var/tmp")
    with tempfile.TemporaryDirectory(prefix="trainer-image-", dir=where) as folder:
        first, second = (Path(folder, f"{number}.tar") for number in (1, 2))
        run(*archive_words(request, stack, labels, first, "--no-cache", compression=compression))
        if prune:
            run("docker", "buildx", "prune", "--all", "--force")
        run(*archive_words(request, stack, labels, second, "--no-cache", compression=compression))
        found = differences(first, second, files=not load)
        for line in found:
            print(f"image: {line}", file=sys.stderr)
        if found:
            return 1
        built, layers = read_layers(second)
        first.unlink()
        if load:
            run("docker", "load", "--quiet", "--input", second)
    print(f"image: two builds gave {built} ({len(layers)} layers)")
    if load:
        check_facts(request, stack)
        if image_digest(request.name) != built:
            raise BadInputError(f"the engine loaded {request.name} as another image than {built}")
    return 0


def read_layers(archive: Path) -> tuple[str, list[str]]:
    """Returns the digest of the manifest in an OCI archive of one image, and those of its layers."""
    with tarfile.open(archive) as tar:

        def read(name: str) -> Any:
            file = tar.extractfile(name)
            assert file is not None
            return json.load(file)

        digest = read("index.json")["manifests"][0]["digest"]
        return digest, [layer["digest"] for layer in read(blob(digest))["layers"]]


def differing_files(archives: tuple[Path, Path], layers: tuple[str, str]) -> list[str]:
    """Returns the paths that differ between a layer of one archive and one of the other (uncompressed)."""
    read = []
    for archive, digest in zip(archives, layers, strict=True):
        with tarfile.open(archive) as tar:
            layer = tar.extractfile(blob(digest))
            assert layer is not None
            read.append(read_layer(layer, lambda _: False))
    return sorted(name for name in read[0].keys() | read[1].keys() if read[0].get(name) != read[1].get(name))


def differences(first: Path, second: Path, files: bool) -> list[str]:
    """Returns differences between two archives of an image, a line per layer; none if digests are equal."""
    (one, lower), (two, upper) = read_layers(first), read_layers(second)
    if one == two:
        return []
    lines = [f"two builds gave {one} ({len(lower)} layers) and {two} ({len(upper)})"]
    for number, layers in enumerate(zip(lower, upper, strict=False)):
        if layers[0] != layers[1]:
            names = "(compressed: make verify-image names the files)"
            if files:
                found = differing_files((first, second), layers)
                names = f"{len(found)} files, {', '.join(found[:20])}"
            lines.append(f"layer {number} differs: {names}")
    return lines


def main() -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("build", "build and label"), ("verify", "build twice without cache and compare")):
        add = commands.add_parser(name, help=what).add_argument
        add("--stack", default=DEFAULT, help="a folder of stacks/ (%(default)s)")
        add("--target", choices=TARGETS, default="train", help="(%(default)s)")
        add("--tag", default="", help="name of the image (trainer:STACK-TARGET)")
        about = "for tests where no registry can be reached: an image in place of both bases"
        add("--stand-in", default=os.environ.get("TRAINER_STAND_IN", ""), metavar="IMAGE", help=about)
        if name == "verify":
            add("--load", action="store_true", help="give the engine the second build, labeled, by gzip")
            add("--need-gb", type=float, metavar="GB", help="disk to ask for")
            add("--prune", action="store_true", help="empty the build cache between the builds")
    options = parser.parse_args()
    request = Request(options.stack, options.target, options.stand_in, options.tag)
    try:
        if options.command == "verify":
            return verify(request, options.load, options.prune, options.need_gb)
        build(request)
    except (BadInputError, OSError) as error:  # or a TMPDIR that isn't there
        print(f"image: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
