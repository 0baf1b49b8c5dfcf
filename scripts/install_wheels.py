#!/usr/bin/env python3
"""Installs groups of a wheels.lock into an environment of the image by uv, the same each time.

Runs while the image is built. The standard library is enough.
"""

import argparse
import hashlib
import json
import os
import subprocess
import tempfile
from pathlib import Path

from locks import canonical, read_wheels, select
from prune_env import prune

SETTINGS = {
    "PYTHONDONTWRITEBYTECODE": "1",  # with times in it
    "UV_PYTHON_DOWNLOADS": "never",
    "UV_NO_INSTALLER_METADATA": "1",  # says when and from where it was installed
    "UV_LINK_MODE": "copy",
    "UV_NO_PROGRESS": "1",
}


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
    torch = [path for path in paths if path.name == "torch"]
    running = [
        subprocess.Popen(
            [str(word) for word in [*words, *sorted(share)]], env={**os.environ, "PYTHONHASHSEED": "0"}
        )
        for share in (torch, [path for path in paths if path not in torch])
        if share
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
    parser.add_argument("groups", nargs="+", help="of the lock")
    parser.add_argument("--uv", required=True, help="the program")
    parser.add_argument(
        "--prune", type=Path, metavar="LIST", help="remove what isn't needed; write this list"
    )
    options = parser.parse_args()
    python = options.prefix / "bin" / "python"
    asked = "import sysconfig; print(sysconfig.get_path('purelib'), sysconfig.get_path('stdlib'))"
    site, standard = map(Path, subprocess.check_output([python, "-B", "-c", asked], text=True).split())
    site.mkdir(parents=True, exist_ok=True)
    lock = read_wheels(options.lock.read_text())
    wheels = {canonical(wheel.name) for wheel in lock if set(wheel.groups) & set(options.groups)}
    replaced = replaced_records(options.prefix, wheels)
    if wheels:  # a stack whose dev tools come from conda has none in that group
        # Conda's, even of the same version. Not --reinstall, which would fetch every wheel anew.
        again = [f"--reinstall-package={name}" for name in sorted(set(replaced.values()))]
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
            listed.write(select(lock, options.groups))
            listed.flush()
            words = [options.uv, "pip", "install", "--python", str(python), "--require-hashes", "--no-deps"]
            subprocess.run([*words, *again, "-r", listed.name], env={**os.environ, **SETTINGS}, check=True)
        (options.prefix / ".lock").unlink(missing_ok=True)  # uv's
    for record in replaced:  # no longer true
        record.unlink()
    if options.prune is not None:
        options.prune.parent.mkdir(parents=True, exist_ok=True)
        options.prune.write_text(json.dumps(prune(options.prefix), indent=1) + "\n")
    note_lock(options.lock, options.prefix)
    paths = list(site.iterdir())
    if standard.is_relative_to(options.prefix):  # not where the environment is a virtual one
        paths += [path for path in standard.iterdir() if path.name != "site-packages"]
    compile_all(python, [path for path in paths if not has_bytecode(path)])


if __name__ == "__main__":
    main()
