"""P2, one command: `make up`, `make down` and make itself start what was asked, or say in a line why not."""

import ast
import contextlib
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.helpers.engine_box import LISTED, Machine
from tests.helpers.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
MAKE = shutil.which("make")


@pytest.fixture
def ports(machine: Machine) -> dict[str, str]:
    """Ports that are free; the machine's variables name them."""
    port = free_port()  # the first of four
    free = {"JUPYTER_PORT": str(port), "TENSORBOARD_PORT": str(port + 1)}
    machine.env |= free
    return free


@pytest.mark.usefixtures("ports")
def test_up_says_whether_it_takes_the_gpu_file(machine: Machine) -> None:
    port = machine.env["JUPYTER_PORT"]
    said = f"  http://127.0.0.1:{port}/lab?token=abc\n      http://127.0.0.1:8888/lab?token=abc\n"
    machine.engine(**{"compose logs": (0, said, "")})
    out, _ = machine.run("up")
    assert "without scripts/compose/gpu.yml" in out
    started = "compose -f docker-compose.yml up --detach --wait --no-build"
    assert started.split() in machine.asked()
    assert f"JupyterLab   http://127.0.0.1:{port}/lab?token=abc\n" in out
    machine.engine(**{"run --rm --pull=never": (0, LISTED, "")})
    out, _ = machine.run("up")
    assert "with scripts/compose/gpu.yml: containers see 2 x NVIDIA" in out
    files = ["-f", "docker-compose.yml", "-f", "scripts/compose/gpu.yml"]
    assert ["compose", *files, "up"] in [words[:6] for words in machine.asked()]


@pytest.mark.usefixtures("ports")
def test_up_builds_what_is_missing_and_says_so(machine: Machine) -> None:
    machine.env["STACK"] = "torch2.6-cu124"
    machine.engine(image_inspect=(1, "", ""))
    out, _ = machine.run("up")
    for target in ("dev", "train"):
        assert f"image.py build --stack torch2.6-cu124 --target {target}" in out


@pytest.mark.usefixtures("ports")
def test_up_leaves_the_stack_to_compose_unless_it_is_given(machine: Machine) -> None:
    """.env may name it. What is given reaches Compose by its variables."""
    machine.engine()
    docker, seen = machine.tools / "docker", machine.tools / "variables"
    docker.write_text(docker.read_text().replace("\ncase ", f"\n/usr/bin/env >{seen}\ncase ", 1))
    for words, stack in (([], []), (["--stack", "torch2.6-cu124"], ["STACK=torch2.6-cu124"])):
        machine.run("up", *words, "--image", "there/x:1")
        given = seen.read_text().splitlines()
        assert "TRAINER_DEV_IMAGE=there/x:1" in given
        assert [line for line in given if line.startswith("STACK=")] == stack


PROJECT = "trainer-[0-9a-f]{10}"


def project_of(machine: Machine) -> str:
    """The last name that .env gives to the Compose project."""
    found = re.findall(r"(?m)^COMPOSE_PROJECT_NAME=(.*)$", (machine.root / ".env").read_text())
    return str(found[-1])


@pytest.mark.usefixtures("ports")
@pytest.mark.parametrize("before", ["", "A=1\n\n# COMPOSE_PROJECT_NAME=x\n"])
def test_up_names_the_compose_project_once(machine: Machine, before: str) -> None:
    machine.engine()
    if before:
        (machine.root / ".env").write_text(before)
    machine.run("up")
    written = (machine.root / ".env").read_text()
    assert written.startswith(before) and re.fullmatch(PROJECT, project_of(machine))
    machine.run("up")
    assert (machine.root / ".env").read_text() == written


@pytest.mark.usefixtures("ports")
def test_up_leaves_a_chosen_project_name(machine: Machine) -> None:
    machine.engine()
    text = " export COMPOSE_PROJECT_NAME = 'mine' # ours\nA=1\n"
    (machine.root / ".env").write_text(text)
    machine.run("up")
    assert (machine.root / ".env").read_text() == text
    (machine.root / ".env").unlink()
    machine.run("up", COMPOSE_PROJECT_NAME="mine")
    assert not (machine.root / ".env").exists()


@pytest.mark.usefixtures("ports")
def test_up_keeps_the_project_that_runs_and_writes_through_no_link(machine: Machine) -> None:
    """With another name it would start a second JupyterLab; a linked .env belongs to other checkouts, too."""
    machine.engine(**{"ps --filter": (0, "trainer-older\ntrainer-older\n", "")})
    out, _ = machine.run("up")
    assert "trainer-older" in out and not (machine.root / ".env").exists()
    machine.engine()
    shared = machine.tools / "shared.env"
    shared.write_text("A=1\n")
    (machine.root / ".env").symlink_to(shared)
    out, _ = machine.run("up")
    assert "COMPOSE_PROJECT_NAME" in out and shared.read_text() == "A=1\n"


def test_up_and_a_port_that_is_taken(machine: Machine, ports: dict[str, str]) -> None:
    machine.engine()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(ports["JUPYTER_PORT"])))
        taken.listen()
        assert f"port {ports['JUPYTER_PORT']} of 127.0.0.1 is taken" in machine.refused("up")
        machine.engine(**{"compose -f docker-compose.yml ps": (0, "jupyter\n", "")})
        out, _ = machine.run("up")  # taken by itself
        assert "what runs already stays as it is (jupyter)" in out
        assert ["--no-recreate"] in [words[-1:] for words in machine.asked()]


@pytest.mark.usefixtures("ports")
@pytest.mark.parametrize("name", ["COMPOSE_ENV_FILES"])
def test_up_writes_no_env_that_compose_does_not_read(machine: Machine, name: str) -> None:
    machine.engine()
    machine.env[name] = "1"
    out, _ = machine.run("up")
    assert name in out and "COMPOSE_PROJECT_NAME=trainer-" in out
    assert not (machine.root / ".env").exists()


NEEDS_MAKE = pytest.mark.skipif(MAKE is None, reason="no make here")


def make(
    machine: Machine, *words: str, code: int = 0, env: Mapping[str, str] | None = None
) -> tuple[str, str]:
    assert MAKE
    shutil.copy(ROOT / "Makefile", machine.root)
    for name in ("awk", "grep"):
        with contextlib.suppress(FileExistsError):
            (machine.tools / name).symlink_to(str(shutil.which(name)))
    more = {**machine.env, **(env or {})}
    done = subprocess.run(
        [MAKE, *words], cwd=machine.root, env=more, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


@NEEDS_MAKE
def test_make_passes_everything_on(machine: Machine) -> None:
    machine.engine()
    (machine.tools / "python3").symlink_to(sys.executable)
    given = ("RECIPE=gpt-char", "GPUS=0,1", "OUT=my runs/a", "RESUME=1", "ARGS=--set 'a=[1, 2]'")
    out, _ = make(machine, "train", *given, "STACK=x", code=2)  # as the stand-in's code isn't 0
    assert "bootstrap.py --stack x --venv .venv --groups train\n" in out
    assert "in .venv: train gpt-char --gpus 0,1 --out my runs/a --resume auto --set a=[1, 2]\n" in out
    for word in ("RUNTIME=container", "DATA=/data", "IMAGE=there/x:1"):  # not passed over
        assert "docker compose run" in make(machine, "train", word, code=2)[1]
    make(machine, "shell", "IMAGE=there/x:1", "ARGS=id")
    assert machine.asked()[-1][-2:] == ["jupyter", "id"]


@NEEDS_MAKE
def test_make_reads_no_env(machine: Machine) -> None:
    """Its command line, then its environment, where an empty value is none, as in Compose's file."""

    def stack(*words: str, **env: str) -> tuple[str, bool]:
        out, err = make(machine, "help", "image", "--dry-run", *words, env=env)
        return re.findall(r"image.py build --stack (\S+)", out)[0], ".env: make takes STACK" in err

    assert stack() == ("torch2.9-cu128", False)
    (machine.root / ".env").write_text("STACK=torch2.6-cu124\n")
    assert stack() == stack(STACK="") == stack("STACK=", STACK="") == ("torch2.9-cu128", True)
    assert stack(STACK="torch2.14-cu130") == ("torch2.14-cu130", False)
    assert stack("STACK=torch2.6-cu124", STACK="torch2.14-cu130") == ("torch2.6-cu124", False)


def test_a_shell_is_composes_with_the_gpus_and_data(machine: Machine, tmp_path: Path) -> None:
    machine.engine(**{"run --rm --pull=never": (0, LISTED, "")})
    machine.run("shell", "--data", str(tmp_path), "--", "python", "-V")
    files = ["-f", "docker-compose.yml", "-f", "scripts/compose/gpu.yml"]
    mount = ["--volume", f"{tmp_path}:{tmp_path}:ro"]
    assert machine.asked()[-1] == ["compose", *files, "run", "--rm", *mount, "jupyter", "python", "-V"]
    assert "/nope" in machine.refused("shell", "--data", "/nope")


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"version": (1, "", "\nCannot connect to the Docker daemon.")}, "Docker daemon"),
        ({"compose version": (1, "", "")}, "docker-compose"),
    ],
)
def test_without_an_engine_or_compose(
    machine: Machine, answers: dict[str, tuple[int, str, str]], said: str
) -> None:
    machine.engine(**answers)
    assert said in machine.refused("up")


def test_down_ends_what_compose_left(machine: Machine) -> None:
    """Containers of clients that were killed, which `docker compose down` leaves; and an older project's."""
    asked = {
        "ps --quiet": (0, "aa\nbb\n", ""),
        "ps --all --filter": (0, "old\nold\n", ""),
    }
    machine.engine(**asked)
    out, _ = machine.run("down", "--", "--volumes")
    said = machine.asked()
    here = f"label=com.docker.compose.project.working_dir={machine.root}"
    assert ["ps", "--quiet", "--filter", here, "--filter", "label=com.docker.compose.oneoff=True"] in said
    stop = ["stop", "--time", "40", "aa", "bb"]
    own = ["compose", "--profile", "train", "--profile", "ssh", "down", "--volumes"]
    assert said.index(stop) < said.index(own)
    older = ["--project-name", "old", "--profile", "train", "--profile", "ssh", "down", "--remove-orphans"]
    assert ["compose", *older] in said
    assert "docker stop --time 40 aa bb\n" in out
    machine.engine()
    out, _ = machine.run("down")
    assert "stop" not in out


def test_an_old_python_can_read_the_scripts() -> None:
    for name in (
        "scripts/runtime.py",
        "scripts/engine_checks.py",
        "scripts/locks.py",
        "trainer/__init__.py",
        "trainer/version.py",
        "trainer/errors.py",
        "trainer/host/__init__.py",
        "trainer/host/stacks.py",
        "trainer/config/suggest.py",
    ):
        ast.parse((ROOT / name).read_text(), feature_version=(3, 9))
