#!/usr/bin/env python3
"""Makes a release in a folder: wheel, sdist, notes, checksums.

Nothing is published. What it builds is the commit that is checked out, not the files around it; two calls
give the same bytes. The metadata gets addresses and its README absolute links, because an index shows them
without the files.
"""

import argparse
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from locks import read_toml

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


class ReleaseError(Exception):
    """Raised where there is no release, with the reason in one line."""


def git(*words: str | Path) -> bytes:
    """Returns the output of git."""
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, check=True).stdout


def section(changelog: str, version: str) -> str:
    """The changelog's section of a version, without its heading.

    Raises:
        ReleaseError: there is none, or it is empty.
    """
    head = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n"
    found = re.search(rf"{head}(.*?)(?=^## \[|\Z)", changelog, re.MULTILINE | re.DOTALL)
    if not found or not found[1].strip():
        raise ReleaseError(f"CHANGELOG.md has no section '## [{version}] - YEAR-MONTH-DAY', or it is empty")
    return found[1].strip() + "\n"


def version_of(tag: str) -> str:
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
        found = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
        said[file] = found[1].strip("\"'") if found else "none"
    if not tag.startswith("v") or len(set(said.values())) > 1:
        differ = ", ".join(f"{where} {one}" for where, one in said.items())
        raise ReleaseError(f"tag {tag}: versions differ: {differ}")
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
    """A README whose relative links and pictures lead to the repository at a tag; code stays as it is."""

    def lead(match: re.Match[str]) -> str:
        picture, label, target = match[1], match[2], match[3]
        if re.match(r"[a-z]+:|#|/", target):
            return match[0]
        return f"{picture}[{label}]({source}/{'raw' if picture else 'blob'}/{tag}/{target})"

    parts = re.split(r"(^```.*?^```$)", readme, flags=re.MULTILINE | re.DOTALL)
    links = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
    return "".join(part if part.startswith("```") else links.sub(lead, part) for part in parts)


def addressed(project: str, source: str, tag: str) -> str:
    """pyproject.toml with the addresses of source, issues, changes and documentation."""
    urls = {
        "Source": source,
        "Issues": f"{source}/issues",
        "Changelog": f"{source}/blob/{tag}/CHANGELOG.md",
        "Documentation": f"{source}/blob/{tag}/docs/index.md",
    }
    table = "".join(f"{name} = {json.dumps(url)}\n" for name, url in urls.items())
    return project.replace("[project.scripts]\n", f"[project.urls]\n{table}\n[project.scripts]\n")


def build(out: Path, source: str, tag: str) -> None:
    """Builds wheel and sdist from the commit, offline; the files in both have the commit's time.

    The sdist is git's archive, with the wheel's metadata: setuptools' differs from call to call.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with tarfile.open(fileobj=io.BytesIO(git("archive", "HEAD"))) as archive:
            archive.extractall(folder, filter="data")
        for name, change in {"README.md": absolute, "pyproject.toml": addressed}.items():
            if source:
                (folder / name).write_text(change((folder / name).read_text(), source, tag))
        os.umask(0o022)
        env = {**os.environ, "SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct").decode().strip()}
        command = [sys.executable, "-c", BUILD, str(out)]
        ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise ReleaseError(f"setuptools: {ran.stderr.strip().splitlines()[-1]}")
        (wheel,) = out.glob("*.whl")
        name = "-".join(wheel.name.split("-")[:2])
        with zipfile.ZipFile(wheel) as metadata:
            (folder / "PKG-INFO").write_bytes(metadata.read(f"{name}.dist-info/METADATA"))
        more = (f"--prefix={name}/", f"--add-file={folder}/PKG-INFO", f"--output={out}/{name}.tar.gz")
        git("archive", *more, "HEAD")


def release(tag: str, out: Path, source: str) -> None:
    """Makes the release.

    Raises:
        ReleaseError: something isn't as it must be; nothing was written, or the folder isn't whole.
    """
    version = version_of(tag)
    notes = section((ROOT / "CHANGELOG.md").read_text(), version)
    check_tag(tag)
    if out.exists() and any(out.iterdir()):
        raise ReleaseError(f"{out} isn't empty: give another folder")
    out.mkdir(parents=True, exist_ok=True)
    build(out.resolve(), source, tag)
    (out / "notes.md").write_text(notes)
    files = sorted(out.iterdir())
    listed = "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    (out / "SHA256SUMS").write_text(listed)
    print(f"release: {version} in {out}:\n{listed}", end="")
    if not source:
        print(
            "release: no SOURCE=https://…: the metadata has no addresses, and the README's links are relative"
        )


def main(words: Sequence[str] | None = None) -> int:
    """Reads the arguments."""
    version = str(read_toml(ROOT / "pyproject.toml")["project"]["version"])
    parser = argparse.ArgumentParser(description="Makes a release in a folder; publishes nothing.")
    add = parser.add_argument
    add("--tag", default=f"v{version}", help="the tag that it gets or has (%(default)s)")
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
