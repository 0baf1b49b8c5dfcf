#!/usr/bin/env python3
"""Publishes the images that `make first-build` tested, and no others: pushes, signs and attests, tags them.

`push` gives a registry those digests under a name that moves (candidate-…); `sign` signs them and attests
their bills of materials and where they come from; `tag` names them by day and version, which never move, and
moves the name without either to them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import Any

from engine_checks import ROOT, call, check_engine, image_digest, last_line
from image import DEFAULT, commit_of, run, source_of
from locks import digest_of as hash_of

from trainer.errors import BadInputError
from trainer.version import __version__

FOLDER = ROOT / "build/first-build"
Tested = dict[str, Any]


def tested(stack: str) -> Tested:
    """Returns what `make first-build` recorded of a stack: the commit and its images.

    Raises:
        BadInputError: If it didn't pass for this commit, or the commit isn't what was built.
    """
    file, here = FOLDER / f"{stack}.json", commit_of(ROOT).removesuffix("-dirty")
    if not file.is_file():
        raise BadInputError(f"nothing was tested: make first-build STACK={stack} writes {file}")
    about: Tested = json.loads(file.read_text())
    if about["commit"] != here:  # -dirty, too
        raise BadInputError(f"{file}: tested was {about['commit']}, here is {here}: make first-build anew")
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


def check_name(name: str, digest: str) -> None:
    """Checks that a name in a registry is of a digest, and says so.

    Raises:
        BadInputError: If it isn't.
    """
    if (found := digest_of(name)) != digest:
        raise BadInputError(f"{name} is {found or 'not there'}, not {digest}")
    print(f"publish: {name} is {digest}", flush=True)


def push(about: Tested, registry: str) -> None:
    """Pushes the tested digests from this machine's engine.

    Raises:
        BadInputError: If the engine has other images, or the registry then has.
    """
    check_engine("buildx")
    for target, digest in about["images"].items():
        name = f"trainer:{about['stack']}-{target}"
        if image_digest(name) != digest:
            raise BadInputError(
                f"the engine's {name} isn't {digest}, which was tested: make first-build anew"
            )
        remote = f"{registry}/trainer:candidate-{short(about['stack'], target)}"
        run("docker", "tag", name, remote)
        run("docker", "push", "--quiet", remote)
        check_name(remote, digest)


def provenance(about: Tested, target: str) -> dict[str, Any]:
    """Returns the provenance of an image (SLSA 1.0): the commit, the bases, the locks, and the builder."""
    source, stack = source_of(ROOT) or "https://example.invalid/trainer", about["stack"]
    found = [{"uri": f"git+{source}", "digest": {"gitCommit": about["commit"]}}]
    found += [
        {"uri": f"docker://{name}", "digest": {"sha256": digest.removeprefix("sha256:")}}
        for name, digest in about["bases"].items()
    ]
    found += [
        {"uri": f"file:stacks/{stack}/{lock.name}", "digest": {"sha256": hash_of(lock)}}
        for lock in sorted((ROOT / "stacks" / stack).glob("*.lock"))
    ]
    return {
        "buildDefinition": {
            "buildType": f"{source}/blob/{about['commit']}/scripts/first_build",
            "externalParameters": {"stack": stack, "target": target},
            "resolvedDependencies": found,
        },
        "runDetails": {
            "builder": {"id": os.environ.get("GITHUB_WORKFLOW_REF") or f"{source}#its-maintainers"},
            "metadata": {"startedOn": about["begun"]},
        },
    }


def sign(about: Tested, registry: str, bills: Path, key: Path | None) -> None:
    """Signs the pushed digests, and attests each one's bill of materials and provenance.

    Without a key, by the identity of whoever runs it (cosign's keyless way), which goes into a public log.

    Raises:
        BadInputError: If a bill is missing or of another image, or cosign fails.
    """
    for target, digest in about["images"].items():
        bill = bills / f"{target}.cdx.json"
        if not bill.is_file():
            raise BadInputError(
                f"{bill} isn't there: make sbom IMAGE=… BASE=… writes build/sbom/sbom.cdx.json"
            )
        of = json.loads(bill.read_text()).get("metadata", {}).get("component", {}).get("version", "")
        if of != digest:
            raise BadInputError(f"{bill} is the bill of {of or 'no image'}, not of {digest}")
    given = ["--key", str(key), "--tlog-upload=false"] if key else []
    for target, digest in about["images"].items():
        ref = f"{registry}/trainer@{digest}"
        run("cosign", "sign", "--yes", *given, ref)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(provenance(about, target), file)
            file.flush()
            bill = bills / f"{target}.cdx.json"
            for kind, predicate in (("cyclonedx", bill), ("slsaprovenance1", file.name)):
                run("cosign", "attest", "--yes", *given, "--type", kind, "--predicate", predicate, ref)


def tags_of(about: Tested, registry: str, day: str, version: str) -> dict[str, str]:
    """Returns the digest for each new name; further images of a day get a number.

    Raises:
        BadInputError: If a version's name is taken by another image.
    """
    images = {
        f"{registry}/trainer:{short(about['stack'], target)}": digest
        for target, digest in about["images"].items()
    }
    for digest in images.values():
        if digest_of(f"{registry}/trainer@{digest}") != digest:  # so a name that isn't found isn't there
            raise BadInputError(f"{registry} has no trainer@{digest}: publish.py push first")
    tags = {f"{begin}-{version}": digest for begin, digest in images.items() if version}
    for tag, digest in tags.items():
        if (found := digest_of(tag)) not in ("", digest):
            raise BadInputError(f"{tag} is {found} already and is never moved: raise the version, tag anew")
    for number in count(1):
        which = day if number == 1 else f"{day}-{number}"
        dated = {f"{begin}-{which}": digest for begin, digest in images.items()}
        if all(digest_of(tag) in ("", digest) for tag, digest in dated.items()):
            break
    return tags | dated


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
        check_name(name, digest)
    for target, digest in about["images"].items():  # the one name that moves
        name = f"{registry}/trainer:{short(about['stack'], target)}"
        run("cosign", "copy", "--force", f"{registry}/trainer@{digest}", name)
        check_name(name, digest)


def main() -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("command", choices=["push", "sign", "tag"])
    add("--stack", default=DEFAULT, help="a folder of stacks/ (%(default)s)")
    add("--registry", required=True, help="host[:port][/path]")
    add("--bills", type=Path, default=ROOT / "build/sbom", help="sign: TARGET.cdx.json of each (%(default)s)")
    add("--key", type=Path, metavar="FILE", help="sign: cosign's; default: keyless")
    add("--day", default=f"{datetime.now(timezone.utc):%Y%m%d}", help="tag: default: today, UTC")
    add("--version", default="", help="tag: vX.Y.Z of this commit, for a release")
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
