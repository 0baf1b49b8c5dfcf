"""Reads a stack's `conda.lock`; shared by `conda_env.py`, which installs it, and the tests."""

import re
from typing import NamedTuple
from urllib.parse import urlsplit

FILE = re.compile(r"(?P<name>[a-z0-9_.][a-z0-9_.-]*)-[^-/]+-[^-/]+?(?:\.conda|\.tar\.bz2)")
# Anaconda's `defaults`, which has commercial terms; its other hosts serve some of it under these names.
DEFAULTS = re.compile(
    r"https?://(repo\.anaconda\.com|repo\.continuum\.io)[/:]"
    r"|https?://[^/]*anaconda[^/]*/(anaconda|defaults|free|main|msys2|r)/"
    r"|https?://.*/pkgs/(free|main|mro|msys2|pro|r)/"
)


class LockError(ValueError):
    """The lock or an argument is wrong: nothing was tried (exit code 2)."""


class Package(NamedTuple):
    """A line of a lock."""

    name: str
    url: str
    algorithm: str
    digest: str

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


def parse_line(line: str, allow_md5: frozenset[str]) -> Package:
    """Reads `URL#HASH`.

    Raises:
        ValueError: what is wrong with it.
    """
    url, _, given = line.partition("#")
    parts = urlsplit(url)
    *folders, file = parts.path.lstrip("/").split("/")
    match = FILE.fullmatch(file)
    if parts.scheme not in ("http", "https") or not parts.hostname or len(folders) < 2 or parts.query:
        raise LockError(f"{url} is not http(s)://host/channel/platform/file")
    if not match:
        raise LockError(f"{file} is not name-version-build.conda or .tar.bz2")
    if parts.username or folders[0] == "t":
        raise LockError(f"{file} has a password or a token in its URL: use the channel's plain URL")
    if "%" in parts.path or any(part in ("", ".", "..") for part in folders):
        raise LockError(f"{url} has an odd folder or a % in it: use the channel's plain URL")
    if DEFAULTS.match(url):
        raise LockError(f"{url} is of Anaconda's defaults channel (commercial terms): use conda-forge")
    name, value = match["name"], given.lower()
    sha256 = value.removeprefix("sha256:")
    if re.fullmatch(r"[0-9a-f]{64}", sha256):
        return Package(name, url, "sha256", sha256)
    if not re.fullmatch(r"[0-9a-f]{32}", value):
        raise LockError(f"{name} has no valid hash ({given or 'none'}): write URL#<sha256>")
    if name not in allow_md5:
        raise LockError(f"{name} has only an md5: lock its sha256, or accept it with --allow-md5 {name}")
    return Package(name, url, "md5", value)


def parse_lock(text: str, allow_md5: frozenset[str] = frozenset()) -> list[Package]:
    """Reads an `@EXPLICIT` lock.

    Raises:
        LockError: with the line's number, what is wrong.
    """
    packages: dict[str, Package] = {}
    explicit = False
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if line == "@EXPLICIT":
            explicit = True
            continue
        if not explicit:
            raise LockError(f"line {number}: {line!r} comes before @EXPLICIT")
        try:
            package = parse_line(line, allow_md5)
        except ValueError as error:  # LockError, and urlsplit's own
            raise LockError(f"line {number}: {error}") from None
        if package.name in packages:
            raise LockError(f"line {number}: {package.name} is there twice")
        packages[package.name] = package
    if not packages:
        raise LockError("no packages after a line @EXPLICIT")
    unused = allow_md5 - {package.name for package in packages.values() if package.algorithm == "md5"}
    if unused:
        raise LockError(f"--allow-md5 {' '.join(sorted(unused))}: no md5-only package of that name")
    return list(packages.values())
