"""P2, P9: Compose and plain Docker train, show and stop; files are the caller's; nothing is open without key.

The checkout is a copy that belongs to uid 12345, so that "the caller" isn't the image's user nor root.
"""

import json
import os
import re
import socket
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.kernel import KERNEL
from tests.container.project import OWNER, Project, started_project
from tests.container.run import ask, check_log, engine, running, wait_for
from tests.helpers.packages import wheel

# One project for all, so one process.
pytestmark = [pytest.mark.container, pytest.mark.xdist_group("compose")]

ONE_THREAD = ("--set", "parallel.threads=1")
QUICK = ("digits", *ONE_THREAD, "--set", "max_steps=20")
STOPPED = "the same command resumes from there"
LONG = ("digits", *ONE_THREAD, "--set=epochs=100000", "--set=log.every=20", "--set=evaluation.every=1 epoch")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, dev_image: str, train_image: str) -> Iterator[Project]:
    """Started as `make up` does."""
    del dev_image, train_image
    with started_project(tmp_path_factory.mktemp("compose") / "checkout") as started:
        started.env["SAID"] = started.script("up")
        yield started


def token(project: Project) -> str:
    line = r"JupyterLab   http://127\.0\.0\.1:(\d+)/lab\?token=([0-9a-f]{48})$"
    found = re.search(line, project.env["SAID"], re.M)
    assert found, project.env["SAID"]
    assert found[1] == project.env["JUPYTER_PORT"]
    return found[2]


def test_up_says_what_it_does_and_nothing_warns(project: Project) -> None:
    assert "runtime: without scripts/compose/gpu.yml, on the CPU: " in project.env["SAID"]
    assert "docker compose -f docker-compose.yml up --detach" in project.env["SAID"]
    # The tests that follow ask without a token, which JupyterLab notes.
    check_log(project.compose("logs", "--no-log-prefix", expected=(r"\[W .* 403 GET",)), r"\[W .* 403 GET")


def test_jupyterlab_wants_the_token(project: Project, dev_image: str) -> None:
    port, secret = project.env["JUPYTER_PORT"], token(project)
    for given in ("", "?token=", "?token=0123"):
        assert ask(port, f"/api/contents{given}").code == 403
    told = ask(port, f"/api/contents?token={secret}")
    assert "docker-compose.yml" in {entry["name"] for entry in json.loads(told.body)["content"]}
    assert ask(port, f"/lab?token={secret}").code == 200
    assert "TOKEN" not in engine("image", "inspect", "--format", "{{.Config.Env}}", dev_image)


def test_a_kernel_sees_a_package_that_it_has_installed(project: Project) -> None:
    """At once, also where nothing was installed before; and a new process does."""
    wheel(project.root, "fresh", "1.0", "torch")
    code = """
        %pip install --quiet --no-index --find-links /workspace fresh
        import fresh, torch
        print(fresh.version, torch.__file__)
    """
    words = ("exec", "-T", "jupyter", "python", "-c", KERNEL, token(project), textwrap.dedent(code))
    said = project.compose(*words)
    assert re.search(r"^1\.0 /opt/env/lib/", said, re.M), said
    asked = ("exec", "-T", "--user", f"{OWNER}:{OWNER}", "tensorboard", "python", "-c", "import fresh")
    project.compose(*asked)
    (project.root / "fresh-1.0-py3-none-any.whl").unlink()  # it is root's
    assert project.strangers() == []


def test_a_notebook_runs_in_the_image(project: Project) -> None:
    words = ("jupyter", "execute", "notebooks/04-your-own-task.ipynb")
    noted = (r"\[NbClientApp\].*", r".*WARNING.*without encryption.*")
    # As the server does, and not as root, which exec would be here.
    owner = ("--user", f"{OWNER}:{OWNER}")
    project.compose("exec", "-T", *owner, "jupyter", *words, expected=noted)
    assert project.strangers() == []


def test_tensorboard_shows_a_run(project: Project) -> None:
    said = project.compose("run", "--rm", "-T", "train", *QUICK, "--out", "runs/shown")
    assert "accuracy" in said
    port = project.env["TENSORBOARD_PORT"]
    wait_for(lambda: b'"shown/tensorboard"' in ask(port, "/data/runs").body, "the run in TensorBoard")
    assert (project.root / "runs/latest").is_symlink()
    assert "latest/tensorboard" not in json.loads(ask(port, "/data/runs").body)
    assert project.strangers() == []


def test_stop_ends_with_a_checkpoint(project: Project) -> None:
    override = project.root / "long.yml"
    override.write_text(f"services: {{train: {{command: {json.dumps([*LONG, '--out', 'runs/stopped'])}}}}}\n")
    os.chown(override, OWNER, OWNER)
    files = ("-f", "docker-compose.yml", "-f", "long.yml", "--profile", "train")
    try:
        project.compose(*files, "up", "--detach", "--no-build", "train")
        container = project.container("train")
        metrics = project.root / "runs/stopped/metrics.jsonl"
        wait_for(lambda: metrics.exists() and '"step": 40' in metrics.read_text(), "training")
        project.compose(*files, "stop", "train")
        # By itself, not killed after the grace period.
        assert engine("inspect", "--format", "{{.State.ExitCode}}", container).strip() == "75"
        assert STOPPED in engine("logs", container)
        assert list((project.root / "runs/stopped/checkpoints").glob("*/SHA256SUMS"))
        # The same command goes on.
        project.compose(*files, "up", "--detach", "--no-build", "train")
        wait_for(lambda: "resumes after step" in engine("logs", container), "going on")
    finally:
        project.compose(*files, "kill", "train")
    assert project.strangers() == []


def test_make_shell_trains_as_the_owner(project: Project) -> None:
    project.script("shell", "--", "trainer", "train", *QUICK, "--out", "runs/made")
    assert (project.root / "runs/made/model.safetensors").exists()
    assert project.strangers() == []


def test_a_checkout_of_roots(tmp_path: Path, dev_image: str) -> None:
    """Others' are in test_ways_in.py."""
    del dev_image
    with started_project(tmp_path / "checkout", owner=0, mode=0o755) as project:
        asked = "id -u; touch made; grep CapEff /proc/self/status"
        said = project.compose("run", "--rm", "-T", "jupyter", "sh", "-c", asked)
        assert said.splitlines()[0] == "0"
        # Root keeps the three capabilities that it was given: KILL, SETGID, SETUID.
        assert int(said.split()[-1], 16) == 0b11100000
        assert (project.root / "made").stat().st_uid == 0
        assert project.strangers() == []


def test_ssh_lets_a_key_in_and_nothing_else(project: Project) -> None:
    make_keys = "for k in right wrong; do ssh-keygen -q -t ed25519 -N '' -f /workspace/$k; done"
    project.compose("run", "--rm", "-T", "jupyter", "sh", "-c", make_keys)
    key = (project.root / "right.pub").read_text()
    up = ("--profile", "ssh", "up", "--detach", "--wait", "--no-build", "ssh")
    project.compose(*up, env={"SSH_AUTHORIZED_KEYS": key})
    with socket.create_connection(("127.0.0.1", int(project.env["SSH_PORT"])), timeout=5) as server:
        assert server.recv(4) == b"SSH-"

    owner = ("exec", "-T", "--user", f"{OWNER}:{OWNER}")
    see_key = (*owner, "ssh", "cat", "/cache/ssh/host_ed25519.pub")

    def ssh(identity: str, command: str, code: int = 0) -> str:
        safe = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"]
        words: tuple[str, ...] = ("-p", "2222", "-i", f"/workspace/{identity}")
        words += tuple(f"-o{one}" for one in (*safe, "IdentitiesOnly=yes"))
        given = ("ssh", "ssh", *words, "trainer@127.0.0.1", command)
        return project.compose(*owner, *given, code=code, expected=("denied",))

    said = ssh("right", "id -u; touch by-ssh; python -c 'import torch, trainer; print(trainer.__file__)'")
    assert said.splitlines() == [str(OWNER), "/workspace/trainer/__init__.py"]
    assert ssh("right", "bash -lc 'command -v trainer'") == "/opt/trainer/bin/trainer\n"
    host_key = project.compose(*see_key)
    # From a file, in a new container: the host is the same.
    (project.root / "keys").write_text(key)
    project.compose(*up, env={"SSH_KEYS_FILE": str(project.root / "keys")})
    assert ssh("right", "id -u") == f"{OWNER}\n"
    assert "denied" in ssh("wrong", "id", code=255)
    assert host_key == project.compose(*see_key)
    (project.root / "keys").unlink()  # it is root's
    assert project.strangers() == []


def test_docker_trains_in_a_tight_box_and_stops_with_a_checkpoint(train_image: str, tmp_path: Path) -> None:
    """In a folder with a checkout, which isn't the trainer: every process takes the image's own.

    PYTHONPATH, which Compose and make set, isn't set here.
    """
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer/__init__.py").write_text("raise SystemExit('the checkout of the host')\n")
    tmp_path.chmod(0o755)
    name = f"trainer-test-{os.getpid()}"
    box = ("--cpus", "1.5", "--memory", "2g", "--shm-size", "64m", "--volume", f"{tmp_path}:/workspace:ro")
    trains = ("trainer", "train", *LONG, "--out", "/tmp/run")
    with running(name, *box, train_image, *trains):
        wait_for(lambda: "accuracy" in engine("logs", name), "training and an evaluation")
        engine("stop", "--time", "30", name)
        assert engine("inspect", "--format", "{{.State.ExitCode}}", name).strip() == "75"
        assert STOPPED in engine("logs", name)
        engine("cp", "--quiet", f"{name}:/tmp/run/checkpoints", tmp_path)
        assert list(tmp_path.glob("checkpoints/*/SHA256SUMS"))
