"""Compares images as OCI archives: by layer, and by the files of a layer."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

from image_tar import Files, read_layer


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
    """Returns the paths that differ between a layer of one archive and one of the other (uncompressed)."""

    def members(archive: Path, digest: str) -> Files:
        with tarfile.open(archive) as tar:
            layer = tar.extractfile(f"blobs/{digest.replace(':', '/')}")
            assert layer is not None
            return read_layer(layer, lambda _: False, "r:*")

    here, there = members(first, layers[0]), members(second, layers[1])
    return sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
