#!/usr/bin/env python3
"""Stands in for conda where none can be installed: `create` from an explicit list of local packages, no more.

It does what conda 26.7.1 was seen to do for such a list: links the files, replaces prefixes, writes the entry
points and the bytecode of noarch Python packages, and a record per package. It checks no hash, as conda
over file://. Of zstd it reads only what `raw_zstd` writes: Debian's Python has no zstd.
"""

import argparse
import bz2
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

VERSION = "stand-in (a program of the tests, not conda)"
MAGIC, BLOCK = b"\x28\xb5\x2f\xfd", 1 << 17
ENTRY = """\
#!{python}
import sys
from {module} import {top}
if __name__ == "__main__":
    sys.exit({function}())
"""


def raw_zstd(data: bytes) -> bytes:
    """A zstd frame of uncompressed blocks, which any zstd reads (RFC 8878)."""
    frame = [MAGIC, b"\xe0", len(data).to_bytes(8, "little")]  # one segment, size in 8 bytes, no checksum
    for start in range(0, max(len(data), 1), BLOCK):
        block = data[start : start + BLOCK]
        last = start + BLOCK >= len(data)
        frame += [(len(block) << 3 | last).to_bytes(3, "little"), block]
    return b"".join(frame)


def unraw_zstd(frame: bytes) -> bytes:
    """The inverse of `raw_zstd`."""
    if frame[:5] != MAGIC + b"\xe0":
        sys.exit("stand-in conda: this .conda is compressed; the stand-in reads only those of the tests")
    data, at, last = [], 13, 0
    while not last:
        head = int.from_bytes(frame[at : at + 3], "little")
        last, size = head & 1, head >> 3
        data.append(frame[at + 3 : at + 3 + size])
        at += 3 + size
    return b"".join(data)


def unpack(file: Path) -> dict[str, tuple[bytes | str, int]]:
    """A package's files by path: content, or a symlink's target as text, and mode."""
    tars = [bz2.decompress(file.read_bytes())] if file.suffix == ".bz2" else []
    if not tars:
        with zipfile.ZipFile(file) as parts:
            tars = [unraw_zstd(parts.read(name)) for name in parts.namelist() if name.endswith(".tar.zst")]
    files: dict[str, tuple[bytes | str, int]] = {}
    for data in tars:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            for member in tar:
                source = tar.extractfile(member) if member.isfile() else None
                if source or member.issym():
                    files[member.name] = (source.read() if source else member.linkname, member.mode)
    return files


def replaced(data: bytes, old: bytes, new: bytes, mode: str) -> bytes:
    """A file with its placeholder replaced by the prefix; in a binary its length stays."""
    if mode == "text":
        return data.replace(old, new)
    start = 0
    while (start := data.find(old, start)) >= 0:
        end = data.index(b"\0", start)
        text = data[start:end].replace(old, new)
        data = data[:start] + text.ljust(end - start, b"\0") + data[end:]
        start = end
    return data


def install(file: Path, prefix: Path, python: str) -> dict[str, Any]:
    """Links one package; returns its record."""
    inside = unpack(file)

    def info(name: str, default: Any) -> Any:
        return json.loads(inside[name][0]) if name in inside else default

    index = info("info/index.json", {})
    noarch = index.get("noarch") == "python"
    if noarch and not python:
        sys.exit(f"stand-in conda: {file.name} is a noarch Python package, and the lock has no python")
    listed, record_paths = [], []
    for path in info("info/paths.json", {})["paths"]:
        place = path["_path"]
        if noarch:
            place = place.replace("site-packages/", f"lib/python{python}/site-packages/", 1)
            place = place.replace("python-scripts/", "bin/", 1)
        data, mode = inside[path["_path"]]
        target = prefix / place
        target.parent.mkdir(parents=True, exist_ok=True)
        entry = dict(path)  # its path in the package, not in the prefix: as in conda
        if isinstance(data, str):
            target.symlink_to(data)
        else:
            if old := path.get("prefix_placeholder"):
                data = replaced(data, old.encode(), str(prefix).encode(), path["file_mode"])
            entry["sha256_in_prefix"] = hashlib.sha256(data).hexdigest()
            target.write_bytes(data)
            target.chmod(mode)
        listed.append(place)
        record_paths.append(entry)
    if noarch:
        interpreter = prefix / f"bin/python{python}"
        for place in [place for place in listed if place.endswith(".py")]:
            words = [str(interpreter), "-m", "compileall", "-q", "-l", str(prefix / place)]
            subprocess.run(words, check=True)
            source = PurePosixPath(place)
            compiled = f"{source.stem}.cpython-{python.replace('.', '')}.pyc"
            listed.append(str(source.parent / "__pycache__" / compiled))
            record_paths.append({"_path": listed[-1], "path_type": "pyc_file"})
        for line in info("info/link.json", {}).get("noarch", {}).get("entry_points", []):
            command, _, function = (part.strip() for part in line.replace("=", ":", 1).partition(":"))
            module, _, function = function.partition(":")
            script, top = prefix / "bin" / command, function.split(".")[0]
            script.parent.mkdir(parents=True, exist_ok=True)
            values = {"python": interpreter, "module": module.strip(), "function": function, "top": top}
            script.write_text(ENTRY.format(**values))
            script.chmod(0o755)
            listed.append(f"bin/{command}")
            record_paths.append({"_path": listed[-1], "path_type": "unix_python_entry_point"})
    folder, channel = str(file.with_suffix("")), file.parent.parent.as_uri()
    record = {**index, "fn": file.name, "url": file.as_uri(), "channel": channel, "files": listed}
    record |= {"extracted_package_dir": folder, "package_tarball_full_path": str(file)}
    record |= {"link": {"source": folder, "type": 1}}
    return {**record, "paths_data": {"paths": record_paths, "paths_version": 1}}


def main() -> None:
    """Reads the arguments, as far as conda_env.py gives them."""
    parser = argparse.ArgumentParser(description=__doc__, prog="conda")
    parser.add_argument("-V", "--version", action="version", version=f"conda {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (commands.add_parser("create"), commands.add_parser("install")):
        for flag in ("-y", "--no-default-packages", "--override-channels"):
            command.add_argument(flag, action="store_true")
        command.add_argument("--offline", action="store_true", required=True)
        command.add_argument("-c", "--channel")
        command.add_argument("-p", "--prefix", type=Path, required=True)
        command.add_argument("--file", type=Path, required=True)
    options = parser.parse_args()
    lines = [line for line in options.file.read_text().splitlines() if line and line[0] not in "#@"]
    urls = [urlsplit(line.partition("#")[0]) for line in lines]
    if any(url.scheme != "file" for url in urls):
        sys.exit("stand-in conda: only file:// packages")
    files = [Path(unquote(url.path)) for url in urls]
    meta = options.prefix / "conda-meta"
    meta.mkdir(parents=True, exist_ok=options.command == "install")
    # As in conda: python first, for the noarch packages that need it.
    names = {file: file.name.rsplit("-", 2)[0] for file in files}
    python = next((path.stem.split("-")[1].rpartition(".")[0] for path in meta.glob("python-*.json")), "")
    for file in sorted(files, key=lambda file: names[file] != "python"):
        record = install(file, options.prefix, python)
        if record["name"] == "python":
            python = ".".join(record["version"].split(".")[:2])
        name = f"{record['name']}-{record['version']}-{record['build']}.json"
        (meta / name).write_text(json.dumps(record, indent=2))
    (meta / "history").write_text(f"==> {time.time()} <==\n# cmd: {' '.join(sys.argv)}\n")
    (meta / "created_at").write_text(f"{time.time()}\n")


if __name__ == "__main__":
    main()
