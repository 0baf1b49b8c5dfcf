"""What an image goes without: only what the rules name, every file accounted for, nothing imported."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from image_records import SYMBOLS as SYMBOLS_OF_RECORDS
from prune_env import DUPLICATES, RULES, SYMBOLS, prune

from tests.helpers.programs import program

ROOT = Path(__file__).resolve().parents[2]
SITE = "lib/python3.12/site-packages"
LIBRARY = os.urandom(1 << 20)
GONE = [
    *(f"{SITE}/nvidia/cusolver/lib/libcusolverMg.so.11", f"{SITE}/nvidia/nvshmem/lib/libnvshmem_device.a"),
    f"{SITE}/nvidia/cuda_nvrtc/lib/libnvrtc.alt.so.12",
    *(f"{SITE}/sympy/core/tests/{name}" for name in ("test_x.py", "tests/test_x.py")),
    *("lib/python3.12/test/test_os.py", "lib/python3.12/config-3.12-x86_64-linux-gnu/libpython3.12.a"),
]
_KEPT = """
nvidia/cusolver/lib/libcusolver.so.11 nvidia/cuda_nvrtc/lib/libnvrtc.so.12 numpy/testing/__init__.py
nvidia/cuda_runtime/include/cuda_runtime.h triton/backends/nvidia/include/cuda.h jinja2/tests.py
torch/include/ATen/ATen.h torch/testing/__init__.py torch/_C/_VariableFunctions.pyi sympy/core/latest.py
numpy/_core/include/numpy/arrayobject.h mpmath/tests/__init__.py
"""
KEPT = [
    *(f"{SITE}/{name}" for name in _KEPT.split()),
    *(f"lib/gcc/x86_64-conda-linux-gnu/14.4.0/{name}" for name in ("libgcc.a", "libstdc++.a")),
    *("lib/python3.12/unittest/__init__.py", "include/python3.12/Python.h"),
    *("x86_64-conda-linux-gnu/sysroot/usr/lib64/libc_nonshared.a", "bin/x86_64-conda-linux-gnu-strip"),
]
# What it is called with, and a library of which it leaves the first bytes.
STRIP = '#!/bin/sh\n[ "$1 $2" = "--strip-unneeded -o" ] && head -c 4096 "$4" > "$3"\n'
WITH_SYMBOLS = bytes(2 << 20)
FIRST = f"{SITE}/nvidia/cuda_cupti/lib/libcupti.so.12"
COPY = f"{SITE}/triton/backends/nvidia/lib/cupti/libcupti.so"
TRITON = f"{SITE}/triton/_C/libtriton.so"
CUDNN = [f"{SITE}/nvidia/cudnn/lib/libcudnn.so.9", f"{SITE}/torch/lib/libcudnn.so.9"]


@pytest.fixture
def env(tmp_path: Path) -> Path:
    prefix = tmp_path / "env"
    contents = {path: path.encode() for path in (*GONE, *KEPT)} | {FIRST: LIBRARY, COPY: LIBRARY}
    contents |= {path: WITH_SYMBOLS + path.encode() for path in (TRITON, *CUDNN)}
    for path, content in contents.items():
        (prefix / path).parent.mkdir(parents=True, exist_ok=True)
        (prefix / path).write_bytes(content)
    (prefix / TRITON).chmod(0o755)
    program(prefix / KEPT[-1], STRIP)
    return prefix


def files(prefix: Path) -> list[str]:
    return sorted(str(path.relative_to(prefix)) for path in prefix.rglob("*") if not path.is_dir())


def test_only_what_the_rules_name_goes(env: Path) -> None:
    before, mode = (env / TRITON).read_bytes(), (env / TRITON).stat().st_mode
    said: dict[str, Any] = prune(env)
    assert files(env) == sorted([*KEPT, FIRST, COPY, TRITON, *CUDNN])
    assert said["removed"] == sorted(GONE)
    assert said["linked"] == {COPY: os.path.relpath(FIRST, Path(COPY).parent)}
    assert (env / COPY).readlink() == Path(said["linked"][COPY])
    assert (env / COPY).read_bytes() == LIBRARY  # so that its RECORD's hash still holds
    assert {rule["rule"] for rule in said["rules"]} == {rule.name for rule in (*RULES, DUPLICATES, SYMBOLS)}
    less = len(before) - (env / TRITON).stat().st_size
    assert less > 1 << 20
    assert sum(rule["bytes"] for rule in said["rules"]) == len(LIBRARY) + sum(map(len, GONE)) + less
    after = (env / TRITON).read_bytes()
    hashes = {"before": hashlib.sha256(before).hexdigest(), "after": hashlib.sha256(after).hexdigest()}
    assert said["stripped"] == {TRITON: hashes}
    assert (env / TRITON).stat().st_mode == mode
    for path in CUDNN:  # NVIDIA's are passed on as they are
        assert (env / path).read_bytes() == WITH_SYMBOLS + path.encode()
    assert all(SYMBOLS_OF_RECORDS.fullmatch(path) for path in said["stripped"])
    assert all(rule["files"] > 0 for rule in said["rules"])
