"""P2: the wheel alone, beside nothing but what it declares, trains every embedded recipe."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
TRAIN = """\
import sys
from trainer.cli import main
for recipe in ("digits", "gpt-stdlib", "dtmf", "digits-detection"):
    words = ["train", recipe, "--fast-dev-run", "--out", f"runs/{recipe}", "--set", "max_steps=1",
             "--set", "parallel.threads=1", "--set", "compile.mode=none"]
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


def declared(metadata: importlib.metadata.PackageMetadata) -> set[str]:
    """What a package needs on this machine, without extras."""
    found = map(Requirement, metadata.get_all("Requires-Dist") or [])
    return {
        canonicalize_name(one.name) for one in found if not one.marker or one.marker.evaluate({"extra": ""})
    }


def installed(wheel: Path, environment: Path) -> Path:
    """An environment of the wheel and links to what it needs; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    site = next(environment.glob("lib/python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (own,) = importlib.metadata.distributions(path=[str(site)])
    assert own.metadata["Name"] == "reproducible-trainer"
    waiting, seen = declared(own.metadata), set[str]()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        one = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in one.files or () if file.parts[0] not in ("..", "__pycache__")}:
            there = Path(str(one.locate_file(top)))
            if there.exists() and not (site / top).exists():
                (site / top).symlink_to(there)
        waiting |= declared(one.metadata) - seen
    assert "torchaudio" not in seen
    return environment / "bin/python"


@pytest.mark.slow  # test_habits.py sees in the fast suite that nothing undeclared is imported
def test_the_wheel_alone_trains_each_embedded_recipe(tmp_path: Path) -> None:
    python = installed(built(tmp_path), tmp_path / "environment")
    left = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    ran = subprocess.run(
        [python, "-I", "-c", TRAIN], cwd=tmp_path, env=left, capture_output=True, text=True, check=False
    )
    ended = [line.split()[1:] for line in ran.stdout.splitlines() if line.startswith("ended:")]
    assert ended == [[name, "0"] for name in ("digits", "gpt-stdlib", "dtmf", "digits-detection")], ran.stderr
