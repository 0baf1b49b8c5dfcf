"""Reads a stack's locks, `wheels.lock` and conda's, and gets the uv that the first of them names.

Shared by what writes, installs and tests them. The standard library is enough.
"""

import base64
import hashlib
import html
import importlib
import io
import os
import platform
import re
import sys
import urllib.request
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

# Of a line of conda's lock; no other form can bring a token or another host's path along.
LINE = re.compile(
    r"(?P<url>https?://[\w.:-]+(?:/\w[\w.-]*)+/(?P<name>[a-z0-9_.][a-z0-9_.-]*)-[^-/]+-[^-/]+?(?:\.conda|\.tar\.bz2))"
    r"#(?P<digest>[0-9a-f]{64}|[0-9a-f]{32})"
)


class LockError(ValueError):
    """The lock or an argument is wrong: nothing was tried (exit code 2)."""


class Wheel(NamedTuple):
    """A requirement of a lock: version, marker, the groups that need it, and its lines."""

    name: str
    version: str
    marker: str
    groups: list[str]
    text: str

    @property
    def hashes(self) -> list[str]:
        """The sha256 of each file that serves it."""
        return re.findall(r"--hash=sha256:([0-9a-f]{64})", self.text)


class Package(NamedTuple):
    """A package of conda's lock."""

    name: str
    url: str
    digest: str

    @property
    def algorithm(self) -> str:
        """The hash's: sha256, or md5 where no other is known."""
        return "sha256" if len(self.digest) == 64 else "md5"

    @property
    def path(self) -> str:
        """Path under a mirror or a cache: channel, platform, file."""
        return urlsplit(self.url).path.lstrip("/")

    @property
    def file(self) -> str:
        """The package's file name."""
        return self.url.rpartition("/")[2]

    @property
    def record(self) -> str:
        """Name of conda's record, without `.json`: name-version-build."""
        return self.file.removesuffix(".conda").removesuffix(".tar.bz2")


def read_conda(text: str, allow_md5: Iterable[str] = ()) -> list[Package]:
    """Reads conda's lock, lines of URL#HASH; `allow_md5` names the packages of which no sha256 is known.

    Raises:
        LockError: a line is another, or has only an md5.
    """
    packages, allowed = [], set(allow_md5)
    for number, line in enumerate(text.splitlines(), 1):
        if not line or line.startswith(("#", "@EXPLICIT")):
            continue
        match = LINE.fullmatch(line)
        if not match:
            raise LockError(
                f"line {number} is not https://HOST/CHANNEL/PLATFORM/NAME-VERSION-BUILD.conda#SHA256"
            )
        package = Package(match["name"], match["url"], match["digest"])
        if package.algorithm == "md5" and package.name not in allowed:
            raise LockError(f"line {number}: {package.name} has only an md5 (--allow-md5 accepts it)")
        packages.append(package)
    return packages


class Locked(NamedTuple):
    """The conda packages and wheels of a stack."""

    conda: list[Package]
    wheels: list[Wheel]


def read_locks(folder: Path) -> Locked:
    """Reads `wheels.lock` and every `conda*.lock` of a stack's folder.

    Raises:
        LockError: there is no such stack, or a lock is wrong.
    """
    if not (folder / "stack.toml").is_file():
        raise LockError(f"no stack {folder.name} in {folder.parent}")
    md5_only = read_toml(folder / "stack.toml")["conda"].get("md5_only", [])
    texts = "".join(file.read_text() for file in sorted(folder.glob("conda*.lock")))
    conda = read_conda(texts, {one.rsplit("-", 2)[0] for one in md5_only})
    return Locked(conda, read_wheels((folder / "wheels.lock").read_text()))


def read_toml(path: Path) -> Any:
    """Parses a TOML file."""
    newer = sys.version_info >= (3, 11)
    return importlib.import_module("tomllib" if newer else "tomli").loads(path.read_text())


def digest_of(file: Path, algorithm: str = "sha256") -> str:
    """Returns the hash of a file's content."""
    found = hashlib.new(algorithm, usedforsecurity=False)
    with file.open("rb") as source:
        while block := source.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def canonical(name: str) -> str:
    """A package's name as wheels write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_wheels(text: str) -> list[Wheel]:
    """Parses `wheels.lock`: after the header, a `# groups: …` line before each requirement."""
    wheels = []
    for block in re.split(r"^# groups: ", text, flags=re.MULTILINE)[1:]:
        groups, requirement = block.split("\n", 1)
        pin, _, marker = requirement.partition("\\\n")[0].partition(" ; ")
        name, _, version = pin.strip().partition("==")
        wheels.append(Wheel(name, version, marker.strip(), groups.split(), requirement.strip()))
    return wheels


def select(wheels: list[Wheel], groups: list[str]) -> str:
    """The requirements of some groups; wheels only, so that no code runs to build one."""
    return "--only-binary :all:\n" + "".join(f"{w.text}\n" for w in wheels if set(groups) & set(w.groups))


def index() -> str:
    """The package index: uv's variable, pip's, or the public one."""
    given = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("PIP_INDEX_URL")
    return given or "https://pypi.org/simple"


def _read(url: str) -> bytes:
    """What a URL answers; a name and a password in it are sent as urllib doesn't."""
    parts = urlsplit(url)
    who, _, host = parts.netloc.rpartition("@")
    request = urllib.request.Request(parts._replace(netloc=host).geturl())
    if who:
        request.add_header("Authorization", f"Basic {base64.b64encode(unquote(who).encode()).decode()}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: bytes = answer.read()
    return content


def get_uv(lock: Path, folder: Path) -> Path:
    """Puts the uv of a lock into a folder, by its hash; returns its path.

    Raises:
        LookupError: The index has none for this machine that the lock names.
        OSError: The index can't be read.
    """
    (wanted,) = [one for one in read_wheels(lock.read_text()) if one.name == "uv"]
    page = f"{index().rstrip('/')}/uv/"
    kind = {"Darwin": "macosx"}.get(platform.system(), "manylinux")
    file = rf'href="([^"#]*uv-{re.escape(wanted.version)}-py3-none-{kind}[^"#/]*_{platform.machine()}\.whl)'
    for link in re.findall(file, _read(page).decode()):
        # A relative one has no name and password of its own.
        wheel = _read(urljoin(page, html.unescape(link)))
        if hashlib.sha256(wheel).hexdigest() not in wanted.hashes:
            raise LookupError(f"{link.rpartition('/')[2]} is another file than the lock's, its hash differs")
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            (name,) = [one for one in archive.namelist() if one.endswith(".data/scripts/uv")]
            folder.mkdir(parents=True, exist_ok=True)
            program = folder / "uv"
            program.write_bytes(archive.read(name))
            program.chmod(0o755)
            return program
    where = urlsplit(page)._replace(netloc=urlsplit(page).hostname or "").geturl()
    raise LookupError(f"{where} has no uv {wanted.version} for {platform.system()} {platform.machine()}")


if __name__ == "__main__":  # locks.py LOCK FOLDER: for a build of the image
    try:
        get_uv(Path(sys.argv[1]), Path(sys.argv[2]))
    except (LookupError, OSError) as error:
        sys.exit(f"uv: {error}")
