#!/usr/bin/env python3
"""Matches a stack's locks against a local file of advisories (OSV's JSON), without a network.

A waiver accepts one advisory for a reason and until a day; past it the audit fails. OSV knows no conda:
conda's Python packages are matched with PyPI's advisories, its others with those whose ecosystem says conda.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from conda_lock import read_toml
from explicit_lock import LockError
from locked import Locked, read_locks
from packaging.version import InvalidVersion, Version
from wheels import canonical

ROOT = Path(__file__).resolve().parent.parent
WAIVERS = ROOT / "stacks" / "waivers.toml"
ALIASES = {"pytorch": "torch", "matplotlib-base": "matplotlib"}  # what conda calls otherwise than PyPI


class AuditError(ValueError):
    """A file that cannot be read, or is wrong (exit code 2)."""


class Item(NamedTuple):
    """A locked package: the ecosystem (pypi or conda), its name there, its version, where it is locked."""

    ecosystem: str
    name: str
    version: str
    where: str


class Waiver(NamedTuple):
    """An advisory that is accepted."""

    id: str
    reason: str
    expires: date


class Match(NamedTuple):
    """An advisory that affects a locked package; all its names; why, if that is not sure."""

    item: Item
    ids: tuple[str, ...]
    summary: str
    doubt: str


def items(locked: Locked) -> list[Item]:
    """Returns the packages of the locks; conda's Python packages under PyPI's names, too."""
    found = [
        Item("pypi", canonical(one.name), one.version, f"wheels.lock ({', '.join(one.groups)})")
        for one in locked.wheels
    ]
    for one in locked.conda:
        version, build = one.record.removeprefix(f"{one.name}-").rsplit("-", 1)
        where = f"conda ({one.file})"
        found.append(Item("conda", one.name, version, where))
        # Builds of Python packages begin with py: pyhd8ed1ab_0, py312h5f2e0a1_1, py3.12_cuda12.4_cudnn9.1.0_0
        if build.startswith("py"):
            found.append(Item("pypi", canonical(ALIASES.get(one.name, one.name)), version, where))
    return list(dict.fromkeys(found))


def parse_version(text: str) -> Version:
    """A version without what a local build adds (`2.9.1+cu128`).

    Raises:
        InvalidVersion: not PEP 440's; conda has such (`9e`).
    """
    return Version(Version(text).public)


def in_range(version: Version, events: Iterable[dict[str, str]]) -> bool:
    """Whether a version is affected, by OSV's events in their order."""
    affected = False

    def order(event: dict[str, str]) -> tuple[Version, int]:
        (kind, value), *_ = event.items()
        return parse_version(value), ("introduced", "fixed", "limit", "last_affected").index(kind)

    for event in sorted(events, key=order):
        (kind, value), *_ = event.items()
        at = parse_version(value)
        if kind == "introduced" and version >= at:
            affected = True
        elif (kind in ("fixed", "limit") and version >= at) or (kind == "last_affected" and version > at):
            affected = False
    return affected


def affects(affected: dict[str, Any], version: str) -> bool:
    """Whether one `affected` entry of an advisory holds for a version.

    Raises:
        InvalidVersion: it cannot be told.
    """
    versions, ranges = affected.get("versions", []), affected.get("ranges", [])
    ranges = [one for one in ranges if one.get("type") != "GIT"]
    if version in versions:
        return True
    if not versions and not ranges:
        return True  # it names no version: all of them
    here = parse_version(version)
    for one in versions:
        try:
            if parse_version(one) == here:
                return True
        except InvalidVersion:  # a legacy version is no version of a lock
            continue
    return any(in_range(here, one["events"]) for one in ranges)


def match(found: list[Item], advisories: list[dict[str, Any]]) -> Iterator[Match]:
    """The advisories that affect locked packages; withdrawn ones do not count."""
    by_name: dict[tuple[str, str], list[Item]] = {}
    for item in found:
        by_name.setdefault((item.ecosystem, item.name), []).append(item)
    for advisory in advisories:
        if advisory.get("withdrawn"):
            continue
        ids = (advisory["id"], *advisory.get("aliases", []))
        summary = " ".join(str(advisory.get("summary") or advisory.get("details", "")).split())[:100]
        seen: dict[Item, str] = {}
        for affected in advisory.get("affected", []):
            package = affected.get("package", {})
            ecosystem = re.split("[:-]", str(package.get("ecosystem", "")))[0].lower()
            name = str(package.get("name", ""))
            for item in by_name.get(
                (ecosystem, canonical(name) if ecosystem == "pypi" else name.lower()), []
            ):
                try:
                    if affects(affected, item.version):
                        seen[item] = ""
                except InvalidVersion as error:
                    seen.setdefault(item, f"cannot compare: {error}")
        yield from (Match(item, ids, summary, doubt) for item, doubt in seen.items())


def read_advisories(file: Path) -> list[dict[str, Any]]:
    """Reads a list of OSV records, or an object that holds it under `vulns`.

    Raises:
        AuditError: it is neither.
    """
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise AuditError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    found = found.get("vulns") if isinstance(found, dict) else found
    if not isinstance(found, list) or not all(isinstance(one, dict) and "id" in one for one in found):
        raise AuditError(f"{file} is no JSON list of OSV records with an id each")
    return found


def read_waivers(file: Path) -> list[Waiver]:
    """Reads `[[waiver]]` tables of id, reason and expires (a date).

    Raises:
        AuditError: one lacks something.
    """
    try:
        tables = read_toml(file).get("waiver", [])
    except (OSError, ValueError) as error:
        raise AuditError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    found = []
    for number, table in enumerate(tables, 1):
        kinds = {"id": str, "reason": str, "expires": date}
        wrong = [key for key, kind in kinds.items() if type(table.get(key)) is not kind or not table[key]]
        if wrong or len(table) > len(kinds):
            raise AuditError(
                f"{file}: waiver {number} needs id, reason and expires (2027-01-31), and nothing else"
            )
        found.append(Waiver(**table))
    return found


def audit(
    found: list[Item], advisories: list[dict[str, Any]], waivers: list[Waiver], today: date
) -> tuple[list[str], list[str]]:
    """Returns failures and notes, a line each."""
    bad, said = [], []
    for one in match(found, advisories):
        item = one.item
        line = f"{one.ids[0]}: {item.name} {item.version} in {item.where}: {one.doubt or one.summary}"
        also = f" (also {', '.join(one.ids[1:])})" * (len(one.ids) > 1)
        waiver = next(
            (waiver for waiver in waivers if waiver.id in one.ids and waiver.expires >= today), None
        )
        if waiver:
            said.append(f"{line}{also}; waived until {waiver.expires}: {waiver.reason}")
        else:
            bad.append(f"{line}{also}")
    for waiver in waivers:
        if waiver.expires < today:
            bad.append(f"{waiver.id}: the waiver expired on {waiver.expires}: {waiver.reason}")
    return bad, said


def run(options: argparse.Namespace) -> int:
    """Audits a stack; returns the exit code."""
    locked = read_locks(options.stacks / options.stack)
    found = items(locked)
    today = datetime.now(timezone.utc).date()
    until = read_toml(options.stacks / options.stack / "stack.toml").get("supported_until", today)
    if until < today:
        print(
            f"audit: {options.stack}: supported until {until}: docs/stacks.md says how to move",
            file=sys.stderr,
        )
    if options.advisories is None:
        print("audit: not run: no advisory file (give ADVISORIES=FILE)")
        return int(until < today)
    there = options.waivers != WAIVERS or WAIVERS.is_file()
    waivers = read_waivers(options.waivers) if there else []
    advisories = read_advisories(options.advisories)
    try:
        bad, said = audit(found, advisories, waivers, today)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise AuditError(f"{options.advisories} has a record that is not OSV's: {error!r}") from None
    for line in said:
        print(f"audit: {line}")
    for line in bad:
        print(f"audit: {line}", file=sys.stderr)
    # A Python package of conda's stands there under both names.
    packages = sum(one.ecosystem == "conda" or "conda" not in one.where for one in found)
    counts = f"{packages} packages, {len(advisories)} advisories: {len(bad)} fail, {len(said)} waived"
    print(f"audit: {options.stack}: {counts}")
    return int(bool(bad) or until < today)


def main(words: list[str] | None = None) -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(
        description="Matches a stack's locks against a local file of advisories."
    )
    add = parser.add_argument
    add("stack", metavar="STACK", help="folder of stacks/")
    add(
        "--advisories",
        type=Path,
        metavar="FILE",
        help="JSON list of OSV records; without it nothing is checked",
    )
    add(
        "--waivers",
        type=Path,
        default=WAIVERS,
        metavar="FILE",
        help="TOML file of accepted ones (%(default)s)",
    )
    add("--stacks", type=Path, default=ROOT / "stacks", metavar="DIR", help="where stacks are (%(default)s)")
    try:
        sys.exit(run(parser.parse_args(words)))
    except (AuditError, LockError, OSError) as error:
        print(f"audit: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
