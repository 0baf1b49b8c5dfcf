"""Python and its packages: whether the locked ones are installed, and each only once."""

from __future__ import annotations

import os
import re
import site
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.commands.doctor.facts import (
    CheckResult,
    MachineFacts,
    Software,
    bad,
    fine,
    some,
    unavailable,
    warning,
)
from trainer.host.reading import kind_of, text_of
from trainer.host.stacks import numbers, read_stacks, read_stamp, unsupported

# What a folder on PYTHONPATH, or the one that one stands in, must not hide.
_IMPORTED = (
    *("torch", "torchvision", "torchaudio", "triton", "numpy", "pydantic", "safetensors", "yaml", "PIL"),
)
_NATIVE = re.compile(r"lib(cuda(?=rt)|cudart|cublas(Lt)?|cudnn\w*|nccl|cufft|cusparse|cusolver)\.so")
_ANEW = (
    "make clean-venv && make venv   (an image: a new container, without .packages/ in what is at /workspace)"
)


def read_software(
    paths: Sequence[str] | None = None,
    prefix: Path | None = None,
    user_site: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Software:
    """Reads the packages from their files; nothing is imported.

    Args:
        paths: Python's search path; by default sys.path.
        prefix: Prefix of the environment; by default sys.prefix.
        user_site: The user's own site-packages.
        environ: Environment variables; by default this process's.
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
    before = [*environ.get("PYTHONPATH", "").split(os.pathsep), _here(), *({user_site} & set(paths))]
    return Software(
        installed={name: versions[0] for name, versions in found.items()},
        twice=tuple(
            f"{name} {' and '.join(versions)}" for name, versions in found.items() if len(set(versions)) > 1
        ),
        torch=says.get("__version__", ""),
        cuda=says.get("cuda", "").replace("None", ""),
        lock=stamp.lock or "",
        changing=stamp.changing,
        shadowed=tuple(_shadowed(before, torch)),
        searched=tuple(_searched(environ)),
    )


def _here() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was deleted
        return ""


def _distributions(folder: Path) -> list[tuple[str, str]]:
    """Returns canonical name and version of a folder's packages, from the names of their metadata folders."""
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


def locked_packages(box: MachineFacts) -> CheckResult:  # noqa: PLR0911
    """Checks whether the installed packages are the locked ones."""
    software, stacks = box.software, read_stacks()
    release, installed = software.torch.partition("+")[0], software.installed
    dist = installed.get("torch", release)
    if not software.torch:
        return bad("there is no torch", "nothing can be trained", _ANEW)
    if software.changing:
        return bad("an installer of this environment was interrupted", "half a package may be there", _ANEW)
    if {"trainer", "reproducible-trainer"} <= installed.keys():
        finding = "both reproducible-trainer and another project's trainer are installed"
        remedy = "pip uninstall trainer reproducible-trainer; then install one"
        return bad(finding, "both are imported as trainer: one overwrote files of the other", remedy)
    if software.twice:
        return bad(f"{some(software.twice)} are both installed", "one was installed over another", _ANEW)
    if dist.partition("+")[0] != release:
        return bad(f"torch's files are of {release}, its record of {dist}", "half of it was replaced", _ANEW)
    stack = software.stack()
    if stack is None:
        known = ", ".join(sorted(stacks))
        finding = f"torch {software.torch} is of no stack (there are {known})"
        return warning(finding, "nobody has tried these versions together", _ANEW)
    pins = {name: getattr(stack, name) for name in ("torch", "torchvision", "torchaudio")}
    pins = {name: version for name, version in pins.items() if version}
    locked = {**pins, **stack.wheels} if software.lock == stack.lock else pins
    other = [
        f"{name} {installed[name]} (locked: {versions.replace(' ', ' or ')})"
        for name, versions in locked.items()
        if name in installed and installed[name].partition("+")[0] not in versions.replace("+", " ").split()
    ]
    if other:
        judge = bad if any(one.split()[0] in ("torch", "torchvision", "numpy") for one in other) else warning
        return judge(
            some(other),
            f"pip install put it over what {stack.name} locks: nobody has tried these together, and the "
            "manifests of runs name a lock that isn't what ran",
            _ANEW,
        )
    if ended := unsupported(stack):
        return warning(
            ended, "known weaknesses of its packages are no longer looked for", "make train STACK=…"
        )
    if software.lock != stack.lock:
        how = "from another lock; make venv updates it" if software.lock else "not from its lock"
        return fine(f"torch {software.torch}, as in {stack.name} (installed {how})")
    return fine(f"the packages are those of {stack.name}'s lock")


def cuda(box: MachineFacts) -> CheckResult:
    """Checks whether CUDA, cuDNN and NCCL are installed once each, as torch was built for."""
    software = box.software
    if not software.torch:
        return unavailable("there is no torch")
    if not software.cuda:
        finding = f"torch {software.torch} is built without CUDA"
        if box.gpus.cards or box.gpus.nodes:
            return bad(f"{finding}, and there is a GPU", "it trains on the CPU", _ANEW)
        return fine(f"{finding}, and there is no GPU")
    major = numbers(software.cuda)[0]
    others = [
        name
        for name in software.installed
        if (match := re.fullmatch(r"nvidia-.*-cu(\d\d)", name)) and int(match[1]) != major
    ]
    if others:
        return bad(
            f"torch is built for CUDA {software.cuda}, and there are {some(others)}",
            "libraries of two CUDA versions get loaded into one process",
            f"pip uninstall {' '.join(others)}",
        )
    if software.searched:
        return warning(
            f"LD_LIBRARY_PATH or LD_PRELOAD has another CUDA, cuDNN or NCCL: {some(software.searched, 2)}",
            "extensions may load that one instead of torch's; cuDNN loads its parts by name "
            "(CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH), and ranks with different NCCLs can't talk",
            "unset LD_LIBRARY_PATH LD_PRELOAD   (Slurm: module unload cuda cudnn nccl)",
        )
    return fine(f"one CUDA, {software.cuda}")


def path(box: MachineFacts) -> CheckResult:
    """Checks whether a folder on the search path hides installed packages."""
    if box.software.shadowed:
        local = "" if box.environ.get("PYTHONNOUSERSITE") else "; export PYTHONNOUSERSITE=1"
        return bad(
            some(box.software.shadowed),
            "it is imported instead: PYTHONPATH, ~/.local and the folder that one stands in come first",
            f"unset PYTHONPATH{local}; start it in another folder, or rename that one",
        )
    return fine("nothing hides an installed package")


SOFTWARE_CHECKS = (
    ("software.lock", locked_packages),
    ("software.cuda", cuda),
    ("software.path", path),
)
