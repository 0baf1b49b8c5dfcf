"""P2, one command: `make up`, `make down` and make itself start what was asked, or say in a line why not."""

import ast
import re
import shutil
import socket
import sys
from pathlib import Path

import pytest

from tests.helpers.engine_box import LISTED, Machine
from tests.helpers.ports import free_port
from tests.helpers.programs import program, ran

ROOT = Path(__file__).resolve().parents[2]
MAKE = shutil.which("make")
COPIED = ("scripts/runtime.py", "scripts/engine_checks.py", "scripts/maintain.mk")
SEES_GPUS = {"run --rm --pull=never": (0, LISTED, "")}
WITH_GPUS = ["-f", "docker-compose.yml", "-f", "scripts/compose/gpu.yml"]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    root, tools = tmp_path / "project", tmp_path / "tools"
    tools.mkdir()
    for room in ("", "config", "host", "commands", "commands/doctor"):
        (root / "trainer" / room).mkdir(parents=True)
        shutil.copy(ROOT / "trainer" / room / "__init__.py", root / "trainer" / room)
    (root / "scripts").mkdir()
    files = ("errors.py", "version.py", "config/suggest.py", "host/environment.py", "host/stacks.py")
    for name in (*(f"trainer/{one}" for one in (*files, "host/stacks.json")), *COPIED):
        shutil.copy(ROOT / name, root / name)
    for name in ("bootstrap.py", "image.py"):
        (root / "scripts" / name).write_text(f"import sys; print('{name}', *sys.argv[1:], flush=True)\n")
    program(root / ".venv/bin/trainer", '#!/bin/sh\necho "in .venv:" "$@"\nexit 75\n')
    # Nothing else on PATH: this machine may have an engine or GPUs.
    port = free_port()  # the first of four
    ports = {"JUPYTER_PORT": str(port), "TENSORBOARD_PORT": str(port + 1)}
    made = Machine(root, tools, {"PATH": str(tools), "HOME": str(tmp_path), **ports})
    made.engine()
    return made


def test_up_says_whether_it_takes_the_gpu_file(machine: Machine) -> None:
    port = machine.env["JUPYTER_PORT"]
    said = f"  http://127.0.0.1:{port}/lab?token=abc\n      http://127.0.0.1:8888/lab?token=abc\n"
    machine.engine(**{"compose logs": (0, said, "")})
    out, _ = machine.run("up")
    assert "without scripts/compose/gpu.yml" in out
    started = "compose -f docker-compose.yml up --detach --wait --no-build"
    assert started.split() in machine.asked()
    assert f"JupyterLab   http://127.0.0.1:{port}/lab?token=abc\n" in out
    machine.engine(**SEES_GPUS)
    out, _ = machine.run("up")
    assert "with scripts/compose/gpu.yml: containers see 2 x NVIDIA" in out
    assert ["compose", *WITH_GPUS, "up"] in [words[:6] for words in machine.asked()]


def test_up_builds_what_is_missing_and_says_so(machine: Machine) -> None:
    machine.env["STACK"] = "torch2.6-cu124"
    machine.engine(image_inspect=(1, "", ""))
    out, _ = machine.run("up")
    for target in ("dev", "train"):
        assert f"image.py build --stack torch2.6-cu124 --target {target}" in out


def test_up_leaves_the_stack_to_compose_unless_it_is_given(machine: Machine) -> None:
    """.env may name it. What is given reaches Compose by its variables."""
    docker, seen = machine.tools / "docker", machine.tools / "variables"
    docker.write_text(docker.read_text().replace("\ncase ", f"\n/usr/bin/env >{seen}\ncase ", 1))
    for words, stack in (([], []), (["--stack", "torch2.6-cu124"], ["STACK=torch2.6-cu124"])):
        machine.run("up", *words, "--image", "there/x:1")
        given = seen.read_text().splitlines()
        assert "TRAINER_DEV_IMAGE=there/x:1" in given
        assert [line for line in given if line.startswith("STACK=")] == stack


def test_up_names_the_compose_project_once(machine: Machine) -> None:
    env, before = machine.root / ".env", "A=1\n\n# COMPOSE_PROJECT_NAME=x\n"
    env.write_text(before)
    machine.run("up")
    written = env.read_text()
    assert re.fullmatch(re.escape(before) + r"(.*\n)*COMPOSE_PROJECT_NAME=trainer-[0-9a-f]{10}\n", written)
    machine.run("up")
    assert env.read_text() == written


def test_up_leaves_a_chosen_project_name(machine: Machine) -> None:
    env, text = machine.root / ".env", " export COMPOSE_PROJECT_NAME = 'mine' # ours\nA=1\n"
    env.write_text(text)
    machine.run("up")
    assert env.read_text() == text
    env.unlink()
    machine.run("up", COMPOSE_PROJECT_NAME="mine")
    assert not env.exists()


def test_up_keeps_the_project_that_runs_and_writes_through_no_link(machine: Machine) -> None:
    """With another name it would start a second JupyterLab; a linked .env belongs to other checkouts, too."""
    env, shared = machine.root / ".env", machine.tools / "shared.env"
    machine.engine(**{"ps --filter": (0, "trainer-older\ntrainer-older\n", "")})
    assert "trainer-older" in machine.run("up")[0] and not env.exists()
    machine.engine()
    shared.write_text("A=1\n")
    env.symlink_to(shared)
    assert "COMPOSE_PROJECT_NAME" in machine.run("up")[0] and shared.read_text() == "A=1\n"


def test_up_and_a_port_that_is_taken(machine: Machine) -> None:
    port = machine.env["JUPYTER_PORT"]
    with socket.create_server(("127.0.0.1", int(port))):
        assert f"port {port} of 127.0.0.1 is taken" in machine.refused("up")
        machine.engine(**{"compose -f docker-compose.yml ps": (0, "jupyter\n", "")})
        out, _ = machine.run("up")  # taken by itself
        assert "(jupyter)" in out
        assert ["--no-recreate"] in [words[-1:] for words in machine.asked()]


def test_up_writes_no_env_that_compose_does_not_read(machine: Machine) -> None:
    out, _ = machine.run("up", COMPOSE_ENV_FILES="1")
    assert "COMPOSE_ENV_FILES" in out and "COMPOSE_PROJECT_NAME=trainer-" in out
    assert not (machine.root / ".env").exists()


def make(machine: Machine, *words: str, code: int = 0, **env: str) -> tuple[str, str]:
    if MAKE is None:
        pytest.skip("no make here")
    shutil.copy(ROOT / "Makefile", machine.root)
    for name in ("awk", "grep"):
        if not (machine.tools / name).exists():
            (machine.tools / name).symlink_to(str(shutil.which(name)))
    done = ran(MAKE, *words, code=code, cwd=machine.root, env={**machine.env, **env})
    return done.stdout, done.stderr


def test_make_passes_everything_on(machine: Machine) -> None:
    (machine.tools / "python3").symlink_to(sys.executable)
    given = ("RECIPE=gpt-char", "GPUS=0,1", "OUT=my runs/a", "RESUME=1", "ARGS=--set 'a=[1, 2]'")
    out, _ = make(machine, "train", *given, "STACK=x", code=2)  # as the stand-in's code isn't 0
    assert "bootstrap.py --stack x --venv .venv --groups train\n" in out
    assert "in .venv: train gpt-char --gpus 0,1 --out my runs/a --resume auto --set a=[1, 2]\n" in out
    for word in ("RUNTIME=container", "DATA=/data", "IMAGE=there/x:1"):  # not passed over
        assert "docker compose run" in make(machine, "train", word, code=2)[1]
    make(machine, "shell", "IMAGE=there/x:1", "ARGS=id")
    assert machine.asked()[-1][-2:] == ["jupyter", "id"]


def test_make_reads_no_env(machine: Machine) -> None:
    """Its command line, then its environment, where an empty value is none, as in Compose's file."""

    def stack(*words: str, **env: str) -> tuple[str, bool]:
        out, err = make(machine, "help", "image", "--dry-run", *words, code=0, **env)
        return re.findall(r"image.py build --stack (\S+)", out)[0], ".env: make takes STACK" in err

    assert stack() == ("torch2.9-cu128", False)
    (machine.root / ".env").write_text("STACK=torch2.6-cu124\n")
    assert stack() == stack(STACK="") == stack("STACK=", STACK="") == ("torch2.9-cu128", True)
    assert stack(STACK="torch2.14-cu130") == ("torch2.14-cu130", False)
    assert stack("STACK=torch2.6-cu124", STACK="torch2.14-cu130") == ("torch2.6-cu124", False)


def test_a_shell_is_composes_with_the_gpus_and_data(machine: Machine, tmp_path: Path) -> None:
    machine.engine(**SEES_GPUS)
    machine.run("shell", "--data", str(tmp_path), "--", "python", "-V")
    mount = ["--volume", f"{tmp_path}:{tmp_path}:ro"]
    assert machine.asked()[-1] == ["compose", *WITH_GPUS, "run", "--rm", *mount, "jupyter", "python", "-V"]
    assert "/nope" in machine.refused("shell", "--data", "/nope")


def test_without_an_engine_or_compose(machine: Machine) -> None:
    machine.engine(version=(1, "", "\nCannot connect to the Docker daemon."))
    assert "Docker daemon" in machine.refused("up")
    machine.engine(compose_version=(1, "", ""))
    assert "docker-compose" in machine.refused("up")


def test_down_ends_what_compose_left(machine: Machine) -> None:
    """Containers of clients that were killed, which `docker compose down` leaves; and an older project's."""
    machine.engine(**{"ps --quiet": (0, "aa\nbb\n", ""), "ps --all --filter": (0, "old\nold\n", "")})
    out, _ = machine.run("down", "--", "--volumes")
    said = machine.asked()
    here = f"label=com.docker.compose.project.working_dir={machine.root}"
    assert ["ps", "--quiet", "--filter", here, "--filter", "label=com.docker.compose.oneoff=True"] in said
    stop, profiles = "stop --time 40 aa bb", "--profile train --profile ssh"
    assert said.index(stop.split()) < said.index(f"compose {profiles} down --volumes".split())
    assert f"compose --project-name old {profiles} down --remove-orphans".split() in said
    assert f"docker {stop}\n" in out
    machine.engine()
    assert "stop" not in machine.run("down")[0]


def test_an_old_python_can_read_the_scripts() -> None:
    """With which `make up` and `make venv` are run."""
    names = ["__init__", "version", "errors", "host/__init__", "host/stacks", "config/suggest"]
    for name in (
        "scripts/runtime",
        "scripts/engine_checks",
        "scripts/locks",
        *(f"trainer/{one}" for one in names),
    ):
        ast.parse((ROOT / f"{name}.py").read_text(), feature_version=(3, 9))
    ast.parse((ROOT / "scripts/bootstrap.py").read_text(), feature_version=(3, 6))
