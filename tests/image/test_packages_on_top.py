"""A user adds packages on top of the image's, and what the image has stays as it is.

Without a container: pip reads a real pip.conf, in a virtual environment that stands for the image's.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest
from packages_on_top import constraints, folder_of, pip_settings, search_path

from tests.helpers.packages import wheel
from tests.helpers.programs import program, ran

ROOT = Path(__file__).resolve().parents[2]
_DEBIANS = Path("/usr/share/python-wheels")  # of python3-pip-whl


@dataclass
class Image:
    """A Python environment that stands for the image's, packages on `top` of it, and variables for pip."""

    python: Path
    top: Path
    environment: dict[str, str]

    @property
    def site(self) -> Path:
        """Where the environment's packages lie."""
        return next(self.python.parents[1].glob("lib/python3.*/site-packages"))

    def pip(self, *words: str, code: int = 0) -> str:
        """What pip says, which finds nothing but this test's wheels."""
        done = ran(self.python, "-m", "pip", *words, code=code, env=self.environment)
        return done.stdout + done.stderr

    def says(self, code: str) -> str:
        """What code in the image prints, in a new process."""
        return subprocess.check_output([self.python, "-c", code], env=self.environment, text=True)


def pip_wheel() -> Path:
    """The pip that Python brings, as uv puts none into an environment."""
    spec = importlib.util.find_spec("ensurepip")
    bundled = Path(spec.origin).parent / "_bundled" if spec and spec.origin else Path()
    found = (file for folder in (bundled, _DEBIANS) for file in folder.glob("pip-*.whl"))
    return next(found, Path("no pip here"))


@pytest.fixture
def image(whole: Image) -> Image:
    """With nothing on top."""
    if whole.top.is_file():
        whole.top.unlink()
    shutil.rmtree(whole.top, ignore_errors=True)
    return whole


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """With a package, `pinned`, of its own; `extra`, 1.0 and 2.0, `newer` and a real pip are at hand."""
    tmp_path = tmp_path_factory.mktemp("image")
    wheels, top = tmp_path / "wheels", tmp_path / "on-top"
    wheels.mkdir()
    for name in ("pinned", "extra"):
        for version in ("1.0", "2.0"):
            wheel(wheels, name, version, requires="pinned" if name == "extra" else "")
    wheel(wheels, "newer", "1.0", requires="pinned>=2")
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env/bin/python"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    environment = {**inherited, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "HOME": str(tmp_path)}
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / f"env/lib/python{version}/site-packages"
    for file in (wheels / "pinned-1.0-py3-none-any.whl", pip_wheel()):
        shutil.unpack_archive(file, site, "zip")
    held = tmp_path / "constraints.txt"
    held.write_text(constraints([("pinned", "1.0")]))
    text = (ROOT / "scripts/on_top.py").read_text().partition("\n")[2]  # of /opt/image, for this Python
    on_top = program(tmp_path / "on_top", f"#!{python} -I\n{text}")
    settings = pip_settings("small", held, str(on_top))
    (tmp_path / "env/pip.conf").write_text(settings.replace(folder_of("small"), str(top)))
    line = search_path("small", version).replace(folder_of("small"), str(top))
    (site / "packages_on_top.pth").write_text(line)
    return Image(python, top, environment)


def versions(image: Image, name: str) -> list[str]:
    """Of each installed distribution of a name, as metadata has it; then the module's own, or none."""
    code = f"""
from importlib.metadata import distributions
from importlib.util import find_spec
print(*[one.version for one in distributions() if one.metadata["Name"] == "{name}"])
print(__import__("{name}").version if find_spec("{name}") else "none")
"""
    return image.says(code).split()


def test_what_the_image_has_comes_first_and_is_held(image: Image) -> None:
    assert constraints([("Pinned_It", "1.0"), ("b.c", "2")]) == "b-c==2\npinned-it==1.0\n"
    site = image.top / image.site.relative_to(image.python.parents[1])
    site.mkdir(parents=True)
    (site / "pinned.py").write_text("version = '2.0'")
    (site / "own.py").touch()
    assert image.says("import own, pinned; print(pinned.version)") == "1.0\n"


@pytest.mark.slow  # pip, six times; `.ci/run` runs it
def test_pip_adds_removes_and_replaces_its_own_and_nothing_of_the_images(image: Image) -> None:
    for words, version in ((["extra==1.0"], "1.0"), (["--upgrade", "extra"], "2.0")):
        image.pip("install", *words)
        assert versions(image, "extra") == [version, version]
    image.pip("uninstall", "--yes", "extra")
    assert versions(image, "extra") == ["none"] and not list(image.top.rglob("*extra*"))
    before = {path for path in image.site.rglob("*") if "__pycache__" not in path.parts}
    assert "pinned==1.0" in image.pip("install", "newer", code=1)
    assert "pinned==1.0" in image.pip("install", "--upgrade", "--force-reinstall", "pinned==2.0", code=1)
    image.pip("uninstall", "--yes", "pinned")
    # Programs of packages on top find the image's own first as well.
    pinned = image.top.parent / "wheels/pinned-2.0-py3-none-any.whl"
    shutil.unpack_archive(pinned, next(image.top.glob("lib/python3.*/site-packages")), "zip")
    above = [str(image.top / "bin/python"), "-c", "import pinned, sys; print(pinned.version, sys.prefix)"]
    assert subprocess.check_output(above, text=True) == f"1.0 {image.top}\n"
    assert before == {path for path in image.site.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.slow
def test_a_virtual_environment_of_ones_own_may_have_another_version(image: Image, tmp_path: Path) -> None:
    venv.create(tmp_path / "own", symlinks=True)
    image.pip("--python", str(tmp_path / "own/bin/python"), "install", "pinned==2.0")
    assert list(tmp_path.glob("own/lib/python3.*/site-packages/pinned.py"))


def test_where_nothing_can_be_written_pip_says_so_in_a_line(image: Image) -> None:
    image.top.write_text("in the way")
    said = image.pip("install", "extra", code=1)
    assert said.startswith("pip: ") and str(image.top) in said and said.count("\n") == 1


def test_a_python_that_lies_on_top_is_never_run(image: Image) -> None:
    """A checkout may come from anybody; one that another image made is made anew."""
    program(image.top / "bin/python", "#!/bin/sh\necho run >&2; exit 3\n")
    (image.top / "pyvenv.cfg").write_text("home = /nowhere\n")
    image.pip("install", "extra")
    assert (image.top / "bin/python").resolve() == image.python.resolve()
