"""P2, P8: whichever way one enters a container, trainer, python and pip are there, and files are the owner's.

The checkout belongs to somebody else than root and the image's user, who alone may look into it (mode 0700).
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.container.kernel import TERMINAL
from tests.container.project import OWNER, Project, started_project
from tests.container.run import ask, engine, running, wait_for
from tests.helpers.packages import wheel
from tests.helpers.ports import free_port
from tests.helpers.programs import ran

pytestmark = [pytest.mark.container, pytest.mark.xdist_group("ways-in")]

SHARE = 5000
FOUND = "/opt/trainer/bin/trainer\n/opt/env/bin/python\n/opt/env/bin/pip\n"
LOOK = "for name in trainer python pip; do command -v $name; done"
WHO = "import os, trainer; print(os.getuid(), trainer.__file__)"
ASK = f"{LOOK}; python -c '{WHO}'"
NO_TTY = (r"bash: (cannot set terminal|no job control)", ".*Inappropriate ioctl.*")
NO_TTY_LINE = re.compile("|".join(NO_TTY))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, dev_image: str, train_image: str) -> Iterator[Project]:
    """With JupyterLab, and a group of whose files one may read."""
    del dev_image, train_image
    with started_project(tmp_path_factory.mktemp("ways in") / "check out", mode=0o700) as started:
        started.env["SHARE_GID"] = str(SHARE)
        started.compose("up", "--detach", "--wait", "--no-build", "jupyter")
        yield started


def token(project: Project) -> str:
    found = re.findall(r"token=([0-9a-f]{48})", project.compose("logs", "--no-log-prefix", "jupyter"))
    return str(found[-1])


def test_exec_finds_everything_and_is_the_owner(project: Project) -> None:
    """Without a user, as everybody types it, which is root without rights; and with the one of the page."""
    wanted = f"{FOUND}{OWNER} /workspace/trainer/__init__.py\n"
    for user in ([], ["--user", "trainer"]):
        for shell in (["bash", "-lc"], ["sh", "-c"]):
            assert project.compose("exec", "-T", *user, "jupyter", *shell, ASK) == wanted
        said = project.compose("exec", "-T", *user, "jupyter", "bash", "-ic", ASK, expected=NO_TTY)
        # stderr comes by a stream of its own: bash's two lines about the terminal may stand between others.
        assert [line for line in said.splitlines() if not NO_TTY_LINE.match(line)] == wanted.splitlines()
    # An interactive shell is the owner's altogether, as what is typed there need not be Python.
    typed = ("docker", "compose", "exec", "-T", "jupyter", "bash", "-i")
    given = {"input": "id -u; touch typed\n", "cwd": project.root, "env": project.env}
    done = ran(*typed, code=0, **given)
    assert done.stdout == f"{OWNER}\n" and (project.root / "typed").stat().st_uid == OWNER


def test_a_terminal_of_jupyterlab_finds_everything(project: Project) -> None:
    """Made and typed into through JupyterLab's own API."""
    words = ("exec", "-T", "jupyter", "python", "-c", TERMINAL, token(project), f"echo $0; {ASK}")
    said = project.compose(*words).replace("\r", "")
    assert f"/bin/bash\n{FOUND}{OWNER} /workspace/trainer/__init__.py\n" in said


def test_what_is_typed_by_exec_belongs_to_the_owner(project: Project) -> None:
    wheel(project.root, "extra", "1.0")
    exec_ = ("exec", "-T", "jupyter")
    run = ("digits", "--set", "max_steps=2", "--set", "parallel.threads=1", "--out", "runs/typed")
    project.compose(*exec_, "trainer", "train", *run)
    project.compose(*exec_, "pip", "install", "--no-index", "--find-links", "/workspace", "extra")
    assert project.compose(*exec_, "python", "-c", "import extra; print(extra.version)") == "1.0\n"
    project.compose(*exec_, "pip", "uninstall", "--yes", "extra")
    none = ("Traceback", "ModuleNotFoundError")
    project.compose(*exec_, "python", "-c", "import extra", code=1, expected=none)
    (project.root / "extra-1.0-py3-none-any.whl").unlink()  # it is root's
    assert project.strangers() == []


def test_a_group_of_the_host_reads_a_share(project: Project, tmp_path: Path) -> None:
    share = tmp_path / "share"
    share.mkdir()
    (share / "images").touch()
    os.chown(share, 0, SHARE)
    share.chmod(0o2770)
    mount = ("--volume", f"{share}:/share")
    said = project.compose("run", "--rm", "-T", *mount, "jupyter", "sh", "-c", "id -G; ls /share")
    assert said == f"{OWNER} {SHARE}\nimages\n"
    groups = "import os; print(os.getgroups())"
    assert project.compose("exec", "-T", "jupyter", "python", "-c", groups) == f"[{SHARE}]\n"


def test_without_the_entrypoint_a_login_shell_finds_everything(train_image: str) -> None:
    """As Pyxis starts `srun bash -l`; `su -` begins with an empty environment."""
    wanted = FOUND + "1000 /opt/trainer/trainer/__init__.py\n"
    for shell in ("bash", "sh"):
        assert engine("run", "--rm", "--entrypoint", shell, train_image, "-lc", ASK) == wanted
    more = f"{ASK}; echo $LANG $XDG_CACHE_HOME $PYTHONNOUSERSITE"
    said = engine("run", "--rm", "--user=0", train_image, "su", "-", "trainer", "-c", more)
    assert said == wanted + "C.UTF-8 /cache 1\n"
    other = ("--user=1000680000:0", "--env", "HOME=/tmp")
    assert engine("run", "--rm", *other, train_image, "bash", "-lc", LOOK) == FOUND


# Compose keeps [a-z0-9_-] of a project's name, so each pair is one project by its path.
PAIRS = [("trainer-0.1.0", "trainer-0.10"), ("my proj", "myproj"), ("日本", "中国")]


def test_each_checkout_is_a_project_of_its_own(project: Project, tmp_path: Path) -> None:
    """`make up` names it; then plain `docker compose` words meet it, from any folder and without PWD."""
    env = {key: value for key, value in project.env.items() if key not in ("COMPOSE_PROJECT_NAME", "PWD")}
    names, volumes = set(), set()
    folders = [tmp_path / path for pair in PAIRS for path in (*pair, f"elsewhere/{pair[0]}")]
    for folder in folders:
        (folder / "scripts").mkdir(parents=True)
        for name in ("docker-compose.yml", "scripts/runtime.py", "scripts/engine_checks.py"):
            shutil.copy(project.root / name, folder / name)
        named = [sys.executable, "-c", "import runtime; runtime.name_project()"]
        where = {"PYTHONPATH": str(project.root)}
        subprocess.run(named, cwd=folder / "scripts", env={**env, **where}, check=True)
        file = str(folder / "docker-compose.yml")
        said = json.loads(engine("compose", "-f", file, "config", "--format", "json", cwd=tmp_path, env=env))
        names.add(said["name"])
        volumes.add(said["volumes"]["cache"]["name"])
    assert len(names) == len(volumes) == len(folders)


def test_a_container_that_its_client_left_is_stopped_by_down(project: Project) -> None:
    """A client that is killed (CI, timeout) leaves it, and so does `docker compose down`."""
    long = ("digits", "--set", "epochs=100000", "--set", "parallel.threads=1", "--set", "log.every=20")
    words = ["docker", "compose", "run", "--rm", "-T", "train", *long, "--out", "runs/left"]
    here = f"label=com.docker.compose.project.working_dir={project.root}"
    metrics = project.root / "runs/left/metrics.jsonl"
    silent: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(words, cwd=project.root, env=project.env, **silent) as client:
        wait_for(lambda: metrics.exists() and '"step": 40' in metrics.read_text(), "training")
        client.terminate()
    one_off = "label=com.docker.compose.oneoff=True"
    assert engine("ps", "--quiet", "--filter", here, "--filter", one_off)
    assert "runtime: what docker compose run left" in project.script("down")
    assert engine("ps", "--all", "--quiet", "--filter", here) == ""
    assert list((project.root / "runs/left/checkpoints").glob("*/SHA256SUMS"))
    assert project.strangers() == []
    project.compose("up", "--detach", "--wait", "--no-build", "jupyter")


def test_jupyterlab_and_tensorboard_behind_a_proxy(dev_image: str, tmp_path: Path) -> None:
    """Under a path of its own, as a proxy, Open OnDemand or Kubeflow asks for it; each run is shown once."""
    lab, board = free_port(), free_port()
    name = f"trainer-test-{lab}"
    (tmp_path / "runs/one/tensorboard").mkdir(parents=True)
    (tmp_path / "runs/latest").symlink_to("one")
    write = "from torch.utils.tensorboard import SummaryWriter as W; w = W('runs/one/tensorboard')"
    mount = ("--volume", f"{tmp_path}:/workspace", "--user", f"{os.getuid()}:{os.getgid()}")
    engine("run", "--rm", *mount, dev_image, "python", "-c", f"{write}; w.add_scalar('a', 1, 1); w.close()")
    ports = ("--publish", f"127.0.0.1:{lab}:9999", "--env", f"JUPYTER_PORT={lab}")
    lab_words = ("jupyter", "--ServerApp.base_url=/x/y/", "--port=9999")
    words = ("tensorboard", "--path_prefix=/tb", "--reload_interval=1")
    port = ("--publish", f"127.0.0.1:{board}:6006")
    labs, boards = (name, *ports, dev_image, *lab_words), (f"{name}-b", *mount, *port, dev_image, *words)
    with running(*labs), running(*boards):
        wait_for(lambda: ask(lab, "/x/y/api").code == 200, "JupyterLab under a path")
        line = rf"http://127\.0\.0\.1:{lab}/x/y/lab\?token=([0-9a-f]{{48}})"
        (secret,) = set(re.findall(line, engine("logs", name)))
        assert ask(lab, "/x/y/api/contents").code == 403
        assert ask(lab, f"/x/y/api/contents?token={secret}").code == 200
        wait_for(lambda: b"tensorboard" in ask(board, "/tb/data/runs").body, "TensorBoard under a path")
        assert json.loads(ask(board, "/tb/data/runs").body) == ["one/tensorboard"]
