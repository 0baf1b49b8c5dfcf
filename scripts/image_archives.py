"""Compares images as OCI archives: by layer, and by the files of a layer."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any, NamedTuple


class Layers(NamedTuple):
    """Content of an OCI archive: its manifest's digest, and each layer's."""

    digest: str
    layers: list[str]


def read_layers(archive: Path) -> Layers:
    """Reads an OCI archive of one image."""
    with tarfile.open(archive) as tar:

        def read(name: str) -> Any:
            file = tar.extractfile(name)
            assert file is not None
            return json.load(file)

        digest = read("index.json")["manifests"][0]["digest"]
        manifest = read(f"blobs/{digest.replace(':', '/')}")
    return Layers(digest, [layer["digest"] for layer in manifest["layers"]])


def differing_files(first: Path, second: Path, layers: tuple[str, str]) -> list[str]:
    """The paths that differ in any way between a layer of one archive and one of the other (uncompressed)."""

    def members(archive: Path, digest: str) -> dict[str, tuple[object, ...]]:
        with tarfile.open(archive) as tar:  # noqa: SIM117  (the second needs the first)
            with tarfile.open(fileobj=tar.extractfile(f"blobs/{digest.replace(':', '/')}")) as layer:
                return {
                    one.name: (
                        one.mode,
                        one.uid,
                        one.gid,
                        one.mtime,
                        one.size,
                        one.linkname,
                        _content(layer, one),
                    )
                    for one in layer
                }

    here, there = members(first, layers[0]), members(second, layers[1])
    return sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))


def _content(layer: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    file = layer.extractfile(member) if member.isfile() else None
    found = hashlib.sha256()
    while file is not None and (block := file.read(1 << 20)):
        found.update(block)
    return found.hexdigest()
