"""Removes from an environment what nothing uses at run time: install_wheels.py calls it and keeps the list.

The savings were measured on torch2.9-cu128's wheels, groups train and dev, for
Python 3.11 on x86_64. What a record or a RECORD names and the list holds is accounted for.

Left alone, though nothing needs it to run: `.pyi` (5 MB without jedi's, which its completion reads; editors
and lazy_loader read the others), headers that torch's own include or that Triton's launcher is built with,
ptxas, nvdisasm and NVSHMEM's device bitcode, which GPU features call; and symbols of NVIDIA's libraries,
whose license forbids changes.
"""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from locks import digest_of

SITE = "lib/python3.*/site-packages"


class Rule(NamedTuple):
    """A rule: pattern and reason; a pattern that matches a folder removes all of it."""

    name: str
    why: str
    patterns: tuple[str, ...]


# Only packages whose tests nothing imports: mpmath, jinja2, werkzeug and jupyterlab import theirs, and
# torch.testing and numpy.testing are for everybody.
TESTED = ("joblib", "matplotlib", "mpl_toolkits", "networkx", "numpy", "pandas", "scipy", "sklearn", "sympy")

RULES = (
    # 84 MB. Never below lib/gcc, libexec or a sysroot: compilers link libgcc.a, libc_nonshared.a and others.
    Rule(
        "static libraries",
        "nothing links them: there is no nvcc, and extensions link shared libraries",
        (f"{SITE}/nvidia/**/*.a", f"{SITE}/triton/**/*.a", "lib/python3.*/config-*/libpython*.a"),
    ),
    # 161 MB.
    Rule(
        "libcusolverMg",
        "the multi-GPU solver: no library of torch's needs it, none opens it by name",
        (f"{SITE}/nvidia/**/libcusolverMg.so*", "lib/libcusolverMg.so*"),
    ),
    # 111 MB.
    Rule(
        "libnvrtc.alt",
        "a second build of NVRTC: torch links libnvrtc.so, none opens this one by name",
        (f"{SITE}/nvidia/**/libnvrtc*.alt.so*", "lib/libnvrtc*.alt.so*"),
    ),
    # 59 MB of packages; of Python's own not measured (no conda-forge python here).
    Rule(
        "tests",
        "test suites of packages and of Python; nothing outside them imports them",
        (
            *(f"{SITE}/{package}/**/{name}" for package in TESTED for name in ("tests", "test")),
            "lib/python3.*/test",
            "lib/python3.*/idlelib/idle_test",
        ),
    ),
)
# 62 MB: Triton brings CUPTI three times, the nvidia wheel once more; torch brings protoc twice.
DUPLICATES = Rule(
    "duplicate libraries",
    "a link to a file of the same content, so that its hash still holds",
    (f"{SITE}/**/*.so", f"{SITE}/**/*.so.*", f"{SITE}/torch/bin/*"),
)
# 414 MB, of it 259 in Triton, whose library brings all of LLVM's debug information.
SYMBOLS = Rule(
    "symbols",
    "debug information and symbol tables: no loader reads them; both hashes are listed",
    (f"{SITE}/torch/lib/libtorch*.so", f"{SITE}/torch/lib/libc10*.so", f"{SITE}/triton/_C/*.so"),
)
SMALLEST = 1 << 20  # bytes; below it neither a link nor a library without symbols is worth an entry


def files_of(path: Path) -> list[Path]:
    """A file itself, or every file and link in a folder."""
    if path.is_symlink() or not path.is_dir():
        return [path]
    return [Path(folder) / name for folder, _, names in os.walk(path) for name in names]


def size_of(files: list[Path]) -> int:
    """Bytes of the files' content."""
    return sum(file.lstat().st_size for file in files)


def own(prefix: Path, pattern: str) -> list[Path]:
    """Returns the matches of a pattern, except through links: conda has lib/python3.1 beside python3.12."""
    links = [path for path in prefix.glob("lib/python3.*") if path.is_symlink()]
    found = prefix.glob(pattern)
    return [path for path in found if not any(path.is_relative_to(link) for link in links)]


def remove(prefix: Path, rule: Rule) -> tuple[list[Path], int]:
    """Removes what a rule names; returns the files and their bytes."""
    gone: list[Path] = []
    size = 0
    for path in sorted({path for pattern in rule.patterns for path in own(prefix, pattern)}):
        if any(path.is_relative_to(folder) for folder in gone):
            continue  # a tests folder within a tests folder
        gone.append(path)
    files = [file for path in gone for file in files_of(path)]
    size = size_of(files)
    for path in gone:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return files, size


def link(prefix: Path, gone: set[Path]) -> tuple[dict[Path, Path], int]:
    """Replaces copies of a library by relative links to the first; returns the links and the bytes saved."""
    found = {path for pattern in DUPLICATES.patterns for path in own(prefix, pattern)}
    by_size: dict[int, list[Path]] = {}
    for path in sorted(found - gone):
        if path.is_file() and not path.is_symlink() and (size := path.stat().st_size) >= SMALLEST:
            by_size.setdefault(size, []).append(path)
    links: dict[Path, Path] = {}
    saved = 0
    for size, paths in by_size.items():
        first: dict[tuple[str, int], Path] = {}
        for path in paths if len(paths) > 1 else []:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            original = first.setdefault((content, 0 if ".so" in path.name else path.stat().st_mode), path)
            if original is path:
                continue
            target = Path(os.path.relpath(original, path.parent))
            links[path], saved = target, saved + size
            new = path.with_name(f".{path.name}.link")
            new.symlink_to(target)
            new.replace(path)
    return links, saved


def strip(prefix: Path, path: Path, new: Path) -> int:
    """Writes a library without what no loader reads; returns the bytes saved, 0 where it isn't worth it.

    With the environment's own binutils, which its lock pins: others may lay the same library out differently.
    """
    own = sorted(prefix.glob("bin/*-linux-gnu-strip"))
    program = str(own[0]) if own else "strip"
    subprocess.run([program, "--strip-unneeded", "-o", new, path], check=True)
    saved = path.stat().st_size - new.stat().st_size
    if saved < SMALLEST:
        new.unlink()
        return 0
    return saved


def strip_all(prefix: Path, gone: set[Path]) -> tuple[dict[Path, dict[str, str]], int]:
    """Takes the symbols from libraries; returns their hashes before and after, and the bytes saved."""
    stripped: dict[Path, dict[str, str]] = {}
    saved = 0
    for path in sorted({path for pattern in SYMBOLS.patterns for path in own(prefix, pattern)} - gone):
        new = path.with_name(f".{path.name}.new")
        if path.is_symlink() or not (less := strip(prefix, path, new)):
            continue
        saved += less
        stripped[path] = {"before": digest_of(path), "after": digest_of(new)}
        shutil.copymode(path, new)
        new.replace(path)
    return stripped, saved


def prune(prefix: Path) -> dict[str, object]:
    """Applies every rule; returns what the list says of each and of each path, relative to the prefix."""
    rules, removed = [], set[Path]()
    for rule in RULES:
        files, size = remove(prefix, rule)
        removed |= set(files)
        rules.append((rule, len(files), size))
    links, saved = link(prefix, removed)
    rules.append((DUPLICATES, len(links), saved))
    stripped, saved = strip_all(prefix, removed | links.keys())
    rules.append((SYMBOLS, len(stripped), saved))
    for rule, number, size in rules:
        print(f"prune_env: {size / 1e6:6.1f} MB in {number:4} files: {rule.name} ({rule.why})")
    print(f"prune_env: {sum(size for *_, size in rules) / 1e6:6.1f} MB in all", flush=True)
    return {
        "rules": [{"rule": r.name, "why": r.why, "files": n, "bytes": size} for r, n, size in rules],
        "removed": sorted(str(path.relative_to(prefix)) for path in removed),
        "linked": {str(path.relative_to(prefix)): str(links[path]) for path in sorted(links)},
        "stripped": {str(path.relative_to(prefix)): hashes for path, hashes in stripped.items()},
    }
