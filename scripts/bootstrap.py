#!/usr/bin/env python3
"""Makes or updates the virtual environment from a stack's hash-checked lock.

The standard library is enough, and any Python 3 can read the file: an old one gets a line, not a traceback.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

OLDEST, NEWEST = (3, 10), (3, 13)
PLATFORMS = {("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "arm64")}
ROOT = Path(__file__).resolve().parent.parent
CONTAINER = "use the container image instead (RUNTIME=container)"
STAMP, LOCK, SITE = ".bootstrap.json", ".bootstrap.lock", "lib/python*/site-packages/*"
VERSION = "{}.{}".format(*sys.version_info)
DEBIAN = f"python{VERSION}-venv"


def stop(line: str, code: int = 2) -> NoReturn:
    """Ends with one line; exit code 2 says that nothing was tried."""
    print(f"bootstrap: {line}", file=sys.stderr)
    sys.exit(code)


# Here, because older Pythons cannot evaluate the annotations that follow.
if not OLDEST <= sys.version_info[:2] <= NEWEST:
    stop(f"Python {VERSION} is not in 3.{OLDEST[1]} to 3.{NEWEST[1]}: name one with PYTHON=…, or {CONTAINER}")


from wheels import Wheel, digest, read_lock, select  # noqa: E402


def check_platform() -> None:
    """Ends with one line where the lock has no wheels for the machine or the interpreter."""
    system, machine, (libc, libc_version) = platform.system(), platform.machine(), platform.libc_ver()
    if (system, machine) not in PLATFORMS:
        stop(f"PyTorch has no wheels for {system} {machine} in the lock; {CONTAINER}")
    if system == "Linux" and (libc != "glibc" or [int(n) for n in libc_version.split(".")[:2]] < [2, 28]):
        stop(f"PyTorch's wheels need glibc 2.28 or newer; {CONTAINER}")
    if platform.python_implementation() != "CPython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        stop(f"{sys.executable} is not a standard CPython: name one with PYTHON=…, or {CONTAINER}")


def say(line: str) -> None:
    """Reports progress, in order with what the installers print."""
    print(f"bootstrap: {line}", flush=True)


class Venv:
    """A virtual environment and its stamp: which groups it holds, for which Python, folder and project."""

    def __init__(self, path: Path) -> None:
        self.path, self.python = path, path / "bin" / "python"
        # Not sys.executable: that may be the venv's own, or that of another one which is active.
        self.base: str = getattr(sys, "_base_executable", sys.executable)
        self.read()

    def read(self) -> None:
        """Reads the stamp (again: another process may have written it)."""
        file = self.path / STAMP
        self.stamp: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def write(self, **changes: object) -> None:
        """Writes the stamp, whole or not at all."""
        self.stamp.update(changes)
        new = self.path / f"{STAMP}.new"
        new.write_text(json.dumps(self.stamp, indent=1))
        new.replace(self.path / STAMP)

    def run(self, *command: object, quiet: bool = False) -> bool:
        """Runs a command on this environment; returns whether it worked."""
        # With a PYTHONPATH (cluster modules) pip would take the packages there for installed ones.
        drop = {"PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "UV_SYSTEM_PYTHON"}
        kept = {key: value for key, value in os.environ.items() if key not in drop}
        kept.update(UV_PYTHON=str(self.python), UV_PYTHON_DOWNLOADS="never", DEBIAN_FRONTEND="noninteractive")
        kept.update(PIP_YES="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
        kept.update(PIP_PROGRESS_BAR="on" if sys.stdout.isatty() else "off")
        output = subprocess.DEVNULL if quiet else None
        try:
            return not subprocess.call(
                [str(word) for word in command], env=kept, stdout=output, stderr=output
            )
        except OSError:
            return False

    def usable(self) -> bool:
        """Whether its Python runs, is this version, and the project was not moved; no stamp: made by hand."""
        if self.stamp and (self.stamp.get("root"), self.stamp.get("python")) != (str(ROOT), VERSION):
            return False
        same = f"import sys; sys.exit('{{}}.{{}}'.format(*sys.version_info) != '{VERSION}')"
        return Path(sys.prefix) == self.path or self.run(self.python, "-c", same, quiet=True)

    def holds(self, groups: dict[str, str], project: str) -> bool:
        """Whether the groups and the project are installed as they are now."""
        here = groups.items() <= self.stamp.get("groups", {}).items()
        return here and project in ("", self.stamp.get("project"))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps a second bootstrap out. The file outlives remaking: its inode is the lock."""
        import fcntl  # not on Windows, which gets its line from check_platform()

        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / LOCK).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for another bootstrap of {self.path}")
                fcntl.flock(file, fcntl.LOCK_EX)
            self.read()
            yield

    def remake(self) -> None:
        """Makes it anew, with the Python that runs this."""
        old = [entry for entry in self.path.iterdir() if entry.name not in (LOCK, STAMP)]
        if old and not self.stamp and not (self.path / "pyvenv.cfg").exists():
            stop(f"{self.path} is not a virtual environment: left alone")
        say(f"making {self.path} with Python {platform.python_version()}")
        self.stamp = {}
        self.write(changing=True)  # before anything is deleted
        for entry in old:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        # Without pip: only a machine without uv needs it, and Debian's Python may lack ensurepip.
        if not self.run(self.base, "-m", "venv", "--without-pip", self.path):
            stop(f"{self.base} -m venv failed: install venv for it, or {CONTAINER}")

    def pip(self) -> list[str]:
        """The command of a pip that installs here; empty if none can be had."""
        own, host = [str(self.python), "-m", "pip"], [self.base, "-m", "pip", "--python", str(self.python)]
        ensure = [*own[:2], "ensurepip"]
        if self.run(*own, "--version", quiet=True) or self.run(*ensure, quiet=True):
            return own
        if self.run(*host, "--version", quiet=True):
            return host
        if os.geteuid() == 0 and shutil.which("apt-get") and self.base.startswith(("/usr/bin/", "/bin/")):
            say(f"neither uv nor pip: installing Debian's {DEBIAN}")
            self.run("apt-get", "-q", "update")
            self.run("apt-get", "-qy", "install", "--no-install-recommends", DEBIAN)
        return own if self.run(*ensure, quiet=True) else []

    def install(self, wheels: list[Wheel], groups: list[str]) -> list[str]:
        """Installs groups with uv, which pip brings if missing, or with pip; returns the one that worked."""
        listed, intact = self.path / ".bootstrap.txt", True
        # What an earlier lock brought and this one does not: a plugin left over would change what runs.
        stale = sorted(set(self.stamp.get("packages", [])) - {wheel.name for wheel in wheels})

        def change(tool: list[str], names: list[str], stale: list[str]) -> bool:
            nonlocal intact
            before = sorted(self.path.glob(SITE))
            listed.write_text(select(wheels, names))
            done = self.run(*tool, "install", "--require-hashes", "--no-deps", "-r", listed)
            done = done and (not stale or self.run(*tool, "uninstall", *stale))
            intact = intact and (done or sorted(self.path.glob(SITE)) == before)
            return done

        pip = []
        uv = shutil.which("uv") or shutil.which("uv", path=self.path / "bin")
        if not uv:
            pip = self.pip()
            if not pip:
                self.write(changing=False)
                stop(f"no installer: install uv, or pip for {self.base} (Debian: {DEBIAN}), or {CONTAINER}")
            uv = shutil.which("uv", path=self.path / "bin") if change(pip, ["boot"], []) else None
        if uv:
            if change([uv, "pip"], groups, stale):
                return [uv, "pip"]
            say("uv failed: trying pip")  # which may be configured with a mirror
            pip = pip or self.pip()
        if pip and change(pip, groups, stale):
            return pip
        self.write(changing=not intact)  # without a network, say, what was there still is
        stop("the installation failed; run it again to repair it", 1)


def bootstrap(venv: Venv, stack: str, groups: list[str], min_free: float) -> None:
    """Brings the venv to what the lock says; at once if it is there already."""
    lock = ROOT / (stack if "/" in stack else f"stacks/{stack}") / "wheels.lock"
    if not lock.exists():
        if lock.parent.is_dir():
            stop(f"{lock} is missing: make lock STACK={stack} makes it")
        there = sorted(path.parent.name for path in ROOT.glob("stacks/*/wheels.lock"))
        near = get_close_matches(stack, there, 1)
        stop(
            f"no stack {stack!r}: "
            + (f"did you mean {near[0]!r}?" if near else f"there are {', '.join(there)}")
        )
    # Its lock holds only what conda lacks: installed here, that would take torch away.
    described = lock.with_name("stack.toml")
    if described.exists() and 'kind = "conda"' in described.read_text():
        stop(
            f"STACK={stack} is conda's, which {venv.path.name} can't hold: make image STACK={stack}, or "
            f"conda env create -f stacks/{stack}/environment.yml"
        )
    wheels = read_lock(lock.read_text())
    source = hashlib.sha256(lock.read_bytes()).hexdigest()  # the manifests of runs tell it
    unknown = set(groups) - {group for wheel in wheels for group in wheel.groups}
    if unknown:
        stop(f"no group {', '.join(sorted(unknown))} in {lock}")
    # The project goes where its dependencies are; other venvs (make lock) hold tools only.
    project = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest() if "train" in groups else ""
    if venv.usable() and venv.holds(digest(wheels, groups), project) and venv.stamp.get("lock") == source:
        return
    begun = time.monotonic()
    with venv.locked():
        usable = venv.usable()
        if usable and venv.holds(digest(wheels, groups), project):
            venv.write(lock=source)  # another lock, which says the same of these groups
            return
        names = sorted({*groups, *venv.stamp.get("groups", {})})
        if not usable or venv.stamp.get("changing"):  # an interrupted installer leaves half a package
            venv.remake()
        held, free = venv.stamp.get("groups", {}), shutil.disk_usage(venv.path).free / 1e9
        first = "train" in groups and "train" not in held
        if first and free < min_free:
            stop(f"a first install needs about {min_free:g} GB; {venv.path} has {free:.1f} free (--min-free)")
        now = digest(wheels, names)
        say(f"installing {', '.join(names)} of {stack}{' (downloads up to 3 GB)' * first}")
        # Only what changes is lost if this is interrupted: adding a group leaves the others as they are.
        intact = {name: value for name, value in held.items() if now[name] == value}
        venv.write(changing=True, root=str(ROOT), python=VERSION, groups=intact, lock=None)
        tool = venv.install(wheels, names)
        packages = sorted({wheel.name for wheel in wheels if set(names) & set(wheel.groups)})
        venv.write(changing=False, groups=now, packages=packages, lock=source)
        if project:
            if any(venv.path.glob(f"{SITE[:-2]}/trainer-*.dist-info")):  # its name until 0.1.0
                venv.run(*tool, "uninstall", "trainer")
            if not venv.run(*tool, "install", "--no-index", "--no-deps", "--no-build-isolation", "-e", ROOT):
                stop(f"{ROOT} could not be installed", 1)
            venv.write(project=project)
    say(f"{venv.path} is ready ({time.monotonic() - begun:.0f} s)")


def main() -> None:
    """Reads the arguments."""
    # The CUDA libraries are 6 GB of it.
    need = 8.0 if (platform.system(), platform.machine()) == ("Linux", "x86_64") else 2.0
    parser = argparse.ArgumentParser(description="Makes or updates the environment from a hash-checked lock.")
    add = parser.add_argument
    add(
        "--stack", default="torch2.9-cu128", metavar="NAME", help="folder of stacks/, or a path (%(default)s)"
    )
    add("--groups", nargs="+", default=["train"], metavar="GROUP", help="of train, dev, test, bench, boot")
    add("--venv", type=Path, default=ROOT / ".venv", metavar="DIR", help="where (%(default)s)")
    add("--min-free", type=float, default=need, metavar="GB", help="disk space (%(default)s)")
    options = parser.parse_args()
    check_platform()
    try:
        bootstrap(Venv(options.venv.absolute()), options.stack, options.groups, options.min_free)
    except KeyboardInterrupt:
        stop("interrupted; run it again to repair it", 130)
    except OSError as error:  # a full disk, a venv of somebody else
        stop(str(error), 1)


if __name__ == "__main__":
    main()
