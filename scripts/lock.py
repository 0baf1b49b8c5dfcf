#!/usr/bin/env python3
"""Writes a stack's `wheels.lock`: one resolution for every supported Python and platform, in groups, by hash.

The groups are `train` (the project's dependencies and what its editable install needs), each optional
dependency of the project, and `boot` (the tools that `bootstrap.py` and this file need).
"""

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from wheels import read_lock

ROOT = Path(__file__).resolve().parent.parent
BOOT = ["uv", "tomli ; python_version < '3.11'"]
HEADER = """\
# Made by `make lock STACK={stack}`; not to be edited. Wheels for CPython 3.10 to 3.13 on the platforms that
# pyproject.toml names. Each requirement follows the groups that need it.
--only-binary :all:
"""


def read_toml(path: Path) -> Any:
    """Parses a TOML file."""
    return importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads(
        path.read_text()
    )


def wanted(project: dict[str, Any]) -> dict[str, list[str]]:
    """What each group asks for, before resolution."""
    train = project["project"]["dependencies"] + project["build-system"]["requires"]
    return {"train": train, **project["project"]["optional-dependencies"], "boot": BOOT}


def shorten(marker: str, environments: list[str]) -> str:
    """Takes out of uv's marker what is true in every environment of the lock.

    uv repeats the environments: `(E1 and X) or (E2 and X) or (E3 and X)`. That is X.
    """
    given = [set(environment.split(" and ")) for environment in environments]
    common = set.intersection(*given)
    rests: dict[tuple[str, ...], list[str]] = {}
    for term in marker.split(" or "):
        factors = [factor for factor in term.strip("()").split(" and ") if factor not in common]
        where = [factor for factor in factors if any(factor in one for one in given)]
        rests.setdefault(tuple(factor for factor in factors if factor not in where), []).append(
            " and ".join(where)
        )
    terms = []
    for rest, places in rests.items():
        everywhere = {frozenset(place.split(" and ")) for place in places} == {
            frozenset(one - common) for one in given
        }
        terms += [
            " and ".join(filter(None, [*rest, "" if everywhere else place]))
            for place in dict.fromkeys(places)
        ]
    terms = list(dict.fromkeys(terms))
    return (
        ""
        if "" in terms
        else " or ".join(f"({term})" if len(terms) > 1 and " and " in term else term for term in terms)
    )


def resolve(uv: str, asked: list[str], constraints: str, folder: Path, *options: str) -> str:
    """Runs uv on requirements; the output file in the folder holds the versions that it prefers."""
    (folder / "asked.in").write_text("\n".join(asked) + "\n")
    (folder / "constraints.txt").write_text(constraints)
    command = [uv, "pip", "compile", "--quiet", "--universal", "--python-version=3.10", "--only-binary=:all:"]
    command += ["--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links", *options]
    command += ["--constraints", str(folder / "constraints.txt"), "--output-file", str(folder / "lock")]
    # In the repository: uv takes the environments from pyproject.toml.
    environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    subprocess.run([*command, str(folder / "asked.in")], cwd=ROOT, env=environment, check=True)
    return (folder / "lock").read_text()


def lock(uv: str, stack: Path, upgrade: bool) -> str:
    """Resolves all groups together, then asks which part each of them needs."""
    description, project = read_toml(stack / "stack.toml"), read_toml(ROOT / "pyproject.toml")
    pins = "".join(f"{name}=={version}\n" for name, version in description["pins"].items())
    groups, old = wanted(project), stack / "wheels.lock"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if old.exists() and not upgrade:
            kept = "".join(f"{wheel.text}\n" for wheel in read_lock(old.read_text()))
            (folder / "lock").write_text(kept)
        everything = resolve(
            uv, [line for group in groups.values() for line in group], pins, folder, "--generate-hashes"
        )
        needed = {}
        for group, asked in groups.items():
            (folder / "lock").unlink()
            needed[group] = set(
                re.findall(r"^(\S+==\S+)", resolve(uv, asked, everything, folder), re.MULTILINE)
            )
    text = HEADER.format(stack=stack.name)
    for block in re.split(r"\n(?=\S)", everything.strip()):
        requirement, hashes = block.split(" \\\n", 1)
        pin, _, marker = requirement.partition(" ; ")
        marker = shorten(marker, project["tool"]["uv"]["environments"])
        names = " ".join(group for group in groups if pin in needed[group])
        text += f"# groups: {names}\n{pin}{' ; ' * bool(marker)}{marker} \\\n{hashes}\n"
    return text


def main() -> int:
    """Reads the arguments; the lock is replaced whole or not at all."""
    parser = argparse.ArgumentParser(
        description="Writes stacks/<name>/wheels.lock from its stack.toml and pyproject.toml."
    )
    parser.add_argument(
        "--stack", default="torch2.9-cu128", metavar="NAME", help="folder of stacks/ (%(default)s)"
    )
    parser.add_argument(
        "--upgrade", action="store_true", help="take the newest versions; default: keep those locked"
    )
    options = parser.parse_args()
    stack = ROOT / "stacks" / options.stack
    uv = shutil.which("uv", path=Path(sys.prefix) / "bin") or shutil.which("uv")
    if uv is None or not (stack / "stack.toml").exists():
        print(f"lock: {'no uv' if uv is None else f'no {stack}/stack.toml'}", file=sys.stderr)
        return 2
    try:
        text = lock(uv, stack, options.upgrade)
    except subprocess.CalledProcessError:
        print("lock: uv found no solution (above); the lock is unchanged", file=sys.stderr)
        return 1
    (stack / "wheels.lock.new").write_text(text)
    (stack / "wheels.lock.new").replace(stack / "wheels.lock")
    print(f"lock: {stack / 'wheels.lock'} has {len(read_lock(text))} requirements")
    return 0


if __name__ == "__main__":
    sys.exit(main())
