"""P2, one command: the environment is made from the lock, whatever the machine has, and repaired if it broke.

The projects here are small and their wheels are made on the spot: nothing needs a network.
"""

import hashlib
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from bootstrap import say_where_cuda_is
from locks import get_uv, read_wheels

from tests.helpers.packages import wheel
from tests.helpers.programs import folder_served, program, ran
from tests.helpers.refusals import refusal
from trainer.host.stacks import lock_hash

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
BASE = Path(getattr(sys, "_base_executable", sys.executable))
UV = shutil.which("uv") or shutil.which("uv", path=Path(sys.prefix) / "bin")
MAKE = shutil.which("make")


@dataclass
class Project:
    """A project with a lock and an environment; `tools` has all commands that a bootstrap here finds."""

    root: Path
    links: Path
    tools: Path
    env: dict[str, str]

    def __post_init__(self) -> None:
        self.venv, self.locked = self.root / ".venv", self.root / "stacks/tiny/wheels.lock"

    def wheel(self, name: str, version: str, script: str = "", tag: str = "any") -> str:
        """Makes a wheel; returns its hash."""
        path = wheel(self.links, name, version, script=script, tag=tag)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def lock(self, *lines: str) -> None:
        """Writes the lock; a line is `name==version group …`."""
        text = "--only-binary :all:\n"
        for line in lines:
            pin, *groups = line.split()
            sha256 = self.wheel(*pin.split("=="))
            text += f"# groups: {' '.join(groups)}\n{pin} \\\n    --hash=sha256:{sha256}\n"
        self.locked.parent.mkdir(parents=True, exist_ok=True)
        self.locked.write_text(text)

    def start(self, *groups: str) -> subprocess.Popen[str]:
        script, pipe = str(self.root / "scripts/bootstrap.py"), subprocess.PIPE
        command = [str(BASE), script, "--stack", "tiny", "--groups", *groups]
        return subprocess.Popen(command, env=self.env, stdout=pipe, stderr=pipe, text=True)

    def bootstrap(self, *groups: str, code: int = 0) -> str:
        process = self.start(*groups)
        output, errors = process.communicate(timeout=300)
        assert process.returncode == code and "Traceback" not in errors, output + errors
        return output + errors

    def version(self, name: str) -> str:
        """The version that the environment imports; empty if it has none."""
        return ran(self.venv / "bin/python", "-c", f"import {name}; print({name}.version)").stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project on a machine without uv."""
    root, links, tools = (tmp_path / name for name in ("project", "links", "tools"))
    shutil.copytree(SCRIPTS, root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    links.mkdir()
    tools.mkdir()
    offline = {"UV_OFFLINE": "1", "UV_FIND_LINKS": str(links), "UV_CACHE_DIR": str(tmp_path / "cache")}
    made = Project(root, links, tools, {"HOME": str(tmp_path), "PATH": str(tools), **offline})
    made.lock("apple==1.0 test dev", "pear==1.0 dev", "uv==0.0.1 boot")
    return made


@pytest.fixture
def with_uv(project: Project) -> Project:
    """The same with uv on the PATH."""
    if UV is None:
        pytest.skip("no uv here")
    (project.tools / "uv").symlink_to(UV)
    return project


def test_groups_are_added_and_the_second_call_does_nothing(with_uv: Project) -> None:
    """Two calls at once share the work; runs know the hash of the lock."""
    stamp, lock = with_uv.venv / ".bootstrap.json", with_uv.locked
    both = [with_uv.start("test"), with_uv.start("dev")]
    outputs = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert (with_uv.version("apple"), with_uv.version("pear")) == ("1.0", "1.0")
    assert set(json.loads(stamp.read_text())["groups"]) == {"dev", "test"}
    written = stamp.stat().st_mtime_ns
    (with_uv.tools / "uv").unlink()  # nothing is asked of an installer
    assert with_uv.bootstrap("test", "dev") == ""
    assert stamp.stat().st_mtime_ns == written
    for text in (lock.read_text(), f"# Another word.\n{lock.read_text()}"):
        lock.write_text(text)
        assert with_uv.bootstrap("test") == "", "nothing is installed"
        assert lock_hash(with_uv.venv) == hashlib.sha256(text.encode()).hexdigest()


def test_a_changed_lock_updates_the_environment(with_uv: Project) -> None:
    assert "test of tiny" in with_uv.bootstrap("test")
    # Nothing is imported before: bytecode of one version may be as old and as long as the next one's source.
    assert not list(with_uv.venv.rglob("pear.py"))
    assert "is ready" in with_uv.bootstrap("dev")
    assert list(with_uv.venv.rglob("pear.py"))
    (with_uv.venv / "mine").touch()
    with_uv.lock("apple==2.0 test dev", "plum==1.0 dev", "uv==0.0.1 boot")
    with_uv.bootstrap("test")
    assert [with_uv.version(name) for name in ("apple", "pear", "plum")] == ["2.0", "", "1.0"]
    assert (with_uv.venv / "mine").exists()


def test_what_is_wrong_is_refused(with_uv: Project) -> None:
    assert with_uv.bootstrap("fruit", code=2).count("\n") == 1
    done = ran(BASE, with_uv.root / "scripts/bootstrap.py", "--stack", "tinny", env=with_uv.env)
    assert done.returncode == 2 and "'tiny'" in done.stderr and done.stderr.count("\n") == 1
    with_uv.wheel("apple", "1.0", script="# another file")
    assert "hash" in with_uv.bootstrap("test", code=1).lower()
    assert with_uv.version("apple") == ""
    shutil.rmtree(with_uv.venv)
    with_uv.venv.mkdir()
    (with_uv.venv / "thesis.tex").touch()
    with_uv.bootstrap("test", code=2)
    assert (with_uv.venv / "thesis.tex").exists()


def test_an_interrupted_install_is_repaired(with_uv: Project) -> None:
    with_uv.bootstrap("test")
    uv = with_uv.tools / "uv"
    uv.unlink()
    program(uv, '#!/bin/sh\nkill -9 "$PPID"\n')
    with_uv.bootstrap("dev", code=-9)
    (with_uv.venv / "half").touch()
    uv.unlink()
    uv.symlink_to(str(UV))
    with_uv.bootstrap("dev")
    assert (with_uv.version("apple"), with_uv.version("pear")) == ("1.0", "1.0")
    assert not (with_uv.venv / "half").exists()


@pytest.fixture
def index(project: Project) -> Iterator[Project]:
    """A package index with the lock's uv for this machine, which stands in for the real one."""
    if UV is None:
        pytest.skip("no uv here")
    tag = f"{'macosx_11_0' if sys.platform == 'darwin' else 'manylinux_2_17'}_{platform.machine()}"
    other = project.wheel("uv", "0.0.1", "#!/bin/sh\nexit 1\n", "win_amd64")
    sha256 = project.wheel("uv", "0.0.1", f'#!/bin/sh\nexec {UV} "$@"\n', tag)
    old = project.wheel("uv", "0.0.1")
    lock = project.locked
    lock.write_text(lock.read_text().replace(old, f"{other} --hash=sha256:{sha256}"))
    page = project.links / "simple/uv"
    page.mkdir(parents=True)
    for file in project.links.glob("uv-0.0.1-*_*.whl"):
        file.rename(page / file.name)
    with folder_served(project.links) as address:
        project.env |= {"PIP_INDEX_URL": f"{address.replace('//', '//me:pw@')}/simple/"}
        yield project


def test_without_uv_it_is_fetched_by_its_hash(index: Project) -> None:
    index.bootstrap("test")
    assert index.version("apple") == "1.0"
    assert index.bootstrap("test") == ""
    # What another environment needs of it stays there, and is not fetched again.
    del index.env["PIP_INDEX_URL"]
    index.bootstrap("dev")
    assert index.version("pear") == "1.0"


def test_another_uv_than_the_locks_is_not_run(index: Project) -> None:
    (made,) = (index.links / "simple/uv").glob(f"*{platform.machine()}.whl")
    made.write_bytes(made.read_bytes() + b"\0")
    line = index.bootstrap("test", code=1).splitlines()[-1]
    assert made.name in line and "hash differs" in line
    assert not (index.venv / "bin/uv").exists()


def test_links_of_an_index_may_be_whole_relative_and_with_hashes(index: Project, tmp_path: Path) -> None:
    """As the public one's are; and those of mirrors, which escape what HTML asks for."""
    (made,) = (index.links / "simple/uv").glob(f"*{platform.machine()}.whl")
    place = index.env["PIP_INDEX_URL"].removesuffix("/simple/").replace("me:pw@", "")
    moved = made.rename(index.links / made.name)
    page = index.links / "simple/uv/index.html"
    for link in (f"{place}/{moved.name}#sha256=00", f"../../{moved.name}", f"/{moved.name}"):
        page.write_text(f'<a data-x="" href="{link}" data-y="&gt;=3.8">{moved.name}</a>')
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("UV_DEFAULT_INDEX", f"{place}/simple")
            assert get_uv(index.locked, tmp_path / "got").stat().st_mode & 0o111


@pytest.mark.parametrize(
    ("stack", "machine", "told"),
    [
        ("torch2.9-cu128", "aarch64", True),
        ("torch2.14-cu130", "aarch64", False),
        ("torch2.9-cu128", "x86_64", False),
    ],
)
def test_a_gpu_on_arm_that_the_stack_cannot_use_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stack: str, machine: str, told: bool
) -> None:
    lock, driver = ROOT / f"stacks/{stack}/wheels.lock", tmp_path / "version"
    driver.touch()
    say_where_cuda_is(lock, read_wheels(lock.read_text()), machine, driver)
    assert ("STACK=torch2.14-cu130 " in capsys.readouterr().out) == told


PATCH = "import platform, runpy, sys, sysconfig; {}; runpy.run_path({!r}, run_name='__main__')"


@pytest.mark.parametrize(
    ("patch", "names"),
    [
        ("sys.version_info = (3, 14, 0)", "3.14 3.10 3.13 container"),
        ("platform.system = lambda: 'Windows'", "Windows container"),
    ],
)
def test_what_cannot_work_gets_one_line_that_names_the_container(patch: str, names: str) -> None:
    script = f"sys.path.insert(0, {str(SCRIPTS)!r}); sys.argv = ['bootstrap']; {patch}"
    done = ran(sys.executable, "-c", PATCH.format(script, str(SCRIPTS / "bootstrap.py")))
    assert done.stdout == ""
    refusal(done.returncode, done.stderr, names)


@pytest.mark.skipif(MAKE is None, reason="no make here")
def test_a_shim_that_fails_is_skipped(with_uv: Project) -> None:
    shutil.copy(ROOT / "Makefile", with_uv.root)
    tools = with_uv.tools
    program(tools / "python3", "#!/bin/sh\necho 'pyenv: not here' >&2\nexit 127\n")
    (tools / f"python3.{sys.version_info[1]}").symlink_to(BASE)
    env = {**with_uv.env, "PATH": f"{tools}:/bin"}  # which has sh
    words = ["--no-print-directory", "venv", "STACK=tiny", "GROUPS=test"]
    first, second = (ran(MAKE, *words, cwd=with_uv.root, env=env) for _ in range(2))
    assert first.returncode == 0 and "pyenv" not in first.stdout + first.stderr, first.stderr
    assert with_uv.version("apple") == "1.0"
    assert second.stdout + second.stderr == ""
