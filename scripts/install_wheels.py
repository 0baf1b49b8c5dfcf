#!/usr/bin/env python3
"""Installs groups of a wheels.lock into an environment of the image, each by its hash, the same each time.

Runs while the image is built. The standard library is enough.
"""

import argparse
import hashlib
import json
import os
import subprocess
import tempfile
from pathlib import Path

from prune_env import prune
from wheels import canonical, read_lock, select


def install(lock: Path, python: Path, groups: list[str], uv: Path, replace: set[str]) -> None:
    """Installs the groups.

    Args:
        lock: wheels.lock of a stack.
        python: The environment's.
        groups: Of the lock.
        uv: The program.
        replace: Packages to install even where their version is there: conda's are not the locked wheels.
    """
    environment = {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",  # with times in it
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_NO_INSTALLER_METADATA": "1",  # says when and from where it was installed
        "UV_LINK_MODE": "copy",
        "UV_NO_PROGRESS": "1",
    }
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write(select(read_lock(lock.read_text()), groups))
        listed.flush()
        words = [uv, "pip", "install", "--python", python, "--require-hashes", "--no-deps", "-r", listed.name]
        # Not --reinstall: that would download every wheel anew, whatever the cache holds.
        words += [f"--reinstall-package={name}" for name in sorted(replace)]
        subprocess.run([str(word) for word in words], env=environment, check=True)
    (python.parent.parent / ".lock").unlink(missing_ok=True)  # uv's


def replaced_records(prefix: Path, wheels: set[str]) -> dict[Path, str]:
    """Conda's records, and the names, of Python packages that wheels replace (setuptools, packaging)."""
    found = {}
    for file in (prefix / "conda-meta").glob("*.json"):
        record = json.loads(file.read_text())
        name = canonical(record["name"])
        if name in wheels and any("site-packages/" in path for path in record["files"]):
            found[file] = name
    return found


def note_lock(lock: Path, prefix: Path) -> None:
    """Leaves the lock's hash where bootstrap.py does in a .venv: the manifests of runs tell it."""
    text = json.dumps({"lock": hashlib.sha256(lock.read_bytes()).hexdigest()}) + "\n"
    stamp = prefix / ".bootstrap.json"
    if not stamp.exists() or stamp.read_text() != text:  # in a layer below
        stamp.write_text(text)


def compile_all(python: Path, paths: list[Path]) -> None:
    """Writes bytecode that holds its source's hash instead of a time, and is never checked against it.

    Without it each process of a user who can't write here would compile torch anew. Two processes with fixed
    shares: what one writes depends on what it compiled before (marshal's flags follow reference counts).
    """
    words = [python, "-B", "-m", "compileall", "-qq", "-j1", "--invalidation-mode", "unchecked-hash"]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    torch = [path for path in paths if path.name == "torch"]
    shares = [share for share in (torch, [path for path in paths if path not in torch]) if share]
    running = [
        subprocess.Popen([str(word) for word in [*words, *sorted(share)]], env=environment)
        for share in shares
    ]
    for process in running:
        # 1 only counts files that no Python 3 can compile: templates, say.
        if process.wait() < 0:
            raise SystemExit(f"install_wheels: compiling was ended by signal {-process.returncode}")


def has_bytecode(path: Path) -> bool:
    """Whether a package or module of site-packages was compiled before: in a layer below."""
    if path.is_dir():
        return any(path.rglob("*.pyc"))
    return any((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"))


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lock", type=Path, help="wheels.lock of a stack")
    parser.add_argument("prefix", type=Path, help="the environment")
    parser.add_argument("--groups", nargs="+", required=True, help="groups of the lock")
    parser.add_argument(
        "--uv", type=Path, required=True, help="folder of uv; made with pip if it isn't there"
    )
    parser.add_argument(
        "--prune", type=Path, metavar="LIST", help="remove what isn't needed; write this list"
    )
    options = parser.parse_args()
    python = options.prefix / "bin" / "python"
    asked = "import sysconfig; print(sysconfig.get_path('purelib'), sysconfig.get_path('stdlib'))"
    site, standard = map(Path, subprocess.check_output([python, "-B", "-c", asked], text=True).split())
    site.mkdir(parents=True, exist_ok=True)
    wheels = [
        wheel for wheel in read_lock(options.lock.read_text()) if set(wheel.groups) & set(options.groups)
    ]
    replaced = replaced_records(options.prefix, {canonical(wheel.name) for wheel in wheels})
    if wheels:  # a stack whose dev tools come from conda has none in that group
        install(options.lock, python, options.groups, options.uv, set(replaced.values()))
    for record in replaced:  # no longer true
        record.unlink()
    if options.prune is not None:
        options.prune.parent.mkdir(parents=True, exist_ok=True)
        options.prune.write_text(json.dumps(prune(options.prefix, dry=False), indent=1) + "\n")
    note_lock(options.lock, options.prefix)
    paths = list(site.iterdir())
    if standard.is_relative_to(options.prefix):  # not where the environment is a virtual one
        paths += [path for path in standard.iterdir() if path.name != "site-packages"]
    compile_all(python, [path for path in paths if not has_bytecode(path)])


if __name__ == "__main__":
    main()
