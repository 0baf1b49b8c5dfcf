#!/usr/bin/env python3
"""Makes a Debian tree stand in for the image's two bases: `conda` in /opt/conda, and packages for it.

What stands in for conda's Python is a virtual environment of Debian's, packed as a conda package with its
hash in a lock: so the image's own scripts fetch, check and install it as they do with the real ones.
"""

import argparse
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

HERE = Path(__file__).parent
CHANNEL = "https://conda.anaconda.org"
WHERE = "opt/stand-in"


def package(folder: Path, name: str, version: str, files: dict[str, bytes], links: dict[str, str]) -> str:
    """Packs files (by path) and symlinks (to their targets); returns the line for a lock."""
    kinds = {**dict.fromkeys(files, "hardlink"), **dict.fromkeys(links, "softlink")}
    paths = [
        {"_path": path, "path_type": kind, "sha256": hashlib.sha256(files.get(path, b"")).hexdigest()}
        for path, kind in sorted(kinds.items())
    ]
    index = {"name": name, "version": version, "build": "standin_0", "build_number": 0, "subdir": "linux-64"}
    index |= {"depends": [], "license": "PSF-2.0"}
    info = {
        "info/index.json": json.dumps(index).encode(),
        "info/paths.json": json.dumps({"paths": paths, "paths_version": 1}).encode(),
        "info/files": "".join(f"{path}\n" for path in sorted(kinds)).encode(),
    }
    target = folder / "conda-forge" / "linux-64" / f"{name}-{version}-standin_0.tar.bz2"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w:bz2") as tar:
        for path, content in {**info, **files}.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(content), 0o755 if path.startswith("bin/") else 0o644
            tar.addfile(member, io.BytesIO(content))
        for path, goal in links.items():
            member = tarfile.TarInfo(path)
            member.type, member.linkname = tarfile.SYMTYPE, goal
            tar.addfile(member)
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    return f"{CHANNEL}/{target.relative_to(folder)}#{digest}\n"


def pip_of(library: Path, folder: Path) -> str:
    """Packs the pip of an environment, as conda does, without its wheel's RECORD."""
    (info,) = (library / "site-packages").glob("pip-*.dist-info")
    files = {
        f"lib/{path.relative_to(library.parent)}": path.read_bytes()
        for place in (info.with_name("pip"), info)
        for path in sorted(place.rglob("*"))
        if path.is_file() and path.suffix != ".pyc" and path.name != "RECORD"
    }
    program = "import sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n"
    files["bin/pip"] = f"#!/opt/env/bin/python\n{program}".encode()
    return package(folder, "pip", info.stem.removeprefix("pip-"), files, {})


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path, help="root of a Debian with python3, python3-venv and g++")
    tree = parser.parse_args().tree
    # With pip, which installs uv; and as a place of its own, as Miniconda's.
    subprocess.run(["chroot", tree, "python3", "-m", "venv", "/opt/conda"], check=True)
    shutil.copy(HERE / "stand_in_conda.py", tree / "opt/conda/bin/conda")
    (tree / "opt/conda/bin/conda").chmod(0o755)
    (tree / "opt/conda/condabin").mkdir()
    (tree / "opt/conda/condabin/conda").symlink_to("../bin/conda")
    asked = "import platform; print(platform.python_version())"
    full = subprocess.check_output(["chroot", tree, "python3", "-c", asked], text=True).strip()
    minor = full.rpartition(".")[0]
    folder = tree / WHERE
    configuration = f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {full}\n".encode()
    python = {f"bin/{name}": f"python{minor}" for name in ("python", "python3")}
    python[f"bin/python{minor}"] = f"/usr/bin/python{minor}"
    lock = package(folder, "python", full, {"pyvenv.cfg": configuration}, python)
    lock += pip_of(tree / f"opt/conda/lib/python{minor}", folder)
    (folder / "conda.lock").write_text(f"@EXPLICIT\n{lock}")
    tools = {"share/tools": b"git and openssh are Debian's own in this image\n"}
    (folder / "conda-dev.lock").write_text(f"@EXPLICIT\n{package(folder, 'tools', '1.0', tools, {})}")


if __name__ == "__main__":
    main()
