#!/usr/bin/env python3
"""Makes or updates the virtual environment from a stack's hash-checked lock, by uv.

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
import time
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

OLDEST, NEWEST = (3, 10), (3, 13)
PLATFORMS = {("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "arm64")}
ROOT = Path(__file__).resolve().parent.parent
CONTAINER = "use the container image instead (docker compose run --rm train digits)"
STAMP, LOCK, SITE = ".bootstrap.json", ".bootstrap.lock", "lib/python*/site-packages/*"
VERSION = "{}.{}".format(*sys.version_info)


def stop(line: str, code: int = 2) -> NoReturn:
    """Ends with one line; exit code 2 says that nothing was tried."""
    print(f"bootstrap: {line}", file=sys.stderr)
    sys.exit(code)


# Here, because older Pythons cannot evaluate the annotations that follow.
if not OLDEST <= sys.version_info[:2] <= NEWEST:
    stop(f"Python {VERSION} is not in 3.{OLDEST[1]} to 3.{NEWEST[1]}: name one with PYTHON=…, or {CONTAINER}")
if (platform.system(), platform.machine()) not in PLATFORMS:
    stop(f"PyTorch has no wheels for {platform.system()} {platform.machine()} in the lock; {CONTAINER}")

import fcntl  # noqa: E402

from locks import Wheel, get_uv, index, read_wheels, select  # noqa: E402


def find_lock(stack: str, venv: Path) -> Path:
    """The wheels.lock of a stack that a virtual environment can hold, or the end with a line."""
    lock = ROOT / (stack if "/" in stack else f"stacks/{stack}") / "wheels.lock"
    if not lock.exists():
        if lock.parent.is_dir():
            stop(f"{lock} is missing: make lock STACK={stack} makes it")
        there = sorted(path.parent.name for path in ROOT.glob("stacks/*/wheels.lock"))
        near = get_close_matches(stack, there, 1)
        stop(f"no stack {stack!r}" + (f"; did you mean {near[0]!r}?" if near else f": {', '.join(there)}"))
    # Its lock holds only what conda lacks: installed here, that would take torch away.
    described = lock.with_name("stack.toml")
    if described.exists() and 'kind = "conda"' in described.read_text():
        stop(
            f"STACK={stack} is conda's, which {venv.name} can't hold: make image STACK={stack}, or "
            f"conda env create -f stacks/{stack}/environment.yml"
        )
    return lock


def has_cuda_on_arm(wheels: list[Wheel]) -> bool:
    """Whether a lock has CUDA for Linux on Arm, and not only on x86_64."""
    return any(one.name.startswith("nvidia-cublas") and "aarch64" in one.marker for one in wheels)


def say_where_cuda_is(lock: Path, wheels: list[Wheel], machine: str, driver: Path) -> None:
    """Tells of a GPU that torch of this stack can't use: on Arm (Grace) most stacks are CPU builds."""
    if machine == "aarch64" and driver.exists() and not has_cuda_on_arm(wheels):
        stacks = sorted(ROOT.glob("stacks/*/wheels.lock"))
        fit = [one.parent.name for one in stacks if has_cuda_on_arm(read_wheels(one.read_text()))]
        others = " or ".join(f"STACK={name}" for name in fit)
        print(f"bootstrap: {lock.parent.name} trains on the CPU of this machine; {others} has CUDA for it")


class Venv:
    """A virtual environment and its stamp: groups, packages, lock, project; for which Python and folder."""

    def __init__(self, path: Path, lock: Path, groups: list[str]) -> None:
        self.path, self.lock, self.asked = path, lock, groups
        self.python, self.wheels = path / "bin/python", read_wheels(lock.read_text())

    def describe(self, groups: list[str]) -> dict[str, Any]:
        """The stamp of an environment with these groups."""

        def digest(text: str) -> str:
            return hashlib.sha256(text.encode()).hexdigest()

        return {
            "changing": False,
            "root": str(ROOT),
            "python": VERSION,
            "lock": digest(self.lock.read_text()),  # the manifests of runs tell it
            "groups": {group: digest(select(self.wheels, [group])) for group in groups},
            "project": digest((ROOT / "pyproject.toml").read_text()) if "train" in groups else "",
            "packages": sorted({wheel.name for wheel in self.wheels if set(groups) & set(wheel.groups)}),
        }

    def read(self) -> dict[str, Any]:
        """The stamp; empty where there is none."""
        file = self.path / STAMP
        stamp: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return stamp

    def write(self, stamp: dict[str, Any]) -> None:
        """Writes the stamp, whole or not at all."""
        new = self.path / f"{STAMP}.new"
        new.write_text(json.dumps(stamp, indent=1))
        new.replace(self.path / STAMP)

    def whole(self, stamp: dict[str, Any]) -> bool:
        """Whether its Python runs, and nothing was moved or interrupted; no stamp: made by hand."""
        if stamp and [stamp.get(key) for key in ("changing", "root", "python")] != [
            False,
            str(ROOT),
            VERSION,
        ]:
            return False
        asked = "import sys; print('{}.{}'.format(*sys.version_info))"
        try:
            return subprocess.check_output([self.python, "-c", asked], text=True).strip() == VERSION
        except (OSError, subprocess.CalledProcessError):
            return False

    def is_there(self) -> bool:
        """Whether it holds what is asked for, as the lock and the project are now."""
        stamp, wanted = self.read(), self.describe(self.asked)
        same = wanted["groups"].items() <= stamp.get("groups", {}).items()
        if not same or wanted["project"] not in ("", stamp.get("project")) or not self.whole(stamp):
            return False
        if stamp["lock"] != wanted["lock"]:  # another one, which says the same of these groups
            self.write({**stamp, "lock": wanted["lock"]})
        return True

    def uv(self, *words: object) -> bool:
        """Runs uv, which is fetched by its hash where there is none; returns whether it worked."""
        here = shutil.which("uv") or shutil.which("uv", path=self.path / "bin")
        uv = here or get_uv(self.lock, self.path / "bin")
        settings = {"UV_PYTHON_DOWNLOADS": "never"}
        if os.environ.get("PIP_INDEX_URL"):  # which uv doesn't read
            settings["UV_DEFAULT_INDEX"] = index()
        return not subprocess.call([str(one) for one in (uv, *words)], env={**os.environ, **settings})

    def install(self) -> None:
        """Brings it to what the lock says of the groups that are asked for, and of those that it has."""
        stamp = self.read()
        whole = self.whole(stamp)
        groups = sorted({*self.asked, *stamp.get("groups", {})})
        what = "installing" if whole else f"making {self.path}:"
        print(f"bootstrap: {what} {', '.join(groups)} of {self.lock.parent.name}", flush=True)
        changing = {"changing": True, "groups": stamp.get("groups", {})}
        if not whole:
            old = [path for path in self.path.iterdir() if path.name not in (LOCK, STAMP)]
            if old and not stamp and not (self.path / "pyvenv.cfg").exists():
                stop(f"{self.path} is not a virtual environment: left alone")
            self.write(changing)  # before anything is deleted
            for path in old:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            # Not sys.executable: that may be the environment's own, or that of another one which is active.
            base = getattr(sys, "_base_executable", sys.executable)
            if not self.uv(
                "venv", "--quiet", "--allow-existing", "--no-project", "--python", base, self.path
            ):
                stop(f"{self.path} could not be made (above)", 1)
        self.write(changing)
        before, listed = sorted(self.path.glob(SITE)), self.path / ".bootstrap.txt"
        listed.write_text(select(self.wheels, groups))
        new = self.describe(groups)
        # What an earlier lock brought and this one does not: a plugin left over would change what runs.
        stale = sorted({*stamp.get("packages", [])} - {*new["packages"]}) if whole else []
        install, here = ("pip", "install"), ("--python", self.python)
        done = self.uv(*install, *here, "--require-hashes", "--no-deps", "-r", listed)
        done = done and (not stale or self.uv("pip", "uninstall", *here, *stale))
        if done and "train" in groups:  # the project goes where its dependencies are
            done = self.uv(*install, *here, "--no-index", "--no-deps", "--no-build-isolation", "-e", ROOT)
        if not done:
            if whole and sorted(self.path.glob(SITE)) == before:  # without a network, say, all is as it was
                self.write(stamp)
            stop("the installation failed (above); run it again to repair it", 1)
        self.write(new)
        say_where_cuda_is(self.lock, self.wheels, platform.machine(), Path("/proc/driver/nvidia/version"))


def bootstrap(venv: Venv) -> None:
    """Brings the environment to what the lock says; at once if it is there already."""
    groups = {group for wheel in venv.wheels for group in wheel.groups}
    unknown = set(venv.asked) - groups
    if unknown:
        stop(f"no group {', '.join(sorted(unknown))}; there are {', '.join(sorted(groups))}")
    if venv.is_there():
        return
    begun = time.monotonic()
    venv.path.mkdir(parents=True, exist_ok=True)
    with (venv.path / LOCK).open("w") as file:  # its inode is the lock, which outlives remaking
        fcntl.flock(file, fcntl.LOCK_EX)
        if not venv.is_there():  # another may have done it
            venv.install()
    print(f"bootstrap: {venv.path} is ready ({time.monotonic() - begun:.0f} s)", flush=True)


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description="Makes or updates the environment from a hash-checked lock.")
    add = parser.add_argument
    add("--stack", default="torch2.9-cu128", metavar="NAME", help="folder of stacks/, or a path")
    add("--groups", nargs="+", default=["train"], metavar="GROUP", help="of train, dev, test, bench, boot")
    add("--venv", type=Path, default=ROOT / ".venv", metavar="DIR", help="where (%(default)s)")
    options = parser.parse_args()
    path = options.venv.absolute()
    try:
        bootstrap(Venv(path, find_lock(options.stack, path), options.groups))
    except KeyboardInterrupt:
        stop("interrupted; run it again to repair it", 130)
    except LookupError as error:
        stop(f"{error}; uv on PATH is taken instead", 1)
    except OSError as error:  # a full disk, an index out of reach, an environment of somebody else
        stop(str(error), 1)


if __name__ == "__main__":
    main()
