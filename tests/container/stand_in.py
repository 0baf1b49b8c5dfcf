#!/usr/bin/env python3
"""Makes a Debian tree stand in for the image's two bases: `conda` in /opt/conda, and packages for it.

What stands in for conda's Python is a virtual environment of Debian's, packed as a conda package with its
hash in a lock: so the image's own scripts fetch, check and install it as they do with the real ones.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.helpers.packages import Contents, pack

HERE = Path(__file__).parent
CHANNEL = "https://conda.anaconda.org"
WHERE = "opt/stand-in"


def package(folder: Path, name: str, version: str, files: Contents) -> str:
    """Packs files and links; returns the line for a lock."""
    target = folder / "conda-forge" / "linux-64" / f"{name}-{version}-standin_0.tar.bz2"
    digest = pack(target, files)
    return f"{CHANNEL}/{target.relative_to(folder)}#{digest}\n"


def pip_of(library: Path, folder: Path) -> str:
    """Packs the pip of an environment, as conda does, without its wheel's RECORD."""
    (info,) = (library / "site-packages").glob("pip-*.dist-info")
    files: dict[str, bytes | str] = {
        f"lib/{path.relative_to(library.parent)}": path.read_bytes()
        for place in (info.with_name("pip"), info)
        for path in sorted(place.rglob("*"))
        if path.is_file() and path.suffix != ".pyc" and path.name != "RECORD"
    }
    program = "import sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n"
    files["bin/pip"] = f"#!/opt/env/bin/python\n{program}".encode()
    return package(folder, "pip", info.stem.removeprefix("pip-"), files)


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
    python: dict[str, bytes | str] = {f"bin/{name}": f"python{minor}" for name in ("python", "python3")}
    python |= {f"bin/python{minor}": f"/usr/bin/python{minor}", "pyvenv.cfg": configuration}
    lock = package(folder, "python", full, python)
    lock += pip_of(tree / f"opt/conda/lib/python{minor}", folder)
    (folder / "conda.lock").write_text(f"@EXPLICIT\n{lock}")
    tools = {"share/tools": b"git and openssh are Debian's own in this image\n"}
    (folder / "conda-dev.lock").write_text(f"@EXPLICIT\n{package(folder, 'tools', '1.0', tools)}")


if __name__ == "__main__":
    main()
