"""Checks of a stack's files against each other; each returns errors, one line each.

Needs py-rattler, no network.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rattler
from conda_lock import (
    FILES,
    HOST,
    REPLACED,
    SUBDIRS,
    VIRTUAL,
    Package,
    read_lock,
    read_records,
    read_toml,
    split,
    write_environment,
    write_lock,
)
from explicit_lock import LockError, parse_lock
from wheels import Wheel, canonical, read_lock as read_wheels


def lock_faults(text: str, channels: Sequence[str], md5_only: Sequence[str] = ()) -> list[str]:
    """Checks an explicit lock by itself: hashes, channels, no package twice.

    Args:
        text: The lock.
        channels: Those that the stack names.
        md5_only: The files that may have an md5 in place of a sha256.
    """
    allowed = frozenset(split(file)[0] for file in md5_only if file in text)
    try:
        packages = parse_lock(text, allowed)
    except LockError as error:
        return [str(error)]
    urls = {f"{HOST}{channel}/{subdir}/" for channel in channels for subdir in SUBDIRS}
    faults = [
        f"{one.file}: not of {', '.join(channels)}: {one.url}"
        for one in packages
        if one.url.removesuffix(one.file) not in urls
    ]
    faults += [
        f"{one.file}: an md5" for one in packages if one.algorithm == "md5" and one.file not in md5_only
    ]
    return faults + [
        f"{one.file}: was replaced in place by its publisher"
        for one in packages
        if one.file.startswith(REPLACED)
    ]


def record(name: str, version: str, build: str = "0", number: int = 0) -> rattler.PackageRecord:
    """Returns the record that py-rattler matches with a spec."""
    return rattler.PackageRecord(name, version, rattler.BuildString(build), number, "linux-64")


def closure_faults(packages: Sequence[Package], specs: Sequence[str] = ()) -> list[str]:
    """Checks that specs, dependencies and constraints hold in a set of packages, each named once."""
    faults = []
    held = {p.name: record(p.name, p.version, p.build, p.build_number) for p in packages}
    held |= {name: record(name, version) for name, version in VIRTUAL.items()}
    if len(held) != len(packages) + len(VIRTUAL):
        faults.append("a package is named twice")
    asked = [("the stack", spec) for spec in specs]
    asked += [(package.name, spec) for package in packages for spec in package.depends]
    for by, line in asked:
        name = re.split(r"[ =<>!~\[]", line)[0].lower()
        if name not in held:
            faults.append(f"{by} needs {line}: missing")
        elif not rattler.MatchSpec(line).matches(held[name]):
            faults.append(f"{by} needs {line}: {held[name].version} {held[name].build} is locked")
    for package in packages:
        for line in package.constrains:
            name = re.split(r"[ =<>!~\[]", line)[0].lower()
            if name in held and not rattler.MatchSpec(line).matches(held[name]):
                faults.append(f"{package.name} excludes {held[name].version}: {line}")
    return faults


def same_faults(name: str, text: str, expected: str) -> list[str]:
    """Names the first line in which a file differs from what the records say."""
    if text == expected:
        return []
    pairs = zip([*text.splitlines(), ""], [*expected.splitlines(), ""], strict=False)
    here, there = next(((a, b) for a, b in pairs if a != b), ("", ""))
    return [f"{name} has {here!r}, the records say {there!r}"]


def brings_faults(description: dict[str, Any], packages: Sequence[Package]) -> list[str]:
    """Compares stack.toml with the packages: Python, and where conda brings them PyTorch and CUDA."""
    held = {package.name: package for package in packages}
    said = {"python": (description["python"], held["python"].version.rpartition(".")[0])}
    if description["kind"] == "conda":
        brings, pins, torch = description["brings"], description["pins"], held["pytorch"]
        said |= {name: (pins[name], held[name].version) for name in ("torchvision", "torchaudio")}
        said["torch"] = (pins["torch"], torch.version)
        said["cuda"] = (brings["cuda"], held["pytorch-cuda"].version)
        said["cuda-cudart"] = (brings["cuda"], held["cuda-cudart"].version.rpartition(".")[0])
        built = re.search(r"_cuda([\d.]+)_cudnn([\d.]+)_", torch.build)
        said["cudnn"] = (f"{brings['cuda']} {brings['cudnn']}", " ".join(built.groups()) if built else "")
        said["triton"] = (brings["triton"], held["torchtriton"].version)
    return [f"{key}: stack.toml says {a}, the lock {b}" for key, (a, b) in said.items() if a != b]


def twice_faults(packages: Sequence[Package], wheels: Sequence[Wheel], kind: str) -> list[str]:
    """Finds Python packages that a wheel would install again in another version, or at all beside conda's."""
    held = {canonical(package.name): package.version for package in packages if package.python}
    held |= {"torch": "conda's", "triton": "conda's"} if kind == "conda" else {}
    return [
        f"{wheel.name}: {held[wheel.name]} from conda, {wheel.version} as a wheel"
        for wheel in wheels
        if wheel.name in held and (kind == "conda" or held[wheel.name] != wheel.version)
    ]


def stack_faults(folder: Path) -> list[str]:
    """Checks a stack's folder, and the top-level environment.yml if that says it is of this stack."""
    description, name = read_toml(folder / "stack.toml"), folder.name
    conda, packages = description["conda"], read_records((folder / "records.json").read_text())
    channels, md5_only = conda["channels"], conda.get("md5_only", [])
    texts = {target: (folder / file).read_text() for target, file in FILES.items()}
    urls = {target: {url for url, _ in read_lock(text)} for target, text in texts.items()}
    parts = {target: [package for package in packages if package.url in urls[target]] for target in FILES}
    faults = [fault for text in texts.values() for fault in lock_faults(text, channels, md5_only)]
    for target, file in FILES.items():
        faults += same_faults(file, texts[target], write_lock(name, target, parts[target]))
    faults += [
        f"{f}: no lock holds it" for f in sorted({p.url for p in packages} - urls["train"] - urls["dev"])
    ]
    faults += [f"{p.url}: its name differs" for p in packages if split(p.url) != (p.name, p.version, p.build)]
    faults += closure_faults(parts["train"], conda["train"])
    faults += closure_faults([*parts["train"], *parts["dev"]], [*conda["train"], *conda["dev"]])
    paths = [folder / "environment.yml"]
    top = folder.parent.parent / "environment.yml"
    paths += [top] if top.exists() and f"\nname: {name}\n" in top.read_text() else []
    for path in paths:
        where = str(path.relative_to(folder.parent.parent))
        faults += same_faults(
            where, path.read_text(), write_environment(name, channels, parts["train"], where)
        )
    faults += brings_faults(description, packages)
    wheels = read_wheels((folder / "wheels.lock").read_text())
    faults += twice_faults(packages, wheels, description["kind"])
    if description["name"] != name:
        faults.append(f"stack.toml names {description['name']}")
    if description["source_date_epoch"] % 86400:
        faults.append("source_date_epoch is not the start of a day")
    return list(dict.fromkeys(faults))
