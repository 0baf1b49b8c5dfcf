"""The conda half of a stack: solves it, writes its files, and reads them again.

`conda.lock` is what the slim image and `environment.yml` hold, `conda-dev.lock` what the dev image adds; both
are explicit, `url#sha256`, in the order of installation. `records.json` keeps the solver's input about
each package, so that the tests can solve again without a network. Only solving needs py-rattler.
"""

import asyncio
import json
import lzma
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HOST = "https://conda.anaconda.org/"
SUBDIRS = ("linux-64", "noarch")
FILES = {"train": "conda.lock", "dev": "conda-dev.lock"}
# What the machine brings: the oldest glibc that PyTorch's wheels run on.
VIRTUAL = {"__unix": "0", "__linux": "4.18", "__glibc": "2.28", "__archspec": "1"}
# NVIDIA has replaced these files in place: a hash of them holds until the next time.
REPLACED = ("cuda-version-12.6-3", "cuda-version-12.5-3", "cuda-opencl-12.5.39-0")
HEADER = """\
# Made by `make lock STACK={stack}`; not to be edited.{more}
# platform: linux-64
@EXPLICIT
"""
ENVIRONMENT = """\
# Made by `make lock STACK={stack}`; not to be edited. What conda.lock and wheels.lock hold, for Linux x86_64:
# conda env create -f {path}
# conda run -n {name} pip install --no-deps --no-build-isolation -e {root}
name: {name}
channels:
{channels}
  - nodefaults
dependencies:
{packages}
  - pip:
      - --require-hashes
      - -r {wheels}
"""


class Unsolved(Exception):  # noqa: N818
    """Raised where there is no solution, with the reason."""


class Package(NamedTuple):
    """A conda package: its address, hash and dependencies.

    `md5` is empty unless no sha256 is known; `size` is 0 where unknown (bytes of the archive).
    """

    url: str
    name: str
    version: str
    build: str
    build_number: int
    sha256: str
    md5: str
    size: int
    license: str
    depends: list[str]
    constrains: list[str]

    @property
    def line(self) -> str:
        """Line of the package in an explicit lock."""
        return f"{self.url}#{self.sha256 or self.md5}"

    @property
    def channel(self) -> str:
        """The address of its channel, without the platform."""
        return self.url.rsplit("/", 2)[0].removeprefix(HOST)

    @property
    def python(self) -> bool:
        """True if it installs a Python package, which a wheel could install as well."""
        return any(re.split(r"[ =<>]", line)[0] == "python" for line in self.depends)


def split(url: str) -> tuple[str, str, str]:
    """Returns name, version and build in a package's address or file name."""
    name, version, build = re.sub(r"\.(conda|tar\.bz2)$", "", url.rsplit("/", 1)[-1]).rsplit("-", 2)
    return name, version, build


def build_number(build: str) -> int:
    """Returns the last number between underscores of a build string, as in `h8ab3286_1_cpython`."""
    return int(next((part for part in reversed(build.split("_")) if part.isdigit()), 0))


def read_records(text: str) -> list[Package]:
    """Parses `records.json`."""
    return [Package(**entry) for entry in json.loads(text)]


def write_records(packages: Sequence[Package]) -> str:
    """Writes one line for each package, so that a diff can be read."""
    return "[\n" + ",\n".join(json.dumps(package._asdict()) for package in packages) + "\n]\n"


def write_lock(stack: str, target: str, packages: Sequence[Package]) -> str:
    """Returns the text of an explicit lock."""
    more = " What the dev image adds to conda.lock." if target == "dev" else ""
    return HEADER.format(stack=stack, more=more) + "".join(f"{package.line}\n" for package in packages)


def write_environment(stack: str, channels: Sequence[str], packages: Sequence[Package], path: str) -> str:
    """Returns the text of the `environment.yml` at `path`, with version and build of each package."""
    return ENVIRONMENT.format(
        stack=stack,
        path=path,
        root="../.." if "/" in path else ".",
        name=stack,
        channels="\n".join(f"  - {channel}" for channel in channels),
        # With several channels each package names its own: a strict priority would look in the first only.
        packages="\n".join(
            f"  - {f'{p.channel}::' * (len(channels) > 1)}{p.name}={p.version}={p.build}" for p in packages
        ),
        wheels="wheels.lock" if "/" in path else f"stacks/{stack}/wheels.lock",
    )


def pooled(file: Path, channels: Sequence[str], md5_only: Sequence[str]) -> list[Package]:
    """Returns a pool's records of the channels that have a sha256 and known dependencies."""
    pool = json.loads(lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes())
    found = []
    for key, entry in pool.items():
        channel, subdir, filename = key.rsplit("/", 2)
        known = "depends" in entry and ("sha256" in entry or filename in md5_only)
        if channel not in channels or subdir not in SUBDIRS or not known:
            continue
        name, version, build = split(filename)
        facts: dict[str, Any] = {"sha256": entry.get("sha256", "")}
        facts |= {"md5": "" if facts["sha256"] else entry["md5"], "size": int(entry.get("size", 0))}
        facts |= {"license": entry.get("license", ""), "depends": entry["depends"]}
        facts |= {"constrains": entry.get("constrains", []), "build_number": build_number(build)}
        found.append(Package(url=f"{HOST}{key}", name=name, version=version, build=build, **facts))
    return found


def write_repodata(packages: Sequence[Package], folder: Path) -> list[tuple[str, str, Path]]:
    """Writes the records as channels do; returns channel, platform and file of each."""
    files: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for package in packages:
        _, subdir, filename = package.url.rsplit("/", 2)
        entry = {key: value for key, value in package._asdict().items() if key != "url" and value != ""}
        entry |= {"subdir": subdir, "size": package.size or None}
        kind = "packages.conda" if filename.endswith(".conda") else "packages"
        parts = files.setdefault((package.channel, subdir), {"packages": {}, "packages.conda": {}})
        parts[kind][filename] = entry
    written = []
    for (channel, subdir), parts in files.items():
        path = folder / channel / subdir / "repodata.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"info": {"subdir": subdir}, **parts}))
        written.append((channel, subdir, path))
    return written


def to_package(record: Any) -> Package:
    """Returns py-rattler's record as a Package."""
    sha256 = (record.sha256 or b"").hex()
    return Package(
        url=record.url,
        name=record.name.normalized,
        version=str(record.version),
        build=str(record.build),
        build_number=record.build_number,
        sha256=sha256,
        md5="" if sha256 else (record.md5 or b"").hex(),
        size=record.size or 0,
        license=record.license or "",
        depends=list(record.depends),
        constrains=list(record.constrains),
    )


def solve(
    specs: Sequence[str],
    channels: Sequence[str],
    packages: Sequence[Package] | None = None,
    kept: Sequence[Package] = (),
    fixed: Sequence[Package] = (),
) -> list[Package]:
    """Solves specs, in the order of installation.

    Args:
        specs: What is asked for, as conda match specs.
        channels: Names or addresses of channels; the first one that has a package wins.
        packages: The records to choose from; None asks the channels.
        kept: Records that are preferred where they still fit.
        fixed: Records that stay.

    Raises:
        Unsolved: There is no solution, or a channel cannot be reached; the message says why.
    """
    import rattler
    from rattler.exceptions import GatewayError, SolverError

    generic = [
        rattler.GenericVirtualPackage(
            rattler.PackageName(name), rattler.Version(version), rattler.BuildString("0")
        )
        for name, version in VIRTUAL.items()
    ]

    def opened(some: Sequence[Package], folder: Path) -> list[rattler.SparseRepoData]:
        return [
            rattler.SparseRepoData(rattler.Channel(f"{HOST}{channel}"), subdir, str(path))
            for channel, subdir, path in write_repodata(some, folder)
        ]

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        old = {
            record.url: record
            for part in opened([*kept, *fixed], folder / "old")
            for record in part.load_all_records()
        }
        preferred: dict[str, Any] = {
            "locked_packages": [old[package.url] for package in kept],
            "pinned_packages": [old[package.url] for package in fixed],
            "virtual_packages": generic,
        }
        if packages is None:
            platforms = [rattler.Subdir(name) for name in SUBDIRS]
            answer = rattler.solve(channels, specs, platforms=platforms, **preferred)
        else:
            priority = rattler.ChannelPriority.Disabled
            sources = opened(packages, folder / "new")
            answer = rattler.solve_with_sparse_repodata(
                specs, sources, channel_priority=priority, **preferred
            )
        try:
            records = asyncio.run(answer)
        except (SolverError, GatewayError) as error:
            hint = " (--pool FILE solves without a network)" * isinstance(error, GatewayError)
            raise Unsolved(" ".join(str(error).split()) + hint) from error
    found = {record.name.normalized: to_package(record) for record in records}
    return [found[record.name.normalized] for record in rattler.PackageRecord.sort_topologically([*records])]
