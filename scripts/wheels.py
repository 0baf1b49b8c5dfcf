"""Reads a stack's `wheels.lock`, and gets the uv that it names, which installs from it.

Shared by what writes, installs and tests it. The standard library is enough.
"""

import base64
import hashlib
import html
import io
import os
import platform
import re
import sys
import urllib.request
import zipfile
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urljoin, urlsplit


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


def canonical(name: str) -> str:
    """A package's name as wheels write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(text: str) -> list[Wheel]:
    """Parses a lock: after the header, a `# groups: …` line before each requirement."""
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
    (wanted,) = [one for one in read_lock(lock.read_text()) if one.name == "uv"]
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


if __name__ == "__main__":  # wheels.py LOCK FOLDER: for a build of the image
    try:
        get_uv(Path(sys.argv[1]), Path(sys.argv[2]))
    except (LookupError, OSError) as error:
        sys.exit(f"uv: {error}")
