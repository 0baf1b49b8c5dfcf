"""Python and the packages: is what runs what was locked, and one of each?"""

from __future__ import annotations

import os
import platform
import re
import site
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.commands.doctor.facts import Box, Finding, Software, bad, fine, unavailable, warn
from trainer.commands.doctor.helpers import some
from trainer.commands.doctor.stacks import numbers, read_stacks, stack_of
from trainer.host.reading import kind_of, text_of
from trainer.host.stamp import read_stamp
from trainer.host.toolchain import missing_compiler, missing_headers

# What a folder on PYTHONPATH, or the one that one stands in, must not hide.
_IMPORTED = (
    "torch",
    "torchvision",
    "torchaudio",
    "triton",
    "numpy",
    "pydantic",
    "safetensors",
    "yaml",
    "PIL",
)
_NATIVE = re.compile(r"lib(cuda(?=rt)|cudart|cublas(Lt)?|cudnn\w*|nccl|cufft|cusparse|cusolver)\.so")
_OLDEST, _NEWEST = (3, 10), (3, 13)


def read_software(
    paths: Sequence[str] | None = None,
    prefix: Path | None = None,
    user_site: str | None = None,
    environ: Mapping[str, str] | None = None,
    gpu: bool = False,
) -> Software:
    """Looks at the files of the packages; nothing is imported.

    Args:
        paths: Where Python looks for packages; by default sys.path.
        prefix: Of the environment; by default sys.prefix.
        user_site: The user's own site-packages.
        environ: By default this process's.
        gpu: Whether compilers are wanted for a GPU.
    """
    environ = os.environ if environ is None else environ
    paths = sys.path if paths is None else paths
    user_site = site.getusersitepackages() if user_site is None else user_site
    found = dict[str, list[str]]()
    torch = None
    for path in dict.fromkeys(paths):
        for name, version in _distributions(Path(path)):
            found.setdefault(name, []).append(version)
        if torch is None and kind_of(f"{path}/torch/version.py") == "file":
            torch = Path(path)
    facts = text_of(torch / "torch/version.py") if torch else ""
    says = dict(re.findall(r"^(\w+)(?:: [\w\[\]. ]+)? = '?([^'\n]*)'?$", facts, re.MULTILINE))
    stamp = read_stamp(Path(sys.prefix) if prefix is None else prefix)
    leaked = [name for name, _ in _distributions(Path(user_site))] if user_site in paths else []
    return Software(
        python=platform.python_version(),
        installed={name: versions[0] for name, versions in found.items()},
        twice=tuple(
            f"{name} {' and '.join(versions)}" for name, versions in found.items() if len(set(versions)) > 1
        ),
        torch=says.get("__version__", ""),
        cuda=says.get("cuda", "").replace("None", ""),
        wanted=_wanted(torch) if torch else {},
        lock=stamp.lock or "",
        changing=stamp.changing,
        leaked=tuple(leaked),
        shadowed=tuple(_shadowed([*environ.get("PYTHONPATH", "").split(os.pathsep), _here()], torch)),
        searched=tuple(_searched(environ)),
        compiler=missing_compiler(gpu) or "",
        headers=missing_headers() or "",
    )


def _here() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was deleted
        return ""


def _distributions(folder: Path) -> list[tuple[str, str]]:
    """Canonical name and version of what is installed in a folder, from the names of the folders in it."""
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except (OSError, ValueError):
        return []
    found = []
    for name in sorted(names):
        match = re.fullmatch(r"(.+?)-(\d[^-]*)(?:-py[\d.]+)?\.(?:dist|egg)-info", name)
        if match:
            found.append((re.sub(r"[-_.]+", "-", match[1]).lower(), match[2]))
    return found


def _wanted(folder: Path) -> dict[str, str]:
    """The exact versions of CUDA's libraries and Triton that the installed torch asks for."""
    for file in folder.glob("torch-*.dist-info/METADATA"):
        exact = re.findall(r"^Requires-Dist: ([\w.-]+)==([\w.]+)", text_of(file), re.MULTILINE)
        return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in exact}
    return {}


def _shadowed(folders: Sequence[str], torch: Path | None) -> list[str]:
    found = []
    for folder in dict.fromkeys(filter(None, folders)):
        if torch is not None and Path(folder).absolute() == torch.absolute():
            continue
        for name in _IMPORTED:
            if kind_of(f"{folder}/{name}.py") == "file" or kind_of(f"{folder}/{name}/__init__.py") == "file":
                found.append(f"{name} in {folder}")
    return found


def _searched(environ: Mapping[str, str]) -> list[str]:
    found = [word for word in re.split(r"[ :]", environ.get("LD_PRELOAD", "")) if _NATIVE.search(word)]
    for folder in dict.fromkeys(filter(None, environ.get("LD_LIBRARY_PATH", "").split(":"))):
        try:
            names = sorted(entry.name for entry in os.scandir(folder))
        except OSError:
            continue
        found += [f"{folder}/{name}" for name in names if _NATIVE.match(name)][:8]
    return found


def lock(box: Box) -> Finding:  # noqa: PLR0911
    """Whether the packages are those of the lock."""
    software, stacks = box.software, read_stacks()
    anew = {
        "host": "make clean-venv && make venv   (packages of your own: into another environment)",
        "docker": "docker run --rm IMAGE …   (a new container has what the image has)",
        "kubernetes": "kubectl delete pod NAME   (and leave pip install out of command:)",
        "slurm": "module purge; unset PYTHONPATH; use the environment's own trainer",
    }
    if not software.torch:
        return bad("there is no torch", "nothing can be trained", host="make venv")
    if software.changing:
        return bad("an installer of this environment was interrupted", "half a package may be there", **anew)
    if software.twice:
        return bad(f"{some(software.twice)} are both installed", "one was installed over another", **anew)
    release, installed = software.torch.partition("+")[0], software.installed
    dist = installed.get("torch", release)
    if dist.partition("+")[0] != release:
        return bad(f"torch's files are of {release}, its record of {dist}", "half of it was replaced", **anew)
    stack = stack_of(software, stacks)
    if stack is None:
        known = ", ".join(sorted(stacks))
        return warn(
            f"torch {software.torch} is of no stack (there are {known})",
            "nobody has tried these versions together",
            **anew,
        )
    pins = {name: getattr(stack, name) for name in ("torch", "torchvision", "torchaudio")}
    locked = {**pins, **stack.wheels} if software.lock == stack.lock else pins
    other = [
        f"{name} {installed[name]} (locked: {versions.replace(' ', ' or ')})"
        for name, versions in locked.items()
        if name in installed and installed[name].partition("+")[0] not in versions.replace("+", " ").split()
    ]
    if other:
        judge = bad if any(one.split()[0] in ("torch", "torchvision", "numpy") for one in other) else warn
        return judge(
            some(other),
            f"pip install put it over what {stack.name} locks: nobody has tried these together, and the "
            "manifests of runs name a lock that isn't what ran",
            **anew,
        )
    if software.lock != stack.lock:
        how = "from another lock; make venv updates it" if software.lock else "not from its lock"
        return fine(f"torch {software.torch}, as in {stack.name} (installed {how})")
    return fine(f"the packages are those of {stack.name}'s lock")


def python(box: Box) -> Finding:
    """Whether this Python is one that is supported."""
    version = [*numbers(box.software.python), 0, 0][:2]
    if not _OLDEST <= (version[0], version[1]) <= _NEWEST:
        return warn(
            f"Python {box.software.python}",
            "the locks serve 3.10 to 3.13",
            host="make clean-venv && make venv PYTHON=python3.12",
            docker="use the image's own Python: /opt/env/bin/python",
        )
    return fine(f"Python {box.software.python}")


def cuda(box: Box) -> Finding:  # noqa: PLR0911
    """Whether there is one CUDA, and the one that torch was built for."""
    software = box.software
    if not software.torch:
        return unavailable("there is no torch")
    anew = {"host": "make clean-venv && make venv", "docker": "docker run --rm IMAGE …   (a new container)"}
    if not software.cuda:
        if box.gpus.cards or box.gpus.nodes:
            return bad(
                f"torch {software.torch} is built without CUDA, and there is a GPU",
                "it trains on the CPU",
                **anew,
            )
        return fine(f"torch {software.torch} is built without CUDA, and there is no GPU")
    major = numbers(software.cuda)[0]
    others = [
        f"{name} {version}"
        for name, version in software.installed.items()
        if (match := re.fullmatch(r"nvidia-.*-cu(\d\d)", name)) and int(match[1]) != major
    ]
    if others:
        return bad(
            f"torch is built for CUDA {software.cuda}, and there are {some(others)}",
            "libraries of two CUDA versions get loaded into one process",
            host=f"pip uninstall {' '.join(one.split()[0] for one in others)}",
        )
    wrong = _not_wanted(software, lambda name: name.startswith("nvidia-") and "cudnn" not in name)
    if wrong:
        return bad(f"{some(wrong)}", "something replaced libraries that torch was built with", **anew)
    searched = [one for one in software.searched if "cudnn" not in one and "nccl" not in one]
    if searched:
        return warn(
            f"LD_LIBRARY_PATH or LD_PRELOAD has another CUDA: {some(searched, 2)}",
            "programs and extensions may load that one instead of torch's",
            host="unset LD_LIBRARY_PATH LD_PRELOAD   (the wheels find their own)",
            docker="docker run -e LD_LIBRARY_PATH= …",
            compose="environment: {LD_LIBRARY_PATH: ''}",
            kubernetes="env: [{name: LD_LIBRARY_PATH, value: ''}]",
            slurm="module unload cuda cudnn nccl",
        )
    return fine(f"one CUDA, {software.cuda}")


def cudnn(box: Box) -> Finding:
    """Whether there is one cuDNN, and the one that torch was built for."""
    software = box.software
    if not software.cuda:
        return unavailable("torch is built without CUDA" if software.torch else "there is no torch")
    searched = [one for one in software.searched if "cudnn" in one]
    if searched:
        return warn(
            f"LD_LIBRARY_PATH or LD_PRELOAD has another cuDNN: {some(searched, 2)}",
            "cuDNN loads its parts by name: mixed versions end with CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH",
            host="unset LD_LIBRARY_PATH LD_PRELOAD   (the wheels find their own)",
            docker="docker run -e LD_LIBRARY_PATH= …",
            compose="environment: {LD_LIBRARY_PATH: ''}",
            kubernetes="env: [{name: LD_LIBRARY_PATH, value: ''}]",
            slurm="module unload cudnn cuda",
        )
    there = {
        name: version for name, version in software.installed.items() if name.startswith("nvidia-cudnn-cu")
    }
    wrong = _not_wanted(software, lambda name: name.startswith("nvidia-cudnn-"))
    if len(there) > 1 or wrong:
        listed = some(wrong or [f"{name} {version}" for name, version in there.items()])
        return bad(
            listed,
            "torch was built with another one",
            host="make clean-venv && make venv",
            docker="docker run --rm IMAGE …   (a new container)",
        )
    return fine(f"one cuDNN, {next(iter(there.values()), 'in the torch package itself')}")


def _not_wanted(software: Software, ours: object) -> list[str]:
    assert callable(ours)
    return [
        f"{name} {software.installed[name]} (torch wants {version})"
        for name, version in software.wanted.items()
        if name in software.installed and ours(name) and software.installed[name] != version
    ]


def compiler(box: Box) -> Finding:
    """Whether torch.compile finds a compiler."""
    return _for_compiling(
        box, box.software.compiler, "a compiler is there for torch.compile", "g++", "gcc-c++"
    )


def headers(box: Box) -> Finding:
    """Whether torch.compile finds Python's headers."""
    there = "Python.h is there for torch.compile"
    return _for_compiling(box, box.software.headers, there, "python3-dev", "python3-devel")


def _for_compiling(box: Box, missing: str, there: str, package: str, other: str) -> Finding:
    if not missing:
        return fine(there)
    planned = f", which {box.plan.recipe} sets" if box.plan.compiles else ""
    return warn(
        missing,
        f"with compile.mode{planned} it says so and trains eagerly: slower",
        host=f"sudo apt-get install {package}   (dnf install {other})",
        docker="the images of this project have both: docker run trainer:torch2.9-cu128-train …",
        slurm="module load gcc",
    )


def user_site(box: Box) -> Finding:
    """Whether packages of the user's own get in."""
    leaked = box.software.leaked
    if not leaked:
        return fine("no package comes from the user's own site-packages")
    ours = {name for stack in read_stacks().values() for name in stack.wheels}
    locked = [name for name in leaked if name in ours]
    judge = bad if locked else warn
    return judge(
        f"{some(locked or leaked)} in ~/.local come before or beside the environment's",
        "pip install --user, or a home folder that is mounted into the container",
        docker="docker run -e PYTHONNOUSERSITE=1 …",
        compose="environment: {PYTHONNOUSERSITE: '1'}",
        kubernetes="env: [{name: PYTHONNOUSERSITE, value: '1'}]",
        slurm="export PYTHONNOUSERSITE=1   (Pyxis: --no-container-mount-home; Apptainer: --containall)",
        host="export PYTHONNOUSERSITE=1",
    )


def path(box: Box) -> Finding:
    """Whether a folder hides installed packages."""
    if box.software.shadowed:
        return bad(
            some(box.software.shadowed),
            "ranks are started as modules: what lies on PYTHONPATH or where one stands is imported instead",
            host="unset PYTHONPATH; start it in another folder, or rename that one",
            docker="docker run -e PYTHONPATH= -w /workspace …",
            compose="environment: {PYTHONPATH: ''}",
            kubernetes="env: [{name: PYTHONPATH, value: ''}]",
            slurm="export PYTHONPATH=",
        )
    return fine("nothing hides an installed package")


CHECKS = (
    ("software.lock", lock),
    ("software.python", python),
    ("software.cuda", cuda),
    ("software.cudnn", cudnn),
    ("software.compiler", compiler),
    ("software.headers", headers),
    ("software.user_site", user_site),
    ("software.path", path),
)
