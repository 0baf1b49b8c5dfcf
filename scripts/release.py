#!/usr/bin/env python3
"""Makes a release in a folder: wheel, sdist, notes, bill of materials, provenance, checksums.

Nothing is published. What it builds is the commit that is checked out, not the files around it; two calls
give the same bytes. The README gets absolute links and the metadata addresses, because an index shows them
without the files.
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import uuid
import zipfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from image_records import license_of
from locks import Wheel, read_toml, read_wheels
from sbom import cyclonedx

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = "torch2.9-cu128"
TEXT, PICTURE = "blob", "raw"  # what leads to a file, and what shows it
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


class ReleaseError(Exception):
    """Raised where there is no release, with the reason in one line."""


def git(*words: str) -> bytes:
    """Returns the output of git."""
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=True).stdout


def section(changelog: str, version: str) -> str:
    """The changelog's section of a version, without its heading.

    Raises:
        ReleaseError: there is none, or it is empty.
    """
    found = re.search(
        rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## \[|\Z)",
        changelog,
        re.MULTILINE | re.DOTALL,
    )
    if not found or not found[1].strip():
        raise ReleaseError(f"CHANGELOG.md has no section '## [{version}] - YEAR-MONTH-DAY', or it is empty")
    return found[1].strip() + "\n"


def version_of(tag: str, texts: dict[str, str]) -> str:
    """The version that a tag, the package, pyproject.toml and CITATION.cff all name.

    Raises:
        ReleaseError: they differ.
    """
    patterns = {
        "trainer/version.py": r'^__version__ = "(.+)"$',
        "pyproject.toml": r'^version = "(.+)"$',
        "CITATION.cff": r"^version: (.+)$",
    }
    said = {"the tag": tag.removeprefix("v")}
    for file, pattern in patterns.items():
        found = re.search(pattern, texts[file], re.MULTILINE)
        said[file] = found[1].strip("\"'") if found else "none"
    if not tag.startswith("v") or len(set(said.values())) > 1:
        raise ReleaseError(
            f"tag {tag}: versions differ: {', '.join(f'{where} {one}' for where, one in said.items())}"
        )
    return said["the tag"]


def check_tag(tag: str) -> None:
    """Checks that the tag, if there is one already, is of the commit that is checked out.

    Raises:
        ReleaseError: it is of another, or files differ from the commit.
    """
    if changed := git("status", "--porcelain", "--untracked-files=no").decode().split("\n")[0]:
        raise ReleaseError(f"a file differs from the commit ({changed.strip()}): commit it first")
    there = git("for-each-ref", "--format=%(objectname) %(*objectname)", f"refs/tags/{tag}").decode().split()
    head = git("rev-parse", "HEAD").decode().strip()
    if there and head not in there:
        raise ReleaseError(f"the tag {tag} is of {there[-1][:12]}, and {head[:12]} is checked out")


def absolute(readme: str, source: str, tag: str) -> str:
    """A README whose relative links and pictures lead to the repository at a tag."""
    if not source:
        return readme

    def lead(match: re.Match[str]) -> str:
        picture, label, target = match[1], match[2], match[3]
        if re.match(r"[a-z]+:|#|/", target):
            return match[0]
        return f"{picture}[{label}]({source}/{PICTURE if picture else TEXT}/{tag}/{target})"

    fenced = re.split(r"(^```.*?^```$)", readme, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        part if part.startswith("```") else re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", lead, part)
        for part in fenced
    )


def addressed(project: str, source: str, tag: str) -> str:
    """pyproject.toml with the addresses of source, issues, changes and documentation."""
    if not source:
        return project
    urls = {
        "Source": source,
        "Issues": f"{source}/issues",
        "Changelog": f"{source}/{TEXT}/{tag}/CHANGELOG.md",
        "Documentation": f"{source}/{TEXT}/{tag}/docs/index.md",
    }
    table = "".join(f"{name} = {json.dumps(url)}\n" for name, url in urls.items())
    return project.replace("[project.scripts]\n", f"[project.urls]\n{table}\n[project.scripts]\n")


def build(out: Path, source: str, tag: str, epoch: int) -> None:
    """Builds wheel and sdist from the commit, offline; the files in both have the commit's time."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with tarfile.open(fileobj=io.BytesIO(git("archive", "HEAD"))) as archive:
            archive.extractall(folder, filter="data")
        for name, change in {"README.md": absolute, "pyproject.toml": addressed}.items():
            file = folder / name
            file.write_text(change(file.read_text(), source, tag))
        files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        os.umask(0o022)
        ran = subprocess.run(
            [sys.executable, "-c", BUILD, out],
            cwd=folder,
            env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)},
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            raise ReleaseError(f"setuptools: {ran.stderr.strip().splitlines()[-1]}")
        (wheel,) = out.glob("*.whl")
        name = "-".join(wheel.name.split("-")[:2])
        with zipfile.ZipFile(wheel) as archive:
            (folder / "PKG-INFO").write_bytes(archive.read(f"{name}.dist-info/METADATA"))
        write_sdist(out / f"{name}.tar.gz", folder, [folder / "PKG-INFO", *files], epoch)


def write_sdist(file: Path, folder: Path, files: Sequence[Path], epoch: int) -> None:
    """Writes an sdist with everything that the commit has; setuptools' differs from call to call."""
    with (
        file.open("wb") as raw,
        gzip.GzipFile("", "wb", 9, raw, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path in files:
            entry = tarfile.TarInfo(f"{file.name.removesuffix('.tar.gz')}/{path.relative_to(folder)}")
            entry.size, entry.mtime = path.stat().st_size, epoch
            entry.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            with path.open("rb") as content:
                archive.addfile(entry, content)


def bill(version: str, wheels: Sequence[Wheel], epoch: int) -> dict[str, Any]:
    """A bill of materials (CycloneDX 1.6) of what training takes, as the default stack locks it."""

    def component(wheel: Wheel) -> dict[str, Any]:
        purl = f"pkg:pypi/{wheel.name}@{wheel.version}"
        named = {
            "type": "library",
            "bom-ref": purl,
            "name": wheel.name,
            "version": wheel.version,
            "purl": purl,
        }
        try:
            said = license_of(distribution(wheel.name).read_text("METADATA") or "")
        except PackageNotFoundError:
            said = ""
        return {**named, "licenses": [{"license": {"name": said}}]} if said else named

    own = f"pkg:pypi/reproducible-trainer@{version}"
    unique = {(one.name, one.version): one for one in wheels if "train" in one.groups}
    whole = {
        **{"type": "application", "bom-ref": own, "name": "reproducible-trainer", "version": version},
        **{"purl": own, "licenses": [{"license": {"id": "Apache-2.0"}}]},
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, f"{own} {epoch}")
    return cyclonedx(serial, whole, [component(wheel) for _, wheel in sorted(unique.items())], str(epoch))


def sums(out: Path) -> dict[str, str]:
    """SHA-256 of each file of a folder."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(out.iterdir())}


def provenance(out: Path, source: str, tag: str) -> dict[str, Any]:
    """An in-toto statement with SLSA's provenance: which commit and lock the files of a folder are of."""
    lock = (ROOT / "stacks" / DEFAULT / "wheels.lock").read_bytes()
    commit = {"uri": source or "trainer", "digest": {"gitCommit": git("rev-parse", "HEAD").decode().strip()}}
    locked = {"uri": f"stacks/{DEFAULT}/wheels.lock", "digest": {"sha256": hashlib.sha256(lock).hexdigest()}}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": value}} for name, value in sums(out).items()],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "make release",
                "externalParameters": {"tag": tag},
                "resolvedDependencies": [commit, locked],
            },
            "runDetails": {"builder": {"id": os.environ.get("GITHUB_WORKFLOW_REF", "scripts/release.py")}},
        },
    }


def release(tag: str, out: Path, source: str) -> None:
    """Makes the release.

    Raises:
        ReleaseError: something isn't as it must be; nothing was written, or the folder isn't whole.
    """
    files = ("trainer/version.py", "pyproject.toml", "CITATION.cff", "CHANGELOG.md")
    texts = {file: (ROOT / file).read_text() for file in files}
    version = version_of(tag, texts)
    notes = section(texts["CHANGELOG.md"], version)
    check_tag(tag)
    if out.exists() and any(out.iterdir()):
        raise ReleaseError(f"{out} isn't empty: give another folder")
    out.mkdir(parents=True, exist_ok=True)
    epoch = int(git("log", "-1", "--format=%ct"))
    build(out.resolve(), source, tag, epoch)
    (out / "notes.md").write_text(notes)
    wheels = read_wheels((ROOT / "stacks" / DEFAULT / "wheels.lock").read_text())
    (out / "sbom.cdx.json").write_text(json.dumps(bill(version, wheels, epoch), indent=1) + "\n")
    (out / "provenance.json").write_text(json.dumps(provenance(out, source, tag), indent=1) + "\n")
    listed = "".join(f"{value}  {name}\n" for name, value in sums(out).items())
    (out / "SHA256SUMS").write_text(listed)
    print(f"release: {version} in {out}:\n{listed}", end="")
    if not source:
        print(
            "release: no SOURCE=https://…: the metadata has no addresses, and the README's links are relative"
        )


def main(words: Sequence[str] | None = None) -> int:
    """Reads the arguments."""
    stack = str(read_toml(ROOT / "pyproject.toml")["project"]["version"])
    parser = argparse.ArgumentParser(description="Makes a release in a folder; publishes nothing.")
    add = parser.add_argument
    add("--tag", default=f"v{stack}", help="the tag that it gets or has (%(default)s)")
    add("--out", type=Path, default=ROOT / "build/release", metavar="DIR", help="where (%(default)s)")
    add("--source", default="", metavar="URL", help="address of the repository's page")
    options = parser.parse_args(words)
    try:
        release(options.tag, options.out, options.source.rstrip("/"))
    except (ReleaseError, OSError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"release: git: {error.stderr.decode().strip()}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
