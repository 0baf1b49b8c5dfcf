#!/usr/bin/env python3
"""Writes the locks of a stack from its `stack.toml` and pyproject.toml: first conda's, then the wheels'.

`wheels.lock` is one resolution for every supported Python and platform, in groups, by hash. The groups are
`train` (the project's dependencies and what its editable install needs), each optional dependency of the
project, `boot` (the tools that `bootstrap.py` and this file need) and `image` (what only the image adds).
What conda's part of the stack installs keeps conda's version, so that no file is written twice; where conda
brings PyTorch, the lock holds only what conda lacks. The conda half is described in `conda_lock.py`.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import conda_lock
from conda_lock import FILES, Package
from locks import LockError, canonical, read_toml, read_wheels

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = "torch2.9-cu128"
BOOT = ["uv", "tomli ; python_version < '3.11'"]
# What the image adds: its init, as a wheel with the binary in it.
IMAGE = ["dumb-init ; sys_platform == 'linux'"]
HEADER = """\
# Made by `make lock STACK={stack}`; not to be edited. Wheels for {serves}.
# Each requirement follows the groups that need it.
--only-binary :all:
"""


def wanted(project: dict[str, Any]) -> dict[str, list[str]]:
    """Returns the requirements of each group, before resolution."""
    train = project["project"]["dependencies"] + project["build-system"]["requires"]
    return {"train": train, **project["project"]["optional-dependencies"], "boot": BOOT, "image": IMAGE}


def resolve(uv: str, asked: list[str], constraints: str, folder: Path, *options: str) -> str:
    """Runs uv on requirements; the output file in the folder holds the versions that it prefers.

    Raises:
        CalledProcessError: uv failed, and said why.
    """
    (folder / "asked.in").write_text("\n".join(asked) + "\n")
    (folder / "constraints.txt").write_text(constraints)
    command = [uv, "pip", "compile", "--quiet", "--universal", "--python-version=3.10", "--only-binary=:all:"]
    command += ["--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links", *options]
    command += ["--constraints", str(folder / "constraints.txt"), "--output-file", str(folder / "lock")]
    # In the folder: uv takes the environments from the pyproject.toml there.
    environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    subprocess.run([*command, str(folder / "asked.in")], cwd=folder, env=environment, check=True)
    return (folder / "lock").read_text()


def named(requirement: str) -> str:
    """Returns the name of a requirement's package."""
    return canonical(re.split(r"[ =<>;\[]", requirement)[0])


def lock_wheels(uv: str, stack: Path, upgrade: bool, packages: Sequence[Package]) -> str:
    """Resolves all groups together, then each group within that resolution; returns the lock's text.

    Args:
        uv: The program.
        stack: Folder of the stack.
        upgrade: True if newer versions replace those of the present lock.
        packages: The stack's conda packages.
    """
    description, project = read_toml(stack / "stack.toml"), read_toml(ROOT / "pyproject.toml")
    environments = description.get("environments", project["tool"]["uv"]["environments"])
    serves = "the platforms and Pythons that pyproject.toml names"
    if "environments" in description:
        serves = "the environments that stack.toml names"
    name = stack.name if stack.parent == ROOT / "stacks" else stack.relative_to(ROOT)
    held = {canonical(package.name): package.version for package in packages if package.python}
    if description["kind"] == "conda":
        # Conda's names for these two are others.
        held |= {"torch": description["pins"]["torch"], "triton": description["brings"]["triton"]}
    pins = description["pins"] if description["kind"] == "wheels" else {}
    constraints = "".join(f"{name}=={version}\n" for name, version in {**held, **pins}.items())
    groups, old = wanted(project) | description.get("requires", {}), stack / "wheels.lock"
    groups["train"] = [*groups["train"], *pins]  # torchaudio, which the trainer itself doesn't need
    groups = {name: groups[name] for name in description.get("groups", groups)}
    if description["kind"] == "conda":
        groups = {
            group: [line for line in lines if named(line) not in held] for group, lines in groups.items()
        }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "pyproject.toml").write_text(f"[tool.uv]\nenvironments = {json.dumps(environments)}\n")
        if old.exists() and not upgrade:
            kept = "".join(f"{wheel.text}\n" for wheel in read_wheels(old.read_text()))
            (folder / "lock").write_text(kept)
        # With conda, what depends on torch would bring its wheels' CUDA along, beside conda's.
        absent = ["torch"] if description["kind"] == "conda" else description.get("without", [])
        (folder / "overrides.txt").write_text("".join(f"{one} ; sys_platform == 'none'\n" for one in absent))
        options = ["--override", str(folder / "overrides.txt")] if absent else []
        everything = resolve(
            uv,
            [line for group in groups.values() for line in group],
            constraints,
            folder,
            "--generate-hashes",
            *options,
        )
        needed = {}
        for group, asked in groups.items():
            (folder / "lock").unlink()
            needed[group] = set(
                re.findall(r"^(\S+==\S+)", resolve(uv, asked, everything, folder, *options), re.MULTILINE)
            )
    text = HEADER.format(stack=name, serves=serves)
    for block in re.split(r"\n(?=\S)", everything.strip()):
        requirement, hashes = block.split(" \\\n", 1)
        pin, _, marker = requirement.partition(" ; ")
        if description["kind"] == "conda" and named(pin) in held:
            continue
        names = " ".join(group for group in groups if pin in needed[group])
        text += f"# groups: {names}\n{pin}{' ; ' * bool(marker)}{marker} \\\n{hashes}\n"
    return text


def lock_conda(stack: Path, pool: Path | None, upgrade: bool) -> dict[Path, str]:
    """Solves the conda half; returns the text of each file.

    The dev image is solved with the slim one fixed, so that it only adds packages.
    """
    description = read_toml(stack / "stack.toml")
    conda = description["conda"]
    channels, replaced = conda["channels"], conda_lock.REPLACED
    records = None
    if pool is not None:
        records = conda_lock.pooled(pool, channels, conda.get("md5_only", []))
        records = [one for one in records if not one.url.rsplit("/", 1)[1].startswith(replaced)]
    file = stack / "records.json"
    kept = conda_lock.read_records(file.read_text()) if file.exists() and not upgrade else []
    train = conda_lock.solve(conda["train"], channels, records, kept)
    names = {package.name for package in train}
    kept = [package for package in kept if package.name not in names]
    whole = conda_lock.solve([*conda["dev"], *conda["train"]], channels, records, kept, fixed=train)
    dev = [package for package in whole if package.name not in names]
    texts = {
        file: conda_lock.write_records([*train, *dev]),
        stack / FILES["train"]: conda_lock.write_lock(stack.name, "train", train),
        stack / FILES["dev"]: conda_lock.write_lock(stack.name, "dev", dev),
        stack / "environment.yml": conda_lock.write_environment(
            stack.name, channels, train, f"stacks/{stack.name}/environment.yml"
        ),
    }
    if stack.name == DEFAULT:
        top = ROOT / "environment.yml"
        texts[top] = conda_lock.write_environment(stack.name, channels, train, top.name)
    return texts


def replace(texts: dict[Path, str], stack: Path, today: int) -> list[str]:
    """Replaces each file whole; where one changed, the stack's `source_date_epoch` becomes today's."""
    changed = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in changed:
        new = path.with_name(f"{path.name}.new")
        new.write_text(texts[path])
        new.replace(path)
    about = stack / "stack.toml"
    if changed:
        dated = re.sub(r"(?m)^(source_date_epoch = )\d+", rf"\g<1>{today}", about.read_text())
        about.write_text(dated)
    return [str(path.relative_to(ROOT)) for path in changed]


def run(options: argparse.Namespace) -> list[str]:
    """Locks a stack; returns the files that changed.

    Raises:
        LockError: something is missing, or there is no solution; nothing is changed.
    """
    stack = ROOT / (options.stack if "/" in options.stack else f"stacks/{options.stack}")
    if not (stack / "stack.toml").exists():
        raise LockError(f"no {stack}/stack.toml")
    uv = shutil.which("uv", path=Path(sys.prefix) / "bin") or shutil.which("uv") or "uv"
    records, texts = stack / "records.json", dict[Path, str]()
    if options.only != "wheels" and "conda" in read_toml(stack / "stack.toml"):
        texts |= lock_conda(stack, options.pool, options.upgrade)
    if options.only != "conda":
        known = texts.get(records) or (records.read_text() if records.exists() else "[]")
        packages = conda_lock.read_records(known)
        texts[stack / "wheels.lock"] = lock_wheels(uv, stack, options.upgrade, packages)
    return replace(texts, stack, int(time.time()) // 86400 * 86400)


def main() -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(
        description="Writes the locks of a stack from its stack.toml and pyproject.toml."
    )
    add = parser.add_argument
    add(
        "--stack", default=DEFAULT, metavar="NAME", help="folder of stacks/, or a path with a / (%(default)s)"
    )
    add("--upgrade", action="store_true", help="take the newest versions; default: keep those locked")
    add("--only", choices=["conda", "wheels"], default="", help="lock one half")
    add("--pool", type=Path, metavar="FILE", help="solve conda's half from these records, without a network")
    options = parser.parse_args()
    try:
        changed = run(options)
    except (LockError, ImportError, OSError) as error:  # without py-rattler: make lock has it
        print(f"lock: {error}; nothing is changed", file=sys.stderr)
        return 2
    except (conda_lock.Unsolved, subprocess.CalledProcessError) as error:
        why = f"conda: {error}" if isinstance(error, conda_lock.Unsolved) else "uv: no solution (above)"
        print(f"lock: {why}; nothing is changed", file=sys.stderr)
        return 1
    print(f"lock: {options.stack}: changed {', '.join(changed) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
