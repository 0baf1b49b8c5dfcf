"""Reads the records in an image: conda's, the wheels' RECORDs, and the list of what prune_env.py removed."""

import base64
import csv
import email
import hashlib
import json
import posixpath
import re
from collections.abc import Container
from typing import Any, NamedTuple

from image_tar import MAGICS, Entry, Files, ImageError
from locks import canonical

NOTHING = hashlib.sha256(b"").hexdigest()
RECORD = re.compile(r"(?P<site>.*)/(?P<name>[^/]+)-(?P<version>[^/-]+)\.dist-info/RECORD")
METADATA = re.compile(r".*\.dist-info/METADATA")
META = re.compile(r"(?P<prefix>opt/[^/]+)/conda-meta/[^/]+\.json")
BYTECODE = re.compile(r"(?P<folder>.*/)?__pycache__/(?P<name>[^/]+?)\.cpython-\d+(\.opt-\d)?\.pyc")
# The only libraries that prune_env.py may take symbols from, whatever its list says.
SYMBOLS = re.compile(r"lib/python3\.\d+/site-packages/(torch/lib/lib(torch|c10)\w*|triton/_C/\w+)\.so")
REMOVED, PRUNED = "opt/image/removed.json", "opt/env"  # prune_env.py's list, and what it is relative to


class Component(NamedTuple):
    """A package in the image: its kind (conda, wheel, trainer) and record (of wheels: the license)."""

    kind: str
    name: str
    version: str
    place: str  # of its record
    record: dict[str, Any]


class Claim(NamedTuple):
    """Claim of a component on a path, with a hash ("" where its record gives none)."""

    component: Component
    digest: str
    soft: bool = False  # a link, and `digest` what it points to holds


Claims = dict[str, list[Claim]]


def resolve(path: str, files: Files, left: int = 40) -> str:
    """Returns a path with its links followed; "" for a loop."""
    done, rest = "", path.split("/")
    while rest:
        part = rest.pop(0)
        if part in ("", "."):
            continue
        here = posixpath.dirname(done) if part == ".." else posixpath.join(done, part)
        entry = files.get(here)
        if entry and entry.kind == "link":
            if not left:
                return ""
            start = "" if entry.digest.startswith("/") else done
            return resolve("/".join([start, entry.digest, *rest]), files, left - 1)
        done = here
    return done


def same(one: Entry | None, other: Entry | None) -> bool:
    """True if both entries exist, with the same content or target."""
    return bool(one and other and (one.kind, one.digest) == (other.kind, other.digest))


def conda_claims(files: Files, known: Container[str]) -> tuple[list[Component], Claims, dict[str, str]]:
    """Returns the paths that conda's records own; and each file's hash in its package, before the prefix was
    put in.

    Raises:
        ImageError: a record that is not `known` (of the base) cannot be read.
    """
    components, claims, original = [], Claims(), dict[str, str]()
    for place, entry in files.items():
        if (match := META.fullmatch(place)) and place not in known and entry.kind == "file":
            try:
                record = json.loads(entry.content)
                component = Component("conda", record["name"], record["version"], place, record)
                paths = [(one["_path"], one["path_type"], one) for one in record["paths_data"]["paths"]]
            except (KeyError, TypeError, ValueError) as error:
                raise ImageError(f"/{place} is no record of conda's: {error!r}") from None
            components.append(component)
            claims[place] = [Claim(component, entry.digest)]
            for listed, kind, one in paths:
                path, soft = posixpath.join(match["prefix"], listed), kind == "softlink"
                original[path] = one.get("sha256", "")
                digest = original[path] if soft else one.get("sha256_in_prefix", original[path])
                if kind != "directory":
                    claims.setdefault(path, []).append(Claim(component, digest, soft))
    return components, claims, original


def wheel_claims(files: Files, known: Container[str]) -> tuple[list[Component], Claims]:
    """Returns the paths that RECORDs own, except `known` ones: conda's packages and the base bring RECORDs,
    too.

    Nor do those count that another RECORD names: of packages inside it, whose scripts were never installed.
    """
    components, claims = [], Claims()
    for place in sorted(files, key=lambda path: (path.count("/"), path)):
        entry, match = files[place], RECORD.fullmatch(place)
        if not match or place in known or place in claims or entry.kind != "file":
            continue
        site, name = match["site"], canonical(match["name"])
        kind = "trainer" if (site, name) == ("opt/trainer", "reproducible-trainer") else "wheel"
        about = files.get(f"{posixpath.dirname(place)}/METADATA")
        license = license_of(about.content.decode(errors="replace")) if about else ""
        component = Component(kind, name, match["version"], place, {"license": license} if license else {})
        components.append(component)
        claims[place] = [Claim(component, entry.digest)]
        for row in csv.reader(entry.content.decode(errors="replace").splitlines()):
            listed, digest = [*row, "", ""][:2]
            path = posixpath.normpath(f"/{site}/{listed}").lstrip("/")
            if listed.startswith("../") and posixpath.basename(site) != "site-packages":
                # With --target pip writes as if the scripts lay two folders up.
                path = posixpath.join(site, listed.lstrip("./"))
            if listed.endswith(".pyc") or path == place:
                continue
            claims.setdefault(path, []).append(Claim(component, unpacked(digest)))
    return components, claims


def license_of(metadata: str) -> str:
    """Returns the license in a wheel's METADATA: its expression, else its short field, else classifiers."""
    given = email.message_from_string(metadata)
    short = (given.get("License") or "").strip()
    if "\n" in short or len(short) > 100 or short.upper() == "UNKNOWN":  # a whole text, or none
        short = ""
    listed = [str(one).rpartition(" :: ")[2] for one in given.get_all("Classifier", [])
              if str(one).startswith("License :: ")]  # fmt: skip
    return str(given.get("License-Expression") or short or " and ".join(listed)).strip()


def unpacked(digest: str) -> str:
    """Returns a RECORD's `sha256=…` in hexadecimal; "" for another algorithm or none."""
    algorithm, _, value = digest.partition("=")
    try:
        return base64.b64decode(value + "=" * (-len(value) % 4), b"-_").hex() if algorithm == "sha256" else ""
    except ValueError:
        return ""


class Pruned(NamedTuple):
    """Changes by prune_env.py, by path: removed files, links, and stripped files."""

    removed: set[str]
    linked: dict[str, str]
    stripped: dict[str, tuple[str, str]]  # hashes before and after


def pruned(files: Files) -> Pruned:
    """Reads prune_env.py's list; nothing where an image has none.

    Raises:
        ImageError: the list cannot be read.
    """
    entry = files.get(REMOVED)
    if not entry:
        return Pruned(set(), {}, {})
    try:
        listed = json.loads(entry.content)
        return Pruned(
            {posixpath.join(PRUNED, path) for path in listed["removed"]},
            {posixpath.join(PRUNED, path): target for path, target in listed["linked"].items()},
            {
                posixpath.join(PRUNED, path): (hashes["before"], hashes["after"])
                for path, hashes in listed.get("stripped", {}).items()
                if SYMBOLS.fullmatch(path)
            },
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ImageError(f"/{REMOVED} is not prune_env.py's list: {error!r}") from None


def is_claimed(path: str, entry: Entry, claim: Claim, gone: Pruned) -> bool:
    """True if a file has the content of a claim, or that content without its symbols."""
    return entry.digest == claim.digest or gone.stripped.get(path) == (claim.digest, entry.digest)


def fits(path: str, claim: Claim, files: Files, original: dict[str, str], gone: Pruned) -> bool:
    """True if a path has the content or target of a claim."""
    entry = files[path]
    if entry.kind == "file":
        return not claim.soft and is_claimed(path, entry, claim, gone)
    target = resolve(path, files)
    behind = files.get(target)
    if not claim.soft:
        return (
            gone.linked.get(path) == entry.digest
            and behind is not None
            and is_claimed(target, behind, claim, gone)
        )
    if behind is None or behind.kind != "file":
        # Into another package's folder, or at what is not there: builders write no hash, or nothing's.
        return claim.digest in ("", NOTHING) or behind is not None
    return claim.digest in ("", NOTHING, behind.digest, original.get(target, ""))


def wrong_bytecode(path: str, files: Files, owners: dict[str, str]) -> str:
    """Returns why a .pyc has no owner; "" if it matches its owned source and isn't checked by time."""
    match = BYTECODE.fullmatch(path)
    source = f"{match['folder'] or ''}{match['name']}.py" if match else ""
    if source not in owners:
        return "bytecode without an owned source"
    header = files[path].content
    number = int.from_bytes(header[:2], "little")
    if header[2:4] != b"\r\n" or number not in MAGICS:
        return "not bytecode of CPython 3.11 to 3.13"
    if header[4:8] != b"\1\0\0\0":
        return "bytecode that holds its source's time: compile with --invalidation-mode unchecked-hash"
    hashes = files[source].sources
    if not hashes and files[source].kind == "file":
        return "checking bytecode needs Python 3.11 or newer on this machine"
    return (
        ""
        if hashes and hashes[MAGICS.index(number)] == header[8:16]
        else f"bytecode of another source than /{source}"
    )
