"""A bill of materials (CycloneDX 1.6, JSON) of the same walk that finds each file's owner."""

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any
from urllib.parse import quote

from image_records import Component, pruned
from image_tar import Image
from locks import Locked, canonical


def purl(one: Component) -> str:
    """A package URL (github.com/package-url/purl-spec) of a component."""
    version = quote(one.version, safe="")
    if one.kind == "wheel":
        return f"pkg:pypi/{one.name}@{version}"
    if one.kind == "trainer":  # built from this repository, not taken from PyPI
        return f"pkg:generic/{one.name}@{version}"
    channel, subdir = (
        str(one.record.get("channel", "")).rstrip("/").rsplit("/", 1)[-1],
        one.record.get("subdir", ""),
    )
    file = str(one.record.get("url", ".conda"))
    given = {"build": one.record["build"], "channel": channel, "subdir": subdir}
    given["type"] = "conda" if file.endswith(".conda") else "tar.bz2"
    query = "&".join(f"{key}={quote(str(value), safe='')}" for key, value in given.items() if value)
    return f"pkg:conda/{one.name}@{version}?{query}"


def hashes_of(one: Component, locked: Locked | None) -> list[dict[str, str]]:
    """The hashes of a component's archive: conda's own, or all that the lock accepts for a wheel."""
    if one.kind == "conda":
        known = [("SHA-256", one.record.get("sha256")), ("MD5", one.record.get("md5"))]
        return [{"alg": name, "content": str(value)} for name, value in known if value][:1]
    return [
        {"alg": "SHA-256", "content": value}
        for wheel in (locked.wheels if locked and one.kind == "wheel" else [])
        if (canonical(wheel.name), wheel.version) == (one.name, one.version)
        for value in wheel.hashes
    ]


def listed(one: Component, locked: Locked | None) -> dict[str, Any]:
    """A component's entry."""
    entry: dict[str, Any] = {"type": "application" if one.kind == "trainer" else "library"}
    entry |= {"bom-ref": f"/{one.place}", "name": one.name, "version": one.version, "purl": purl(one)}
    properties = [{"name": "trainer:record", "value": f"/{one.place}"}]
    hashes = hashes_of(one, locked)
    if len(hashes) == 1:
        entry["hashes"] = hashes
    # The lock serves several platforms; which of its wheels was taken no RECORD tells.
    properties += [
        {"name": "trainer:sha256-one-of", "value": one["content"]} for one in hashes if len(hashes) > 1
    ]
    if one.record.get("license"):
        entry["licenses"] = [{"license": {"name": str(one.record["license"])}}]
    return {**entry, "properties": properties}


def container(name: str, image: Image, ref: str) -> dict[str, Any]:
    """The entry of an image: its manifest's digest, its labels, and what isn't quite as its wheel has it."""
    entry: dict[str, Any] = {"type": "container", "bom-ref": ref, "name": name}
    algorithm, _, value = image.digest.partition(":")
    if algorithm == "sha256":
        entry |= {"version": image.digest, "hashes": [{"alg": "SHA-256", "content": value}]}
    labels = image.config.get("config", {}).get("Labels") or {}
    properties = [{"name": key, "value": str(labels[key])} for key in sorted(labels)]
    less = sorted(pruned(image.files).stripped)
    properties += [{"name": "trainer:without-symbols", "value": f"/{path}"} for path in less]
    return {**entry, "properties": properties} if properties else entry


def cyclonedx(
    serial: uuid.UUID, whole: Mapping[str, Any], components: Sequence[Mapping[str, Any]], epoch: str | None
) -> dict[str, Any]:
    """A bill's document: `whole` is what consists of the components; the epoch gives its time, if any."""
    metadata: dict[str, Any] = {"component": whole}
    if epoch:
        metadata["timestamp"] = f"{datetime.fromtimestamp(int(epoch), timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": metadata,
        "components": components,
        "dependencies": [{"ref": whole["bom-ref"], "dependsOn": [one["bom-ref"] for one in components]}],
    }


def bill(
    name: str,
    image: Image,
    bases: Mapping[str, Image],
    packages: Sequence[Component],
    locked: Locked | None,
    epoch: str | None,
) -> dict[str, Any]:
    """The bill of materials of an image; the same for the same image.

    Args:
        name: The image's.
        image: What was walked over.
        bases: What it is built from, by name.
        packages: What the walk found in it.
        locked: Where wheels' hashes come from.
        epoch: SOURCE_DATE_EPOCH, which gives the time; without it there is none.
    """
    contents = sorted((path, entry.kind, entry.digest) for path, entry in image.files.items())
    serial = uuid.uuid5(uuid.NAMESPACE_URL, image.digest or repr(contents))
    components = [container(base, of, f"base:{base}") for base, of in sorted(bases.items())]
    components += [listed(one, locked) for one in packages]
    return cyclonedx(serial, container(name, image, "image"), components, epoch)
