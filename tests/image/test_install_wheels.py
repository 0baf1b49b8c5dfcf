"""What the image build does besides installing: bytecode that never goes stale, records that stay true."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import install_wheels
import pytest
from install_wheels import compile_all, has_bytecode, note_lock, replaced_records

from tests.helpers.programs import program, ran
from trainer.host.stacks import lock_hash


def record(prefix: Path, name: str, *files: str) -> Path:
    file = prefix / "conda-meta" / f"{name}-1-0.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"name": name, "files": list(files)}))
    return file


def test_a_wheel_replaces_what_conda_brought_and_nothing_else_is_fetched_anew(tmp_path: Path) -> None:
    replaced = record(tmp_path, "setuptools", "lib/python3.12/site-packages/setuptools/__init__.py")
    record(tmp_path, "pip", "lib/python3.12/site-packages/pip/__init__.py")
    # The library of the same name as a wheel, without its Python part, is still conda's.
    record(tmp_path, "zstandard", "lib/libzstd.so")
    assert replaced_records(tmp_path, {"setuptools", "zstandard"}) == {replaced: "setuptools"}
    lock, site = tmp_path / "wheels.lock", f"{tmp_path}/lib/python3.12/site-packages"
    lock.write_text("# groups: train\nsetuptools==2.0 \\\n    --hash=sha256:11\n")
    program(tmp_path / "bin/python", f'#!/bin/sh\ncase "$*" in *sysconfig*) echo {site} /none ;; esac\n')
    uv = program(tmp_path / "uv", f'#!/bin/sh\necho "$@" > {tmp_path}/words\n')
    ran(sys.executable, install_wheels.__file__, lock, tmp_path, "train", "--uv", uv, code=0)
    assert not replaced.exists()
    words = (tmp_path / "words").read_text().split()
    again = [word for word in words if "install-" in word or "refresh" in word]
    assert again == ["--reinstall-package=setuptools"] and "--reinstall" not in words


def test_bytecode_is_the_same_and_never_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)  # an image's lies beside the sources
    monkeypatch.setattr(sys, "pycache_prefix", None)
    trees, site = [], tmp_path / "site"  # bytecode names its source's path: the same both times
    for _ in range(2):
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(Path(json.__file__).parent, site / "torch", ignore=shutil.ignore_patterns("*.pyc"))
        (site / "module.py").write_text("names = {'a', 'b', 'c'}\nprint(0)\n")
        assert not any(has_bytecode(path) for path in site.iterdir())
        compile_all(Path(sys.executable), sorted(site.iterdir()))
        assert all(has_bytecode(path) for path in site.iterdir() if path.name != "__pycache__")
        trees.append({str(path.relative_to(site)): path.read_bytes() for path in site.rglob("*.pyc")})
        assert {data[4] for data in trees[-1].values()} == {1}, "unchecked: bit 0 set, bit 1 not"
    assert trees[0] == trees[1]
    (site / "module.py").write_text("raise SystemExit('read again')")
    assert subprocess.check_output([sys.executable, "-c", "import module"], cwd=site, text=True) == "0\n"


def test_the_image_tells_runs_which_lock_it_was_made_from(tmp_path: Path) -> None:
    lock, prefix = tmp_path / "wheels.lock", tmp_path / "env"
    prefix.mkdir()
    lock.write_text("# groups: train\nother==2.0\n")
    assert lock_hash(prefix) is None
    note_lock(lock, prefix)
    written = (prefix / ".bootstrap.json").stat().st_mtime_ns
    note_lock(lock, prefix)  # the layer above adds nothing
    assert (prefix / ".bootstrap.json").stat().st_mtime_ns == written
    assert lock_hash(prefix) == hashlib.sha256(lock.read_bytes()).hexdigest()
