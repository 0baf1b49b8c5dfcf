"""Packages that tests make: small wheels, and conda's."""

import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.container.stand_in_conda import raw_zstd

Contents = Mapping[str, bytes | str]  # by path; text is what a link points to
Nodes = Mapping[str, bytes | str | tuple[bytes | None, int] | None]  # None: a folder; with a mode of its own


def wheel(
    folder: Path, name: str, version: str, requires: str = "", script: str = "", tag: str = "any"
) -> Path:
    """A wheel of one module, which knows its version, and of a program with its name, if it is given."""
    info = f"{name}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    files = {
        f"{name}.py": f"version = '{version}'\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **({f"{name}-{version}.data/scripts/{name}": script} if script else {}),
    }
    path = folder / f"{name}-{version}-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": "".join(f"{one},,\n" for one in files)}.items():
            entry = zipfile.ZipInfo(file)
            entry.external_attr = 0o100755 << 16
            archive.writestr(entry, text)
    return path


def pack(target: Path, files: Contents, placeholder: Any = ("", {}), entry_points: Any = None) -> str:
    """Makes CHANNEL/PLATFORM/NAME-VERSION-BUILD.conda or .tar.bz2 of files; returns its sha256.

    `placeholder` is a prefix that is replaced, and the kind of each file that has it: text or binary;
    `entry_points` are those of a noarch Python package.
    """
    name, version, build = target.name.removesuffix(".conda").removesuffix(".tar.bz2").rsplit("-", 2)
    paths = []
    for path, data in files.items():
        content = data if isinstance(data, bytes) else files.get(str(Path(path).parent / data), b"")
        content = content if isinstance(content, bytes) else b""  # a link to a link
        one = {"_path": path, "path_type": "softlink" if isinstance(data, str) else "hardlink"}
        one["sha256"] = hashlib.sha256(content).hexdigest()
        if path in placeholder[1]:
            one |= {"prefix_placeholder": placeholder[0], "file_mode": placeholder[1][path]}
        paths.append(one)
    index = {"name": name, "version": version, "build": build, "build_number": 0, "license": "MIT"}
    index |= {"subdir": target.parent.name, "depends": ["python"] if entry_points else []}
    about: dict[str, Any] = {"paths.json": {"paths": paths, "paths_version": 1}}
    if entry_points is not None:
        index["noarch"] = "python"
        noarch = {"type": "python", "entry_points": entry_points}
        about["link.json"] = {"noarch": noarch, "package_metadata_version": 1}
    about["index.json"] = index
    info: dict[str, bytes | str] = {f"info/{key}": json.dumps(about[key]).encode() for key in about}
    info["info/files"] = "".join(f"{path}\n" for path in files).encode()
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".conda":
        with zipfile.ZipFile(target, "w") as parts:
            parts.writestr("metadata.json", '{"conda_pkg_format_version": 2}')
            for part, inside in (("pkg", files), ("info", info)):
                parts.writestr(f"{part}-{name}-{version}-{build}.tar.zst", raw_zstd(tarred(inside, "w")))
    else:
        target.write_bytes(tarred({**info, **files}, "w:bz2"))
    return hashlib.sha256(target.read_bytes()).hexdigest()


def tarred(files: Nodes, mode: Any = "w") -> bytes:
    """A tar of files, links and folders."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode=mode) as tar:
        for path, node in files.items():
            member, own = tarfile.TarInfo(path), 0o755 if node is None or path.startswith("bin/") else 0o644
            data, member.mode = node if isinstance(node, tuple) else (node, own)
            member.mtime = 1_700_000_000
            if data is None:
                member.type = tarfile.DIRTYPE
            elif isinstance(data, str):
                member.type, member.linkname = tarfile.SYMTYPE, data
            else:
                member.size = len(data)
            tar.addfile(member, io.BytesIO(data) if isinstance(data, bytes) else None)
    return sink.getvalue()
