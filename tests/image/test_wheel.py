"""P2: the wheel alone, beside nothing but what it declares, trains every embedded recipe."""

import ast
import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from locks import read_toml
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from tests.helpers.programs import ran

ROOT = Path(__file__).resolve().parents[2]
TRAIN = """\
import sys
from trainer.cli import main
for recipe in ("digits", "gpt-stdlib", "dtmf", "digits-detection"):
    words = ["train", recipe, "--fast-dev-run", "--set", "parallel.threads=1", "--set", "compile.mode=none"]
    print("ended:", recipe, main(words), flush=True)
"""


def built(folder: Path) -> Path:
    """The wheel, built from a copy: setuptools leaves build/ and an egg-info beside what it builds."""
    source = folder / "source"
    shutil.copytree(ROOT / "trainer", source / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    code = "from setuptools import build_meta; build_meta.build_wheel('..')"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    return wheel


def declared(metadata: importlib.metadata.PackageMetadata) -> set[NormalizedName]:
    """What a package needs on this machine, without extras."""
    lines = map(Requirement, metadata.get_all("Requires-Dist") or [])
    found = [one.name for one in lines if not one.marker or one.marker.evaluate({"extra": ""})]
    return set(map(canonicalize_name, found))


def needed(waiting: set[NormalizedName]) -> dict[NormalizedName, importlib.metadata.Distribution]:
    """These packages and what they need, as far as they are installed."""
    found = dict[NormalizedName, importlib.metadata.Distribution]()
    while waiting:
        name = waiting.pop()
        for one in importlib.metadata.distributions(name=name):
            found[name] = one
            waiting |= declared(one.metadata) - found.keys()
    return found


def installed(wheel: Path, environment: Path) -> Path:
    """An environment of the wheel and links to what it needs; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    site = next(environment.glob("lib/python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (own,) = importlib.metadata.distributions(path=[str(site)])
    assert own.metadata["Name"] == "reproducible-trainer"
    for one in needed(declared(own.metadata)).values():
        for top in {file.parts[0] for file in one.files or () if file.parts[0] not in ("..", "__pycache__")}:
            there = Path(str(one.locate_file(top)))
            if there.exists() and not (site / top).exists():
                (site / top).symlink_to(there)
    assert not list(site.glob("torchaudio*"))
    return environment / "bin/python"


@pytest.mark.slow
def test_the_wheel_alone_trains_each_embedded_recipe(tmp_path: Path) -> None:
    python = installed(built(tmp_path), tmp_path / "environment")
    left = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = ran(python, "-I", "-c", TRAIN, cwd=tmp_path, env=left)
    ended = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ended:")]
    wanted = [[name, "0"] for name in ("digits", "gpt-stdlib", "dtmf", "digits-detection")]
    assert ended == wanted, done.stderr


def imported() -> Iterator[tuple[str, str]]:
    """Each file of the package and the top of each module that it imports."""
    for file in (ROOT / "trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from ((one.name.partition(".")[0], file.name) for one in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield str(node.module).partition(".")[0], file.name


def test_what_is_imported_is_declared() -> None:
    project = read_toml(ROOT / "pyproject.toml")["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    asked = {canonicalize_name(Requirement(line).name) for group in groups for line in group}
    assert "torchaudio" not in asked
    there = needed(asked).keys()
    owners = importlib.metadata.packages_distributions()
    ours = {"trainer", *sys.stdlib_module_names}
    others = {one for one in imported() if one[0] in owners.keys() - ours}
    assert not {one for one in others if not there & set(map(canonicalize_name, owners[one[0]]))}
