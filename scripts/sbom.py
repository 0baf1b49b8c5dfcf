"""A bill of materials (CycloneDX 1.6, JSON) of the same walk that finds each file's owner."""

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from image_records import Component as Found, pruned
from image_tar import Image
from locks import Locked, canonical
from packageurl import PackageURL


def purl(one: Found) -> PackageURL:
    """A package URL (github.com/package-url/purl-spec) of a component."""
    if one.kind == "wheel":
        return PackageURL("pypi", None, one.name, one.version)
    if one.kind == "trainer":  # built from this repository, not taken from PyPI
        return PackageURL("generic", None, one.name, one.version)
    channel, file = str(one.record.get("channel", "")), str(one.record.get("url", ".conda"))
    given = {"build": one.record["build"], "channel": channel.rstrip("/").rsplit("/", 1)[-1]}
    given |= {"subdir": one.record.get("subdir", "")}
    given |= {"type": "conda" if file.endswith(".conda") else "tar.bz2"}
    return PackageURL("conda", None, one.name, one.version, given)


def listed(one: Found, locked: Locked | None) -> Component:
    """A component's entry, with the hash of its archive: conda's own, or that of the lock."""
    hashes = [str(one.record["sha256"])] if one.record.get("sha256") else []
    if locked and one.kind == "wheel":
        same = [w for w in locked.wheels if (canonical(w.name), w.version) == (one.name, one.version)]
        hashes = [value for wheel in same for value in wheel.hashes]
    # The lock serves several platforms; which of its wheels was taken no RECORD tells.
    several = [Property(name="trainer:sha256-one-of", value=one) for one in hashes if len(hashes) > 1]
    license = str(one.record.get("license", ""))
    return Component(
        name=one.name,
        version=one.version,
        type=ComponentType.APPLICATION if one.kind == "trainer" else ComponentType.LIBRARY,
        bom_ref=f"/{one.place}",
        purl=purl(one),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=value) for value in hashes if not several],
        licenses=[DisjunctiveLicense(name=license)] if license else [],
        properties=[Property(name="trainer:record", value=f"/{one.place}"), *several],
    )


def container(name: str, image: Image, ref: str) -> Component:
    """The entry of an image: its manifest's digest, its labels, and what isn't quite as its wheel has it."""
    labels = image.config.get("config", {}).get("Labels") or {}
    less = pruned(image.files).stripped
    return Component(
        name=name,
        version=image.digest,
        type=ComponentType.CONTAINER,
        bom_ref=ref,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=image.digest.partition(":")[2])],
        properties=[
            *(Property(name=key, value=str(value)) for key, value in labels.items()),
            *(Property(name="trainer:without-symbols", value=f"/{path}") for path in less),
        ],
    )


def bill(
    name: str,
    image: Image,
    bases: Mapping[str, Image],
    packages: Sequence[Found],
    locked: Locked | None,
) -> str:
    """The bill of materials of an image; the same for the same image, of whose time it is.

    Args:
        name: The image's.
        image: What was walked over.
        bases: What it is built from, by name.
        packages: What the walk found in it.
        locked: Where wheels' hashes come from.
    """
    whole = container(name, image, "image")
    created = datetime.fromisoformat(str(image.config.get("created", "1970-01-01T00:00:00"))[:19])
    components = [container(base, of, f"base:{base}") for base, of in bases.items()]
    components += [listed(one, locked) for one in packages]
    made = Bom(
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, image.digest),
        metadata=BomMetaData(component=whole, timestamp=created.replace(tzinfo=timezone.utc)),
        components=components,
    )
    made.register_dependency(whole, components)
    return make_outputter(made, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2)
