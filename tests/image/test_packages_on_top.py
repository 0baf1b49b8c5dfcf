"""A user adds packages on top of the image's, and what the image has stays as it is.

Without a container: pip reads a real pip.conf, in a virtual environment that stands for the image's.
"""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packages_on_top import constraints, folder_of, pip_settings, search_path

from tests.helpers.packages import wheel

ROOT = Path(__file__).resolve().parents[2]


def test_constraints_hold_each_package() -> None:
    text = constraints([("Torch", "2.9.1"), ("nvidia_cublas.cu12", "12.8"), ("torch", "2.9.1")])
    assert text == "nvidia-cublas-cu12==12.8\ntorch==2.9.1\n"


def test_pip_adds_and_never_replaces(tmp_path: Path) -> None:
    wheels, on_top = tmp_path / "wheels", tmp_path / "on-top"
    wheels.mkdir()
    for version in ("1.0", "2.0"):
        wheel(wheels, "pinned", version)
    wheel(wheels, "extra", "1.0", requires="pinned")
    wheel(wheels, "newer", "1.0", requires="pinned>=2")
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env/bin/python"
    host = getattr(sys, "_base_executable", sys.executable)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))},
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
    }

    def pip(*words: str, code: int = 0) -> str:
        # The host's pip, which with --python becomes that of the environment, settings and all, in a second.
        command = [host, "-m", "pip", "--python", python, "install", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    pip("pinned==1.0")
    held = tmp_path / "constraints.txt"
    held.write_text(constraints([("pinned", "1.0")]))

    def here(text: str) -> str:
        return text.replace(folder_of("small"), str(on_top))

    (tmp_path / "env/pip.conf").write_text(here(pip_settings("small", held)))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / f"env/lib/python{version}/site-packages"
    before = sorted(path.name for path in site.iterdir())
    (site / "packages_on_top.pth").write_text(here(search_path("small", version)))

    assert "Successfully installed extra-1.0\n" in pip("extra")
    assert [path.name for path in on_top.rglob("*.py")] == ["extra.py"]
    assert "(constraint) pinned==1.0" in pip("pinned==2.0", code=1)
    assert "(constraint) pinned==1.0" in pip("newer", code=1)
    asked = "import extra, pinned, sys; print(extra.version, pinned.version)"
    assert subprocess.check_output([python, "-c", asked], text=True) == "1.0 1.0\n"
    # Whatever lies there, the image's own comes first.
    wheel(tmp_path, "pinned", "9.0")
    with zipfile.ZipFile(tmp_path / "pinned-9.0-py3-none-any.whl") as file:
        file.extractall(on_top / f"lib/python{version}/site-packages")
    assert subprocess.check_output([python, "-c", asked], text=True) == "1.0 1.0\n"
    (site / "packages_on_top.pth").unlink()
    assert sorted(path.name for path in site.iterdir()) == before

    # A virtual environment of the user's own is the user's own.
    venv.create(tmp_path / "own", symlinks=True)
    python = tmp_path / "own/bin/python"
    pip("pinned==2.0")
    assert (tmp_path / f"own/lib/python{version}/site-packages/pinned.py").is_file()


@pytest.mark.parametrize(
    ("words", "added"),
    [
        ("pip install extra", True),
        ("pip install --prefix /x extra", False),
        ("pip install -p3.12 extra", False),
        ("pip list", False),
        ("venv", False),
    ],
)
def test_uv_goes_where_pip_does(tmp_path: Path, words: str, added: bool) -> None:
    real, program = tmp_path / "bin/uv", tmp_path / "uv"
    real.parent.mkdir()
    log = tmp_path / "log"
    real.write_text(f'#!/bin/sh\necho "$@" >>{log}\n')
    real.chmod(0o755)
    (tmp_path / "pip.conf").write_text(pip_settings("small", Path("/held")))
    text = (ROOT / "scripts/uv").read_text().replace("/opt/env/pip.conf", str(tmp_path / "pip.conf"))
    program.write_text(text)
    program.chmod(0o755)

    def said(path: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [str(program), *words.split()]
        return subprocess.run(command, env={"PATH": path, **env}, capture_output=True, text=True, check=False)

    said(f"/usr/bin:/bin:{real.parent}")
    lines = log.read_text().splitlines()
    where = f"--python /opt/env/bin/python --prefix {folder_of('small')}"
    checked = (
        f"pip install --quiet --dry-run --no-deps {where} --constraints /opt/image/constraints.txt extra"
    )
    done = f"pip install {where} --excludes /opt/image/constraints.txt extra"
    assert lines == ([checked, done] if added else [words])
    said(f"/usr/bin:/bin:{real.parent}", VIRTUAL_ENV="/own")
    assert log.read_text().splitlines()[len(lines) :] == [words]
    for why, told in (("No solution found when resolving dependencies", True), ("Failed to fetch", False)):
        real.write_text(f"#!/bin/sh\necho {why} >&2\nexit 1\n")
        failed = said(f"/usr/bin:/bin:{real.parent}")
        assert failed.returncode == 1 and why in failed.stderr
        assert ("packages of the image stay as they are" in failed.stderr) == (told and added)
    real.unlink()
    missing = said("/usr/bin:/bin")
    assert missing.returncode == 127 and "pip install uv" in missing.stderr


def test_uv_tells_of_a_package_that_asks_for_more_than_the_image_has(tmp_path: Path) -> None:
    """With the real uv: what it leaves out, it doesn't compare with what is there."""
    uv = Path(sys.executable).with_name("uv")
    if not uv.is_file():
        pytest.skip("no uv beside this Python")
    venv.create(tmp_path / "env", symlinks=True)
    python, top = tmp_path / "env/bin/python", tmp_path / "on-top"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    held, settings = tmp_path / "constraints.txt", tmp_path / "pip.conf"
    held.write_text("pinned==1.0\n")
    for name, number, needs in (
        ("pinned", "1.0", ""),
        ("pinned", "2.0", ""),
        ("newer", "1.0", "pinned>=2"),
    ):
        wheel(tmp_path, name, number, needs)
    site = tmp_path / f"env/lib/python{version}/site-packages"
    with zipfile.ZipFile(tmp_path / "pinned-1.0-py3-none-any.whl") as file:
        file.extractall(site)
    where = str(top)
    (site / "on_top.pth").write_text(search_path("small", version).replace(folder_of("small"), where))
    settings.write_text(pip_settings("small", held).replace(folder_of("small"), where))
    host = getattr(sys, "_base_executable", sys.executable)
    text = (ROOT / "scripts/uv").read_text().replace("/opt/env/pip.conf", str(settings))
    text = text.replace("/opt/env/bin/python -m pip", f"{host} -m pip --python {python}")
    text = text.replace("/opt/env/bin/python", str(python)).replace("/opt/image/constraints.txt", str(held))
    program = tmp_path / "program"
    program.write_text(text)
    program.chmod(0o755)
    environment = {"PATH": f"{uv.parent}:/usr/bin:/bin", "HOME": str(tmp_path)}

    def install(name: str) -> subprocess.CompletedProcess[str]:
        words = [str(program), "pip", "install", "--no-index", "--find-links", str(tmp_path), name]
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)

    done = install("pinned==2.0")
    assert done.returncode == 1 and "packages of the image stay as they are" in done.stderr
    assert not list(top.rglob("*.py"))
    done = install("newer")
    assert done.returncode == 1 and [path.name for path in top.rglob("*.py")] == ["newer.py"]
    assert "newer 1.0 has requirement pinned>=2, but you have pinned 1.0.\n" in done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "uv: installed, but packages of the image stay as they are"
    )
