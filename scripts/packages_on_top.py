#!/usr/bin/env python3
"""Lets users add packages to an image whose environment isn't theirs to change.

pip installs below /workspace, which is mounted, into a virtual environment (on_top.py); Python looks
there after the environment's own packages. What the image has stays as it is: a file of constraints holds it.
Runs while the image is built; the standard library is enough.
"""

import argparse
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path

# Python's part of the way into a container by `docker compose exec` (as_owner.py).
AS_OWNER = (
    'import os; os.geteuid() or __import__("runpy").run_path("/opt/image/as_owner.py", run_name="__main__")\n'
)


def folder_of(stack: str) -> str:
    """Returns the folder of packages on top of a stack's: another stack's may be built for another torch."""
    return f"/workspace/.packages/{stack}"


def constraints(installed: Iterable[tuple[str, str]]) -> str:
    """Returns constraints that pin the stack's packages to their versions."""
    lines = {f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}" for name, version in installed}
    return "".join(f"{line}\n" for line in sorted(lines))


def pip_settings(stack: str, held: Path, python: str = "/opt/image/on_top.py") -> str:
    """pip.conf of the environment: a virtual environment that a user makes doesn't read it."""
    every = f"[global]\ndisable-pip-version-check = true\npython = {python}\n"
    return f"{every}\n[install]\nconstraint = {held}\n\n[on-top]\nfolder = {folder_of(stack)}\n"


def search_path(stack: str, version: str) -> str:
    """A line of a .pth file: the folder may come later, and have .pth files of its own.

    The folder's own Python (on_top.py) has it already.
    """
    own, site = folder_of(stack), f"{folder_of(stack)}/lib/python{version}/site-packages"
    return f"import site, sys; sys.prefix == {own!r} or site.addsitedir({site!r})\n"


def environment(variables: Mapping[str, str]) -> str:
    """The image's variables for shells that begin without them (profile.sh), a line each."""
    kept = re.compile(
        r"(LD_LIBRARY_)?PATH|LANG|PYTHON[A-Z]+|PYTORCH_VERSION|TORCH_HOME|MPLCONFIGDIR|[A-Z]+_CACHE_(HOME|DIR)"
    )
    return "".join(f"{name}={value}\n" for name, value in sorted(variables.items()) if kept.fullmatch(name))


def write(path: Path, text: str) -> None:
    """Writes a file unless a layer below has it."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def main() -> None:
    """Reads the arguments; the environment is that of the Python that runs this."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stack", help="folder of stacks/")
    parser.add_argument("held", type=Path, help="the file of constraints to write")
    options = parser.parse_args()
    site = sysconfig.get_path("purelib")
    installed = [(one.metadata["Name"], one.version) for one in distributions(path=[site])]
    write(options.held, constraints(installed))
    write(options.held.with_name("environment"), environment(os.environ))
    write(Path(sys.prefix) / "pip.conf", pip_settings(options.stack, options.held))
    line = search_path(options.stack, sysconfig.get_python_version())
    write(Path(site) / "packages_on_top.pth", line)
    write(Path(site) / "as_owner.pth", AS_OWNER)  # before the other, by its name


if __name__ == "__main__":
    main()
