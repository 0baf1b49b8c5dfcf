"""Reads an image as a stream, so that it needs nothing inside: every file's hash, of each layer and merged.

An image is a name that the engine knows (`docker save`), or an archive in OCI's layout: a file, or a pipe.
"""

import _imp
import hashlib
import io
import json
import posixpath
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

BLOCK = 1 << 20
SMALL = 1 << 20  # bytes; larger files are not searched for secrets
# What begins bytecode of CPython 3.11 to 3.13: the key of the sources' hash in it.
MAGICS = (3495, 3531, 3571)
# A key is its header and content: programs that read keys hold the header alone.
KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----(?:\\n|\s)+[A-Za-z0-9+/=:,\-\s]{64}")
# By what begins them, so that most files are searched for fixed words only.
TOKENS = {
    b"ghp_": rb"ghp_[A-Za-z0-9]{36}",
    b"github_pat_": rb"github_pat_[A-Za-z0-9_]{60}",
    b"glpat-": rb"glpat-[A-Za-z0-9_-]{20}",
    b"hf_": rb"\bhf_[A-Za-z]{34}\b",
    b"AKIA": rb"\bAKIA[0-9A-Z]{16}\b",
    b"xox": rb"\bxox[abpr]-[0-9]{8,}-[A-Za-z0-9-]{20}",
    b"pypi-AgE": rb"pypi-AgE[A-Za-z0-9_-]{60}",
    b"npm_": rb"\bnpm_[A-Za-z0-9]{36}\b",
    b"_authToken=": rb"_authToken=[A-Za-z0-9-]{20}",
}
# Of the configuration's ENV.
SECRET = re.compile(r"(?i)[A-Z0-9_]*(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|PRIVATE_?KEY)=.+")


class ImageError(RuntimeError):
    """The image cannot be read (exit code 2)."""


class Entry(NamedTuple):
    """A path of an image.

    `digest` is a file's sha256 or a link's target; `sources` are the hashes of a .py file that bytecode of
    each of MAGICS would hold; `content` is kept of the files asked for, of a .pyc only its header, 16 bytes.
    """

    kind: str  # file, link, folder, device
    mode: int
    size: int = 0
    digest: str = ""
    content: bytes = b""
    sources: tuple[bytes, ...] = ()
    secrets: tuple[str, ...] = ()
    hard: bool = False  # another name of a file that is counted under the first
    stamp: tuple[object, ...] = ()  # of a layer's member: user, group, time, target


Files = dict[str, Entry]
Keep = Callable[[str], bool]


class Image(NamedTuple):
    """An image: its files merged, its layers, its configuration."""

    files: Files
    layers: list[Files]  # with their whiteouts
    config: dict[str, Any]
    digest: str  # of the manifest


def secrets_in(content: bytes) -> tuple[str, ...]:
    """Names what looks like a private key or a token."""
    found = ["private key"] if b"PRIVATE KEY" in content and KEY.search(content) else []
    found += [
        f"token ({word.decode()}…)"
        for word, pattern in TOKENS.items()
        if word in content and re.search(pattern, content)
    ]
    return tuple(found)


def source_hashes(content: bytes) -> tuple[bytes, ...]:
    """Returns the source hashes in unchecked bytecode, one for each of MAGICS; Python 3.10's differs."""
    if sys.version_info < (3, 11):
        return ()
    return tuple(
        _imp.source_hash(int.from_bytes(bytes([*divmod(m, 256)][::-1]) + b"\r\n", "little"), content)
        for m in MAGICS
    )


def read_file(source: IO[bytes], name: str, mode: int, size: int, keep: bool) -> Entry:
    """Hashes one file's content; small ones are searched for secrets."""
    python = name.endswith(".py")
    if python or keep or size <= SMALL:
        content = source.read()
        return Entry(
            "file",
            mode,
            size,
            hashlib.sha256(content).hexdigest(),
            content[:16] if name.endswith(".pyc") else content if keep else b"",
            source_hashes(content) if python else (),
            secrets_in(content) if size <= SMALL else (),
        )
    found = hashlib.sha256()
    while block := source.read(BLOCK):
        found.update(block)
    return Entry("file", mode, size, found.hexdigest())


def plain(name: str) -> str:
    """Returns a member's path in one form, without leading `./` or `/`."""
    return posixpath.normpath(f"/{name}").lstrip("/")


def entry_of(tar: tarfile.TarFile, member: tarfile.TarInfo, files: Files, keep: Keep) -> Entry:
    """Reads one member of a file system's tar."""
    mode = member.mode & 0o7777
    if member.isreg():
        content = tar.extractfile(member)
        assert content is not None
        name = plain(member.name)
        return read_file(content, name, mode, member.size, keep(name))
    if member.issym():
        return Entry("link", mode, digest=member.linkname)
    if member.islnk():
        first = files.get(plain(member.linkname))
        if first is None:
            raise ImageError(
                f"{member.name} is a hard link to {member.linkname}, which is not there before it"
            )
        return first._replace(size=0, hard=True)
    return Entry("folder" if member.isdir() else "device", mode)


def read_layer(source: IO[bytes], keep: Keep) -> Files:
    """Reads the changes of a layer, compressed or not."""
    files: Files = {}
    with tarfile.open(fileobj=source, mode="r|*") as tar:
        for member in tar:
            if name := plain(member.name):
                stamp = (member.uid, member.gid, member.mtime, member.linkname)
                files[name] = entry_of(tar, member, files, keep)._replace(stamp=stamp)
    return files


def merge(layers: list[Files]) -> Files:
    """Merges layers to the tree that a container sees; `.wh.NAME` removes a path of lower layers."""
    merged: Files = {}
    for layer in layers:
        gone, emptied = set[str](), set[str]()
        for path, entry in layer.items():
            folder, name = posixpath.split(path)
            if name == ".wh..wh..opq":
                emptied.add(folder)
            elif name.startswith(".wh."):
                gone.add(posixpath.join(folder, name[4:]))
            elif entry.kind != "folder":
                emptied.add(path)  # a file in a folder's place
        for path in [*merged]:
            if path in gone or any(parent in gone or parent in emptied for parent in parents(path)):
                del merged[path]
        merged |= {
            path: one for path, one in layer.items() if not posixpath.basename(path).startswith(".wh.")
        }
    return merged


def parents(path: str) -> Iterator[str]:
    """Yields the folders above a path, the root last."""
    while path:
        path = posixpath.dirname(path)
        yield path


def read_image(source: IO[bytes], keep: Keep) -> Image:
    """Reads an archive in OCI's layout once, from its start to its end.

    Raises:
        ImageError: it is none, or has a layer compressed in a way that Python cannot read.
    """
    texts: dict[str, bytes] = {}  # JSON: index, manifests, configuration
    blobs: dict[str, Files] = {}
    name = "its start"
    try:
        with tarfile.open(fileobj=source, mode="r|*") as tar:
            for member in tar:
                name = plain(member.name)
                content = tar.extractfile(member) if member.isreg() else None
                if content and member.size > 4 * SMALL:
                    blobs[name] = read_layer(content, keep)
                elif content and (text := content.read()).startswith(b"{"):
                    texts[name] = text
                elif content and name.startswith("blobs/"):
                    blobs[name] = read_layer(io.BytesIO(text), keep)
        digest, config, names = parts(texts)
        layers = [blobs[name] for name in names]
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ImageError(f"no tar, cut short or unknown compression at {name}: {error}") from None
    except (KeyError, IndexError, ValueError) as error:
        raise ImageError(f"an archive without {error}") from None
    return Image(merge(layers), layers, config, digest)


def parts(texts: dict[str, bytes]) -> tuple[str, dict[str, Any], list[str]]:
    """Returns the manifest's digest, the configuration and the layers' names of an archive."""
    manifest: dict[str, Any] = json.loads(texts["index.json"])
    digest = ""
    while "manifests" in manifest:
        # Attestations have a platform `unknown`; of other platforms only one is there.
        there = [
            one["digest"]
            for one in manifest["manifests"]
            if one.get("platform", {}).get("os") != "unknown" and blob(one["digest"]) in texts
        ]
        digest = there[0]
        manifest = json.loads(texts[blob(digest)])
    config = json.loads(texts[blob(manifest["config"]["digest"])])
    return digest, config, [blob(layer["digest"]) for layer in manifest["layers"]]


def blob(digest: str) -> str:
    """Returns the path of a digest in an archive."""
    return f"blobs/{digest.replace(':', '/')}"


def load_image(image: str, keep: Keep) -> Image:
    """Reads an archive, or what the engine saves of an image's name.

    Raises:
        ImageError: neither is there, or it can't be read.
    """
    if Path(image).exists():
        with Path(image).open("rb") as file:
            return read_image(file, keep)
    try:
        child = subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except FileNotFoundError:
        raise ImageError(f"{image} is no file, and there is no docker to ask for it") from None
    with child:
        assert child.stdout and child.stderr
        try:
            found = read_image(child.stdout, keep)
            while child.stdout.read(BLOCK):  # tars end with padding
                pass
        except ImageError as error:
            child.kill()
            # The engine's own line says more.
            why = child.stderr.read().decode(errors="replace").partition("\n")[0]
            raise ImageError(f"{image}: {why or error}") from None
    return found
