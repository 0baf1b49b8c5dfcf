#!/usr/bin/env python3
"""Publishes the images that `make first-build` tested, and no others: pushes, signs and attests, tags them.

`push` gives a registry those digests under a name that moves (candidate-…); `sign` signs them and attests
their bills of materials and where they come from; `tag` names them by day and version, which never move, and
moves the name without either to them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from engine_checks import ROOT, call, check_engine, image_digest, last_line
from image import DEFAULT, commit_of, run, source_of

from trainer.errors import BadInputError
from trainer.version import __version__

FOLDER = ROOT / "build/first-build"
COMMIT = re.compile(r"[0-9a-f]{40}")
Tested = dict[str, Any]


def tested(stack: str) -> Tested:
    """Returns what `make first-build` recorded of a stack: the commit and its images.

    Raises:
        BadInputError: If it didn't pass for this commit, or the commit isn't what was built.
    """
    file = FOLDER / f"{stack}.json"
    if not file.is_file():
        raise BadInputError(
            f"nothing was tested: {file} isn't there; make first-build STACK={stack} writes it"
        )
    try:
        about: Tested = json.loads(file.read_text())
        commit, images = str(about["commit"]), dict(about["images"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{file} can't be read ({error!r}): make first-build STACK={stack}") from None
    here = commit_of(ROOT).removesuffix("-dirty")
    if not COMMIT.fullmatch(commit):
        raise BadInputError(
            f"{file}: built of commit {commit}: commit the changes, then make first-build anew"
        )
    if commit != here:
        raise BadInputError(f"{file}: tested was {commit}, here is {here}: make first-build STACK={stack}")
    if sorted(images) != ["dev", "train"]:
        raise BadInputError(
            f"{file}: images {sorted(images)}, not dev and train: make first-build STACK={stack}"
        )
    return about


def short(stack: str, target: str) -> str:
    """Returns the prefix of an image's tags."""
    return stack if target == "train" else f"{stack}-{target}"


def digest_of(ref: str) -> str:
    """Returns the digest of a name in its registry; "" if it has none.

    Raises:
        BadInputError: If the registry can't be asked.
    """
    done = call("docker", "buildx", "imagetools", "inspect", ref, "--format", "{{json .Manifest.Digest}}")
    if done.returncode == 0:
        return str(json.loads(done.stdout))
    if re.search(r": not found\s*$|manifest unknown|name unknown", done.stderr, re.I):
        return ""
    raise BadInputError(f"{ref} can't be looked up: {last_line(done.stderr)}")


def push(about: Tested, registry: str) -> None:
    """Pushes the tested digests from this machine's engine.

    Raises:
        BadInputError: If the engine has other images, or the registry then has.
    """
    check_engine(build=True)
    for target, digest in about["images"].items():
        name = f"trainer:{about['stack']}-{target}"
        if image_digest(name) != digest:
            raise BadInputError(
                f"the engine's {name} isn't {digest}, which was tested: make first-build anew"
            )
        remote = f"{registry}/trainer:candidate-{short(about['stack'], target)}"
        run("docker", "tag", name, remote)
        run("docker", "push", "--quiet", remote)
        if (found := digest_of(remote)) != digest:
            raise BadInputError(f"{remote} is {found or 'not there'} after the push, not {digest}")
        print(f"publish: pull it by {registry}/trainer@{digest}", flush=True)


def provenance(about: Tested, target: str) -> dict[str, Any]:
    """Returns the provenance of an image (SLSA 1.0): the commit, the bases, the locks, and the builder."""
    source = source_of(ROOT) or "https://example.invalid/trainer"
    folder = ROOT / "stacks" / about["stack"]
    found = [{"uri": f"git+{source}", "digest": {"gitCommit": about["commit"]}}]
    found += [
        {"uri": f"docker://{name}", "digest": {"sha256": digest.removeprefix("sha256:")}}
        for name, digest in about["bases"].items()
    ]
    found += [
        {
            "uri": f"file:stacks/{about['stack']}/{lock.name}",
            "digest": {"sha256": hashlib.sha256(lock.read_bytes()).hexdigest()},
        }
        for lock in sorted(folder.glob("*.lock"))
    ]
    server, repository, run_id = (
        os.environ.get(f"GITHUB_{name}", "") for name in ("SERVER_URL", "REPOSITORY", "RUN_ID")
    )
    workflow = os.environ.get("GITHUB_WORKFLOW_REF", "")
    by = f"{server}/{workflow}" if workflow else f"{source}#a-machine-of-its-maintainers"
    return {
        "buildDefinition": {
            "buildType": f"{source}/blob/{about['commit']}/scripts/first_build",
            "externalParameters": {"stack": about["stack"], "target": target},
            "resolvedDependencies": found,
        },
        "runDetails": {
            "builder": {"id": by},
            "metadata": {
                "startedOn": about["begun"],
                **({"invocationId": f"{server}/{repository}/actions/runs/{run_id}"} if run_id else {}),
            },
        },
    }


def sign(about: Tested, registry: str, bills: Path, key: Path | None) -> None:
    """Signs the pushed digests, and attests each one's bill of materials and provenance.

    Without a key, by the identity of whoever runs it (cosign's keyless way), which goes into a public log.

    Raises:
        BadInputError: If a bill is missing or of another image, or cosign fails.
    """
    for target, digest in about["images"].items():
        check_bill(bills / f"{target}.cdx.json", digest)
    given = ["--key", str(key), "--tlog-upload=false"] if key else []
    for target, digest in about["images"].items():
        ref = f"{registry}/trainer@{digest}"
        run("cosign", "sign", "--yes", *given, ref)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(provenance(about, target), file)
            file.flush()
            bill = str(bills / f"{target}.cdx.json")
            for kind, predicate in (("cyclonedx", bill), ("slsaprovenance1", file.name)):
                run("cosign", "attest", "--yes", *given, "--type", kind, "--predicate", predicate, ref)


def check_bill(bill: Path, digest: str) -> None:
    """Checks that a bill of materials is that of an image's digest.

    Raises:
        BadInputError: If it isn't.
    """
    if not bill.is_file():
        raise BadInputError(f"{bill}: no such file; make sbom IMAGE=… BASE=… writes build/sbom/sbom.cdx.json")
    of = json.loads(bill.read_text()).get("metadata", {}).get("component", {}).get("version", "")
    if of != digest:
        raise BadInputError(f"{bill} is the bill of {of or 'no image'}, not of {digest}")


def tags_of(about: Tested, registry: str, day: str, version: str) -> dict[str, str]:
    """Returns the digest for each new name; further images of a day get a number.

    Raises:
        BadInputError: If a version's name is taken by another image.
    """
    images = {short(about["stack"], target): digest for target, digest in about["images"].items()}
    for begin, digest in images.items():
        if digest_of(f"{registry}/trainer@{digest}") != digest:  # so a name that isn't found isn't there
            raise BadInputError(f"{registry} has no trainer@{digest} ({begin}): publish.py push first")
    tags: dict[str, str] = {}
    if version:
        tags = {f"{registry}/trainer:{begin}-{version}": digest for begin, digest in images.items()}
        for tag, digest in tags.items():
            if (found := digest_of(tag)) not in ("", digest):
                raise BadInputError(
                    f"{tag} is {found} already and is never moved: raise the version, tag anew"
                )
    number = 1
    while True:
        which = day if number == 1 else f"{day}-{number}"
        dated = {f"{registry}/trainer:{begin}-{which}": digest for begin, digest in images.items()}
        if all(digest_of(tag) in ("", digest) for tag, digest in dated.items()):
            return tags | dated
        number += 1


def tag(about: Tested, registry: str, day: str, version: str) -> None:
    """Gives the pushed digests their names; looks all of them up before it gives any.

    Raises:
        BadInputError: If a name is taken, or the version isn't this commit's.
    """
    if version and version != f"v{__version__}":
        raise BadInputError(f"--version {version}: trainer/version.py says {__version__}: tag v{__version__}")
    for name, digest in tags_of(about, registry, day, version).items():
        if not digest_of(name):
            # cosign refuses a name that is taken, so that nobody in between is overwritten.
            run("cosign", "copy", f"{registry}/trainer@{digest}", name)
        if (found := digest_of(name)) != digest:
            raise BadInputError(f"{name} is {found}, not {digest}: it wasn't moved")
        print(f"publish: {name} is {digest}", flush=True)
    for target, digest in about["images"].items():  # the one name that moves
        name = f"{registry}/trainer:{short(about['stack'], target)}"
        run("cosign", "copy", "--force", f"{registry}/trainer@{digest}", name)
        print(f"publish: {name} is {digest} now", flush=True)


def main() -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (
        ("push", "push what was tested, as candidate-…"),
        ("sign", "sign it, and attest its bill of materials and provenance"),
        ("tag", "name it by day and version"),
    ):
        command = commands.add_parser(name, help=what)
        command.add_argument("--stack", default=DEFAULT, help="a folder of stacks/ (%(default)s)")
        command.add_argument("--registry", required=True, help="host[:port][/path]")
        if name == "sign":
            command.add_argument(
                "--bills", type=Path, default=ROOT / "build/sbom", help="TARGET.cdx.json of each"
            )
            command.add_argument("--key", type=Path, metavar="FILE", help="cosign's; default: keyless")
        if name == "tag":
            command.add_argument("--day", default=f"{datetime.now(timezone.utc):%Y%m%d}", help="(today, UTC)")
            command.add_argument("--version", default="", help="vX.Y.Z of this commit, for a release")
    options = parser.parse_args()
    try:
        about = tested(options.stack)
        if not re.fullmatch(r"[a-z0-9.-]+(:\d+)?(/[a-z0-9._/-]+)?", options.registry):
            raise BadInputError(f"--registry {options.registry!r}: give host/path, in lower case")
        if options.command == "push":
            push(about, options.registry)
        elif options.command == "sign":
            sign(about, options.registry, options.bills, options.key)
        else:
            tag(about, options.registry, options.day, options.version)
    except BadInputError as error:
        print(f"publish: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
