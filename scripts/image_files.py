#!/usr/bin/env python3
"""Finds the owner of every file of an image: the base, a conda record, a wheel's RECORD, or this repository.

An image is a name that the engine knows, or an archive of it; it is read once, from outside, and needs
nothing. A file that nobody owns, that differs from its record, or that a record names
and is not there is a finding; so is what no image should hold (image_hazards.py). Of a library that
prune_env.py took symbols from, its list has the record's hash and the file's. Of bytecode the header is
checked, which names its source's hash, not the code. With --stack, the records must be those of the stack's
locks.
"""

import argparse
import fnmatch
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from image_hazards import Finding, hazards
from image_records import (
    BYTECODE,
    META,
    METADATA,
    NOTHING,
    RECORD,
    REMOVED,
    Claim,
    Component,
    conda_claims,
    fits,
    pruned,
    same,
    wheel_claims,
    wrong_bytecode,
)
from image_tar import Entry, Files, Image, ImageError, load_image
from locks import Locked, LockError, canonical, read_locks

ROOT = Path(__file__).resolve().parent.parent
SHOWN = 20  # findings of one kind on the terminal; --json FILE has all


class Made(NamedTuple):
    """A path that the Dockerfile makes: content or target, a line added to the base's, or a file of ours."""

    path: str  # a pattern
    text: str | None = None
    added: str | None = None
    like: str | None = None


MADE = (
    Made("etc/passwd", added=r"trainer:\*:1000:1000:[^:]*:/home/trainer:/\S+"),
    Made("etc/group", added=r"trainer:x:1000:"),
    Made("opt/env/lib/python3.*/site-packages/trainer.pth", text="/opt/trainer\n"),
    Made("opt/env/.bootstrap.json"),
    Made("opt/*/conda-meta/history", text=""),  # conda takes a folder without it for no environment
    Made("opt/conda/.condarc", text="channels: [conda-forge]\ndefault_channels: []\n"),
    Made("opt/image/entrypoint", like="scripts/entrypoint"),
    Made("opt/image/healthy", like="scripts/healthy"),
    Made("opt/image/on_top.py", like="scripts/on_top.py"),
    Made("opt/image/as_owner.py", like="scripts/as_owner.py"),
    Made("opt/image/bashrc", like="scripts/bashrc"),
    Made("opt/image/tensorboard_once.py", like="scripts/tensorboard_once.py"),
    Made("etc/profile.d/trainer.sh", like="scripts/profile.sh"),
    Made("etc/bash.bashrc", added=r"\. /opt/image/bashrc"),
    Made("opt/image/environment"),
    # Of packages_on_top.py; what stands in the last is compared in tests/container.
    Made("opt/env/lib/python3.*/site-packages/packages_on_top.pth"),
    Made("opt/env/lib/python3.*/site-packages/as_owner.pth"),
    Made("opt/env/pip.conf"),
    Made("opt/image/constraints.txt"),
    Made(REMOVED),
)


class Report(NamedTuple):
    """Owner of each path, the components, and errors."""

    owners: dict[str, str]  # by path; folders have none
    components: list[Component]
    findings: list[Finding]


def keep(path: str) -> bool:
    """True if the walk needs a file's content."""
    wanted = any(rule.fullmatch(path) for rule in (META, METADATA, RECORD))
    return (
        wanted
        or path.endswith(".pyc")
        or path == REMOVED
        or any((made.text or made.added) and fnmatch.fnmatch(path, made.path) for made in MADE)
    )


def wrong_made(made: Made, entry: Entry, before: Entry | None, root: Path) -> str:
    """Returns why a path differs from what the Dockerfile makes; "" if it doesn't."""
    if made.added is not None:
        old = before.content.decode().splitlines() if before else []
        lines = entry.content.decode().splitlines()
        new = [line for line in lines if line not in old]
        fine = (
            len(new) == 1 and re.fullmatch(made.added, new[0]) and [one for one in lines if one in old] == old
        )
        return "" if fine else f"more than one line added to the base's, or another than {made.added}"
    if made.text is not None:
        content = entry.digest if entry.kind == "link" else entry.content.decode(errors="replace")
        return "" if content == made.text and (content or not entry.size) else f"not {made.text!r}"
    if made.like is not None:
        file = root / made.like
        return (
            ""
            if file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == entry.digest
            else (f"not {made.like} of this repository")
        )
    return ""


def unlocked(components: list[Component], locked: Locked) -> list[Finding]:
    """Returns a finding for each package that isn't in the stack's locks."""
    urls = {(package.url, package.digest) for package in locked.conda}
    wheels = {(canonical(wheel.name), wheel.version) for wheel in locked.wheels}
    found = []
    for one in components:
        hashes = [one.record.get("sha256"), one.record.get("md5")]
        if one.kind == "conda" and not any((one.record.get("url"), value) in urls for value in hashes):
            found.append(
                Finding("unlocked", one.place, f"{one.name} {one.version} is not in the stack's conda locks")
            )
        if one.kind == "wheel" and (one.name, one.version) not in wheels:
            found.append(
                Finding("unlocked", one.place, f"{one.name} {one.version} is not in the stack's wheels.lock")
            )
    return found


def owner_of(
    path: str, entry: Entry, before: Entry | None, claims: list[Claim], made: Sequence[Made], root: Path
) -> str | Finding:
    """Returns the owner of a path that fits no claim: this repository, or a finding."""
    if claims:
        return Finding("changed", path, f"not what the record of {claims[0].component.name} says")
    if rule := next((one for one in made if fnmatch.fnmatch(path, one.path)), None):
        why = wrong_made(rule, entry, before, root)
        return Finding("changed", path, why) if why else "repository"
    if before:
        return Finding("changed", path, "not what the base image holds")
    return Finding("unowned", path, "in no record")


def account(
    image: Image,
    bases: Sequence[Image],
    made: Sequence[Made] = MADE,
    root: Path = ROOT,
    locked: Locked | None = None,
) -> Report:
    """Finds the owner of each file and link of an image.

    Args:
        image: Read with `keep`.
        bases: The images that its Dockerfile begins with or copies from, read so as well.
        made: What the Dockerfile makes itself.
        root: The repository, for `Made.like`.
        locked: What the records must be of; None checks none.
    """
    files = {path: entry for path, entry in image.files.items() if entry.kind != "folder"}
    owners = {path: "base" for path, one in files.items() if any(same(one, b.files.get(path)) for b in bases)}
    before = {path: entry for base in bases for path, entry in base.files.items()}
    components, claims, original = conda_claims(files, owners)
    wheels, more = wheel_claims(files, {path for path in claims if path in files} | owners.keys())
    for path, some in more.items():
        claims.setdefault(path, []).extend(some)
    components = sorted(components + wheels, key=lambda one: one.place)
    gone = pruned(files)
    findings = unlocked(components, locked) if locked else []
    for path, some in claims.items():
        if path not in files and path not in gone.removed:
            findings.append(Finding("missing", path, f"the record of {some[0].component.name} names it"))
    for path in files.keys() - owners.keys():
        if BYTECODE.fullmatch(path):
            continue
        some = claims.get(path, [])
        own = next((claim for claim in some if fits(path, claim, files, original, gone)), None)
        found = owner_of(path, files[path], before.get(path), some, made, root)
        if own or not isinstance(found, Finding):
            owners[path] = own.component.kind if own else str(found)
        else:
            findings.append(found)
    bytecode = {
        path: wrong_bytecode(path, files, owners)
        for path in files.keys() - owners.keys()
        if BYTECODE.fullmatch(path)
    }
    owners |= {path: "bytecode" for path, why in bytecode.items() if not why}
    findings += [Finding("unowned", path, why) for path, why in bytecode.items() if why]
    # What a package brings anybody can read: it is no secret. The trainer is built from this repository.
    public = {one.digest for some in claims.values() for one in some if one.component.kind != "trainer"}
    return Report(owners, components, sorted({*findings, *hazards(image, public - {""} | {NOTHING}, before)}))


def totals(report: Report, files: Files) -> dict[str, tuple[int, int]]:
    """Returns the number of files and bytes of each owner."""
    found: dict[str, tuple[int, int]] = {}
    for path, owner in report.owners.items():
        number, size = found.get(owner, (0, 0))
        found[owner] = (number + 1, size + files[path].size)
    return found


def walk(options: argparse.Namespace) -> int:
    """Reads the images, writes what is asked for, says what is wrong; returns the exit code."""
    locked = read_locks(options.stacks / options.stack) if options.stack else None
    bases = [load_image(name, keep) for name in options.base]
    image = load_image(options.image, keep)
    report = account(image, bases, locked=locked)
    sums = totals(report, image.files)
    if options.json:
        listed = {}
        for path, owner in sorted(report.owners.items()):
            entry = image.files[path]
            content = {"target" if entry.kind == "link" else "sha256": entry.digest}
            listed[path] = {"owner": owner, "kind": entry.kind, "mode": f"{entry.mode:o}", **content}
        whole = {
            "image": options.image,
            "digest": image.digest,
            "owners": {owner: {"files": n, "bytes": size} for owner, (n, size) in sorted(sums.items())},
            "findings": [finding._asdict() for finding in report.findings],
            "files": listed,
        }
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    if options.sbom:
        from sbom import bill  # which needs cyclonedx-python-lib

        named = dict(zip(options.base, bases, strict=True))
        options.sbom.write_text(bill(options.image, image, named, report.components, locked) + "\n")
    for owner, (number, size) in sorted(sums.items()):
        print(f"image_files: {owner}: {number} files, {size / 1e6:.1f} MB")
    for kind, some in groupby(report.findings, lambda finding: finding.kind):
        for number, finding in enumerate(some):
            if number < SHOWN:
                print(f"image_files: {kind}: /{finding.path}: {finding.why}", file=sys.stderr)
    number = sum(number for number, _ in sums.values())
    print(f"image_files: {options.image}: {number} files have an owner, {len(report.findings)} findings")
    return 1 if report.findings else 0


def main(words: list[str] | None = None) -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description="Finds the owner of every file of an image.")
    add = parser.add_argument
    add(
        "image",
        metavar="IMAGE",
        help="a name that the engine knows, or an archive in OCI's layout (/dev/stdin: of a pipe)",
    )
    add("--base", nargs="+", required=True, metavar="IMAGE", help="what it is built from or copies from")
    add("--stack", default="", metavar="NAME", help="the records must be of this stack's locks")
    add("--stacks", type=Path, default=ROOT / "stacks", metavar="DIR", help="where stacks are (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write every path with owner and hash, and the findings")
    add("--sbom", type=Path, metavar="FILE", help="write a bill of materials (CycloneDX 1.6)")
    try:
        sys.exit(walk(parser.parse_args(words)))
    except (ImageError, LockError, OSError) as error:
        print(f"image_files: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
