"""P2, one command: container or .venv is chosen by what is there, and whatever is missing gets one line.

The engine and nvidia-smi are small programs: they answer what a test tells them, and note the question.
"""

import ast
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any

import pytest
from engine_checks import check_driver, check_ports, check_stack
from runtime import Facts, decide, docker_words, gpu_words, outside

from tests.helpers.ports import free_port
from trainer.errors import BadInputError
from trainer.host.gpus import Gpu, parse_gpus, visible_gpus

ROOT = Path(__file__).resolve().parents[2]
MAKE = shutil.which("make")
GPUS = [Gpu(str(n), "NVIDIA H100", f"GPU-{n}{n}-a") for n in range(4)]
TWO = frozenset({"GPU-0", "GPU-1"})
LISTED = "".join(f"GPU {n}: NVIDIA H100 (UUID: GPU-{n})\n" for n in range(2))
NO_RUNTIME = (
    'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].'
)

# In sh, which starts ten times as fast as Python: 037 ends a word in the log, 036 all of them.
FAKE = r"""#!/bin/sh
{{ printf '%s\037' "$@"; printf '\036'; }} >>{log}
case "$*" in
{answers}
esac
echo "{name}: not in this test: $*" >&2
exit 1
"""


@dataclass
class Machine:
    """A project with the scripts, and a PATH with an engine and nvidia-smi that answer what they are told."""

    root: Path
    tools: Path
    env: dict[str, str] = field(default_factory=dict)

    def fake(self, name: str, answers: dict[str, tuple[int, str, str]]) -> None:
        """Puts a program on PATH; the first answer whose words begin the request counts."""
        program = self.tools / name
        cases = "\n".join(
            f"{quote(start)}*) printf %s {quote(out)}; printf %s {quote(err)} >&2; exit {code} ;;"
            for start, (code, out, err) in answers.items()
        )
        log = quote(str(self.tools / f"{name}.log"))
        program.write_text(FAKE.format(log=log, answers=cases, name=name))
        program.chmod(0o755)

    def engine(self, **changes: tuple[int, str, str]) -> None:
        """An engine with every image, without GPUs; other answers by the words that a request begins with."""
        answers = {
            "version": (0, "26.1\n", ""),
            "buildx version": (0, "v0.13\n", ""),
            "compose version": (0, "2.26\n", ""),
            "image inspect": (0, "sha256:11aa", ""),
            "info": (0, '["name=seccomp"]\n', ""),
            "run --rm --pull=never": (125, "", NO_RUNTIME),
            "run": (0, "trained\n", ""),
            "compose -f docker-compose.yml ps": (0, "", ""),
            "compose logs": (0, "", ""),
            "compose": (0, "", ""),
        }
        given = {key.replace("_", " ").strip(): value for key, value in changes.items()}
        self.fake("docker", {**given, **{key: value for key, value in answers.items() if key not in given}})

    def gpus(self, driver: str = "575.51", capability: str = "9.0") -> None:
        """Two GPUs on the host."""
        rows = f"{driver}, {capability}\n" * 2
        self.fake("nvidia-smi", {"-L": (0, LISTED, ""), "--query-gpu": (0, rows, "")})

    def asked(self, name: str = "docker") -> list[list[str]]:
        """What a program was asked."""
        log = self.tools / f"{name}.log"
        requests = log.read_text().split("\x1e")[:-1] if log.exists() else []
        return [request.split("\x1f")[:-1] for request in requests]

    def run(self, *words: str, code: int = 0, script: str = "runtime", **env: str) -> tuple[str, str]:
        """Runs a script; returns what it said on stdout and stderr."""
        done = subprocess.run(
            [sys.executable, f"scripts/{script}.py", *words],
            cwd=self.root,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout, done.stderr

    def refused(self, *words: str, **env: str) -> str:
        """The one line that it ends with."""
        out, err = self.run(*words, code=2, **env)
        assert err.startswith("runtime: error: ")
        assert err.count("\n") == 1, err
        assert "docker run" not in out
        return err


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    root, tools = tmp_path / "project", tmp_path / "tools"
    tools.mkdir()
    for name in ("runtime.py", "doctor.py", "engine_checks.py"):
        (root / "scripts").mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "scripts" / name, root / "scripts")
    for room in ("", "config", "host", "commands", "commands/doctor"):
        (root / "trainer" / room).mkdir(parents=True)
        shutil.copy(ROOT / "trainer" / room / "__init__.py", root / "trainer" / room)
    doctor = ("commands/doctor/stacks.py", "commands/doctor/stacks.json")
    for name in (
        "errors.py",
        "version.py",
        "config/suggest.py",
        "host/gpus.py",
        "host/engine.py",
        "host/environment.py",
        *doctor,
    ):
        shutil.copy(ROOT / "trainer" / name, root / "trainer" / name)
    for name in ("bootstrap.py", "image.py"):
        (root / "scripts" / name).write_text(f"import sys; print('{name}', *sys.argv[1:], flush=True)\n")
    trainer = root / ".venv/bin/trainer"
    trainer.parent.mkdir(parents=True)
    trainer.write_text('#!/bin/sh\necho "in .venv:" "$@"\nexit 75\n')
    trainer.chmod(0o755)
    # Nothing else on PATH: this machine may have an engine or GPUs.
    return Machine(root, tools, {"PATH": str(tools), "HOME": str(tmp_path)})


# The choice.

READY = Facts(gpus=TWO, seen=TWO)
CHOICES: list[tuple[Facts, bool | None, str]] = [
    (Facts(), True, "trainer:x-train is here"),
    (READY, True, "it sees every GPU (2)"),
    (replace(READY, runtime="container"), True, "it sees every GPU (2)"),
    (replace(READY, runtime="local"), False, "RUNTIME=local"),
    (replace(READY, present=False), False, "no image trainer:x-train; make image STACK=x builds it"),
    (replace(READY, present=False, given=True), False, "IMAGE=trainer:x-train can't be pulled"),
    (replace(READY, engine="no engine here"), False, "no engine here"),
    (replace(READY, seen=frozenset({"GPU-1"})), False, "a container sees 1 of 2 GPUs"),
    (replace(READY, seen=frozenset({"GPU-1", "GPU-2", "GPU-3"})), False, "a container sees 1 of 2 GPUs"),
    (replace(READY, seen=frozenset(), blind="no runtime"), False, "sees 0 of 2 GPUs (no runtime)"),
    (replace(READY, outside="/data"), False, "/data is outside this folder"),
    (replace(READY, runtime="container", present=False), None, "RUNTIME=container: no image"),
    (replace(READY, runtime="container", engine="no engine here"), None, "RUNTIME=container: no engine here"),
    (replace(READY, runtime="container", seen=frozenset()), None, "sees 0 of 2 GPUs"),
    (replace(READY, runtime="podman"), None, "auto, local (.venv) or container, not 'podman'"),
    (replace(READY, present=False, conda="c"), None, "conda env create -f stacks/c/environment.yml"),
    (replace(READY, runtime="local", conda="c"), None, "STACK=c is conda's"),
    (replace(READY, conda="c"), True, "trainer:x-train is here"),
]


@pytest.mark.parametrize(("facts", "container", "why"), CHOICES)
def test_the_choice(facts: Facts, container: bool | None, why: str) -> None:
    if container is None:
        with pytest.raises(BadInputError) as error:
            decide(facts)
        assert why in str(error.value)
    else:
        chosen, said = decide(facts)
        assert chosen is container
        assert why in said


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("2", ["2"]),
        ("3, 1", ["3", "1"]),
        ("1,4,2", ["1"]),
        ("-1", []),
        ("NoDevFiles", []),
        ("GPU-22", ["GPU-22-a"]),
        ("GPU-", []),
        ("MIG-1/2", ["MIG-1/2"]),
    ],
)
def test_what_the_variable_leaves(variable: str | None, visible: list[str]) -> None:
    assert visible_gpus([gpu.uuid for gpu in GPUS], variable)[0] == visible
    assert visible_gpus([], variable)[0] == []


def test_what_the_engine_is_told() -> None:
    assert gpu_words(GPUS, ["0", "1", "2", "3"], "") == ["--gpus", "all"]
    assert gpu_words(GPUS, ["0", "2"], "") == ["--gpus", '"device=0,2"']
    assert gpu_words(GPUS, [], "") == []
    mixed = [*GPUS[:3], Gpu("3", "NVIDIA T4", "GPU-t")]
    everything = ["--gpus", "all", "--env", "CUDA_VISIBLE_DEVICES=3"]
    assert gpu_words(mixed, ["3"], "") == everything
    assert gpu_words(mixed, ["3"], "PCI_BUS_ID") == ["--gpus", '"device=3"']
    assert gpu_words(mixed, ["GPU-t"], "") == ["--gpus", '"device=GPU-t"']


def test_paths_that_a_container_does_not_see(tmp_path: Path) -> None:
    assert outside(["digits", "--set", f"data.path={tmp_path}"], "") == str(tmp_path)
    assert outside(["digits", "--set", f"data.path={tmp_path}/a"], str(tmp_path)) == ""
    assert outside(["digits", "--out", f"{ROOT}/runs/a", "--set", "optim.lr=0.1"], "") == ""
    assert outside(["../x.yaml"], "") == "../x.yaml"
    # What isn't there yet, but is to be written.
    assert outside(["digits", "--out", "/not/there/yet"], "") == "/not/there/yet"
    assert outside(["digits", "--out=/not/there/yet"], "/not") == ""
    assert outside(["digits", "--set", "x=/not/there/yet"], "") == ""


def test_nvidia_smi_is_read() -> None:
    text = "GPU 0: NVIDIA A100 (UUID: GPU-x)\n  MIG 1g.5gb Device 0: (UUID: MIG-y)\nGPU 1: T4 (UUID: GPU-z)\n"
    assert parse_gpus(text) == [Gpu("0", "NVIDIA A100", "GPU-x"), Gpu("1", "T4", "GPU-z")]
    assert parse_gpus("NVIDIA-SMI has failed because it couldn't communicate") == []


# `make train`.


def test_in_the_container(machine: Machine) -> None:
    machine.engine()
    out, err = machine.run("train", "--", "digits", "--set", "optim.lr=0.1")
    assert err == ""
    first, command, last = out.splitlines()
    assert first == "runtime: container: trainer:torch2.9-cu128-train is here"
    assert last == "trained"
    words = machine.asked()[-1]
    assert words[-6:] == [
        "trainer:torch2.9-cu128-train",
        "trainer",
        "train",
        "digits",
        "--set",
        "optim.lr=0.1",
    ]
    assert command.startswith("docker run --user ")
    assert f"type=bind,source={machine.root},target=/workspace" in words
    assert "--rm" in words
    assert "no-new-privileges" in words
    assert words[words.index("--cap-drop") + 1] == "ALL"
    assert "--gpus" not in words
    user = words[words.index("--user") + 1]
    assert user == (f"{os.getuid()}:{os.getgid()}" if os.getuid() else "0:0")


def test_whose_files_they_are(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.engine(info=(0, '["name=seccomp,profile=builtin","name=rootless"]', ""))
    machine.run("train", "--", "digits")
    words = machine.asked()[-1]
    assert words[words.index("--user") + 1] == "0:0"
    assert words[words.index("TRAINER_IMAGE_DIGEST=sha256:11aa") - 1] == "--env"

    def user(caller: int, rootless: bool) -> tuple[str, bool]:
        monkeypatch.setattr(os, "getuid", lambda: caller)
        monkeypatch.setattr(os, "getgid", lambda: 50)
        words = docker_words("image", [], rootless=rootless)
        return words[words.index("--user") + 1], "--cap-add=SETUID" in words

    assert user(1000, rootless=False) == ("1000:50", False)
    assert user(1000, rootless=True) == ("0:0", True)  # the container's root is the caller
    assert user(0, rootless=False) == ("0:0", True)  # the entrypoint becomes the checkout's owner


def test_in_venv(machine: Machine) -> None:
    out, _ = machine.run("train", "--gpus", "", "--", "digits", "--set", "a=1", code=75)
    assert out.splitlines() == [
        "runtime: .venv: no container engine: docker isn't on PATH; install it "
        "(docs.docker.com/engine/install)",
        "bootstrap.py --stack torch2.9-cu128 --venv .venv --groups train",
        ".venv/bin/trainer train digits --set a=1",
        "in .venv: train digits --set a=1",
    ]


def test_no_image_is_built_or_pulled_unasked(machine: Machine) -> None:
    machine.engine(image_inspect=(1, "", "No such image"))
    out, _ = machine.run("train", "--", "digits", code=75)
    assert out.startswith(
        "runtime: .venv: no image trainer:torch2.9-cu128-train; make image STACK=torch2.9-cu128 builds it\n"
    )
    assert {words[0] for words in machine.asked()} == {"version", "image"}


def test_a_given_image_is_pulled(machine: Machine) -> None:
    machine.engine(image_inspect=(1, "", "No such image"), pull=(0, "", ""))
    out, _ = machine.run("train", "--image", "there/trainer:1", "--", "digits")
    assert "docker pull there/trainer:1\n" in out
    assert "there/trainer:1" in machine.asked()[-1]
    machine.engine(image_inspect=(1, "", "No such image"), pull=(1, "", ""))
    assert (
        "IMAGE=there/trainer:1 can't be pulled"
        in machine.run("train", "--image", "there/trainer:1", "--", "digits", code=75)[0]
    )


def test_a_container_that_sees_fewer_gpus_is_not_taken(machine: Machine) -> None:
    machine.gpus()
    machine.engine()
    out, _ = machine.run("train", "--", "digits", code=75)
    assert (
        "runtime: .venv: a container sees 0 of 2 GPUs (the engine has no NVIDIA runtime; install nvidia-"
        in out
    )
    line = machine.refused("train", "--runtime", "container", "--", "digits")
    assert "RUNTIME=container: a container sees 0 of 2 GPUs" in line


@pytest.mark.parametrize(
    ("gpus", "variable", "given"),
    [
        ("", None, "all"),
        ("1", None, '"device=0"'),
        ("id:1", None, '"device=1"'),
        ("1,0", None, '"device=1,0"'),
        ("2", None, "all"),
        ("", "1", '"device=1"'),
        ("1", "1", '"device=1"'),
        ("id:0", "1,0", '"device=1"'),
        ("", "", None),
    ],
)
def test_gpus_in_a_container(machine: Machine, gpus: str, variable: str | None, given: str | None) -> None:
    machine.gpus()
    machine.engine(**{"run --rm --pull=never": (0, LISTED, "")})
    machine.env |= {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    out, _ = machine.run("train", "--gpus", gpus, "--", "digits")
    words = machine.asked()[-1]
    assert (words[words.index("--gpus") + 1] if "--gpus" in words else None) == given
    assert "runtime: container: " in out


def test_gpus_in_venv_stay_the_trainers_business(machine: Machine) -> None:
    machine.gpus()
    out, _ = machine.run("train", "--gpus", "id:1", "--", "digits", "--set", "a=1", code=75)
    assert out.endswith("in .venv: train digits --gpus id:1 --set a=1\n")


def test_data_is_shown_to_the_container_and_the_rest_of_the_disk_is_not(
    machine: Machine, tmp_path: Path
) -> None:
    machine.engine()
    path = f"data.path={tmp_path}"
    assert (
        f"runtime: .venv: {tmp_path} is outside"
        in machine.run("train", "--", "digits", "--set", path, code=75)[0]
    )
    machine.run("train", "--data", str(tmp_path), "--", "digits", "--set", path)
    assert f"type=bind,source={tmp_path},target={tmp_path},readonly" in machine.asked()[-1]


# Bad input.

ENGINES: list[tuple[str, tuple[int, str, str], str]] = [
    (
        "version",
        (1, "", "Cannot connect to the Docker daemon at unix:///x. Is it running?"),
        "none is running",
    ),
    ("version", (1, "", "permission denied while trying to connect to the socket"), "group docker"),
    ("version", (1, "", "Error: teapot\n"), "doesn't answer: Error: teapot"),
    (
        "compose version",
        (1, "", "docker: 'compose' is not a docker command."),
        "install the plugin docker-compose",
    ),
]


@pytest.mark.parametrize(("asked", "answer", "line"), ENGINES)
def test_engines_that_do_not_do(
    machine: Machine, asked: str, answer: tuple[int, str, str], line: str
) -> None:
    machine.engine(**{asked: answer})
    assert line in machine.refused("up")


def test_no_engine(machine: Machine) -> None:
    for words in (("up",), ("shell",), ("train", "--runtime", "container", "--", "digits")):
        assert "docker isn't on PATH" in machine.refused(*words)


def test_no_buildkit_and_no_space(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from engine_checks import check_disk, check_engine

    monkeypatch.setenv("PATH", str(machine.tools))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    machine.engine(**{"buildx version": (1, "", "not a docker command"), "info": (0, f"{tmp_path}\n", "")})
    check_engine()
    with pytest.raises(BadInputError, match=r"no BuildKit: install the plugin docker-buildx"):
        check_engine(build=True)
    check_disk(0.001)
    with pytest.raises(BadInputError, match=r"needs about 1e\+06 GB and .* has [\d.]+ free"):
        check_disk(1e6)
    monkeypatch.setenv("DOCKER_HOST", "ssh://elsewhere")
    check_disk(1e6)  # not this machine's disk


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["train", "--stack", "torch2.9-cu129", "--", "digits"],
            "no stack 'torch2.9-cu129'; did you mean 'torch2.9-cu128'?",
        ),
        (["up", "--stack", "zzz"], "no stack 'zzz'; there are pytorch-cuda-11.8, "),
        (["train", "--gpus", "2", "--", "digits"], "GPUS=2: nvidia-smi shows none here; leave GPUS out"),
        (["train", "--runtime", "podman", "--", "digits"], "auto, local (.venv) or container, not 'podman'"),
        (["train", "--stack", "pytorch-cuda-12.4", "--", "digits"], "make image STACK=pytorch-cuda-12.4"),
    ],
)
def test_bad_input(machine: Machine, words: list[str], line: str) -> None:
    assert line in machine.refused(*words)


@pytest.mark.parametrize("gpus", ["3", "id:2", "0,0", "x"])
def test_gpus_that_are_not_there(machine: Machine, gpus: str) -> None:
    machine.gpus()
    machine.engine()
    assert f"--gpus {gpus}: " in machine.refused("train", "--gpus", gpus, "--", "digits")


def test_hidden_gpus_stay_hidden(machine: Machine) -> None:
    machine.gpus()
    line = machine.refused("train", "--gpus", "1", "--", "digits", CUDA_VISIBLE_DEVICES="")
    assert "CUDA_VISIBLE_DEVICES hides them all" in line


def test_an_old_driver(machine: Machine) -> None:
    machine.gpus("470.82.01", "8.0")
    line = machine.refused("train", "--", "digits")
    assert "driver 470.82.01 is too old for torch2.9-cu128, which needs 525.60.13" in line
    assert "STACK=pytorch-cuda-11.8 fits it" in line
    machine.run("train", "--", "digits", code=75, CUDA_VISIBLE_DEVICES="")  # on the CPU it doesn't matter


def test_which_stack_fits_a_driver() -> None:
    def line(stack: str, driver: str, *architectures: str) -> str:
        try:
            check_driver(check_stack(stack), driver, architectures)
        except BadInputError as error:
            return str(error)
        return ""

    assert line("torch2.14-cu130", "580.65.06", "sm_90") == ""
    assert line("torch2.14-cu130", "", "sm_90") == ""  # unknown
    assert "STACK=torch2.9-cu128 fits it" in line("torch2.14-cu130", "570.26", "sm_90")
    assert "STACK=torch2.6-cu124 fits it" in line("torch2.14-cu130", "570.26", "sm_61")  # Pascal
    assert "no stack fits it" in line("torch2.9-cu128", "470.82", "sm_120")  # Blackwell can't run CUDA 11.8
    assert "no stack fits it" in line("torch2.9-cu128", "418.67")
    assert line("torch2.9-cu128", "1000.1") == ""


def test_ports() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            BadInputError, match=rf"port {port} of 127.0.0.1 is taken: .* JUPYTER_PORT={port + 1}"
        ):
            check_ports({"JUPYTER_PORT": str(port)})
    check_ports({"JUPYTER_PORT": str(port)})
    for wrong in ("0", "65536", "x", ""):
        with pytest.raises(BadInputError, match="give a port"):
            check_ports({"SSH_PORT": wrong})


# `make up` and `make shell`.


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
    assert "runtime: stack torch2.9-cu128\n" in out
    assert "runtime: without scripts/compose/gpu.yml, on the CPU: the engine has no NVIDIA runtime" in out
    started = "docker compose -f docker-compose.yml up --detach --wait --no-build"
    assert started in out.splitlines()
    assert started.split()[1:] in machine.asked()
    assert f"JupyterLab   http://127.0.0.1:{port}/lab?token=abc\n" in out
    machine.engine(**{"run --rm --pull=never": (0, LISTED, "")})
    out, _ = machine.run("up")
    assert "runtime: with scripts/compose/gpu.yml: containers see 2 x NVIDIA" in out
    files = ["-f", "docker-compose.yml", "-f", "scripts/compose/gpu.yml"]
    assert ["compose", *files, "up"] in [words[:6] for words in machine.asked()]


@pytest.mark.usefixtures("ports")
def test_up_builds_what_is_missing_and_says_so(machine: Machine) -> None:
    machine.engine(image_inspect=(1, "", ""))
    out, _ = machine.run("up", "--stack", "torch2.6-cu124")
    assert "runtime: no image trainer:torch2.6-cu124-dev here: building it first" in out
    assert "image.py build --stack torch2.6-cu124 --target dev" in out
    machine.engine(image_inspect=(1, "", ""), pull=(1, "", ""))
    assert "there/x:1 can't be had" in machine.refused("up", "--image", "there/x:1")


@pytest.mark.usefixtures("ports")
def test_up_prints_the_ports_that_compose_took(machine: Machine) -> None:
    said = "http://127.0.0.1:8888/lab?token=in http://127.0.0.1:18888/lab?token=out"
    machine.engine(**{"compose logs": (0, said, ""), "compose port": (0, "127.0.0.1:18888\n", "")})
    out, _ = machine.run("up")
    assert "http://127.0.0.1:18888/lab?token=out\n" in out
    assert "TensorBoard  http://127.0.0.1:18888\n" in out


@pytest.mark.usefixtures("ports")
def test_up_says_why_a_service_did_not_start(machine: Machine) -> None:
    machine.engine(
        **{
            "compose -f docker-compose.yml up": (1, "", ""),
            "compose ps": (0, "ssh\n", ""),
            "compose logs": (0, "entrypoint: no authorized key\n", ""),
        }
    )
    _, err = machine.run("up", code=1)
    assert "runtime: error: ssh: entrypoint: no authorized key\n" in err
    assert "make down" in err


@pytest.mark.usefixtures("ports")
def test_up_does_not_invent_a_token(machine: Machine) -> None:
    machine.engine(
        **{"compose logs": (0, f"http://127.0.0.1:{machine.env['JUPYTER_PORT']}/lab?token=...", "")}
    )
    machine.env["JUPYTER_TOKEN"] = "mine"
    out, _ = machine.run("up")
    assert (
        f"JupyterLab   http://127.0.0.1:{machine.env['JUPYTER_PORT']}/lab, with your JUPYTER_TOKEN\n" in out
    )


def test_up_and_a_port_that_is_taken(machine: Machine, ports: dict[str, str]) -> None:
    machine.engine()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(ports["JUPYTER_PORT"])))
        taken.listen()
        assert f"port {ports['JUPYTER_PORT']} of 127.0.0.1 is taken" in machine.refused("up")
        machine.engine(**{"compose -f docker-compose.yml ps": (0, "jupyter\n", "")})
        out, _ = machine.run("up")  # taken by itself
        assert "what runs already stays as it is (jupyter)" in out
        assert machine.asked()[-4][-1] == "--no-recreate"


def test_up_looks_for_the_ports_that_compose_reads_from_env_files(
    machine: Machine, ports: dict[str, str]
) -> None:
    """.env sets them for Compose alone; a service of a profile that isn't asked for needs none."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        services = {
            "jupyter": {"ports": [{"published": ports["JUPYTER_PORT"]}]},
            "tensorboard": {"ports": [{"published": str(port)}]},
        }
        told = (0, json.dumps({"services": services}), "")
        machine.engine(**{"compose -f docker-compose.yml config": told})
        assert f"port {port} of 127.0.0.1 is taken" in machine.refused("up")
    machine.run("up")


def test_shell(machine: Machine) -> None:
    machine.engine()
    machine.run("shell", "--", "python", "-V")
    assert machine.asked()[-1][-3:] == ["trainer:torch2.9-cu128-dev", "python", "-V"]
    machine.engine(image_inspect=(1, "", ""))
    assert "make image STACK=torch2.9-cu128 builds it" in machine.refused("shell")


@pytest.mark.skipif(MAKE is None, reason="no make here")
def test_make_passes_everything_on(machine: Machine) -> None:
    shutil.copy(ROOT / "Makefile", machine.root)
    machine.gpus()
    machine.engine(**{"run --rm --pull=never": (0, LISTED, "")})

    (machine.tools / "python3").symlink_to(sys.executable)

    def make(*words: str) -> list[str]:
        assert MAKE
        done = subprocess.run(
            [MAKE, *words], cwd=machine.root, env=machine.env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return machine.asked()[-1]

    words = make("train", "RECIPE=resnet50-synthetic", "GPUS=0,1", "OUT=my runs/a", "ARGS=--set 'a=[1, 2]'")
    assert words[-7:] == ["trainer", "train", "resnet50-synthetic", "--out", "my runs/a", "--set", "a=[1, 2]"]
    assert words[words.index("--gpus") + 1] == "all"
    assert make("train", "RESUME=1", "IMAGE=there/x:1")[-5:] == [
        "trainer",
        "train",
        "digits",
        "--resume",
        "newest",
    ]
    assert "there/x:1" in machine.asked()[-1]
    assert make("shell", "STACK=torch2.6-cu124", "ARGS=id")[-2:] == ["trainer:torch2.6-cu124-dev", "id"]


@pytest.mark.skipif(MAKE is None, reason="no make here")
def test_env_sets_runtime_and_stack_once(machine: Machine) -> None:
    """As Compose reads it: the last line counts, and what is typed goes before."""
    shutil.copy(ROOT / "Makefile", machine.root)
    (machine.root / ".env").write_text("#STACK=no\nSTACK=torch2.6-cu124\nRUNTIME=auto\nRUNTIME='cloud'\n")
    for name, program in (("python3", sys.executable), ("sed", shutil.which("sed"))):
        (machine.tools / name).symlink_to(str(program))
    machine.engine()

    def make(*words: str) -> tuple[int, str]:
        assert MAKE
        command, out = [MAKE, *words], subprocess.STDOUT
        done = subprocess.run(
            command, cwd=machine.root, env=machine.env, stdout=subprocess.PIPE, stderr=out, check=False
        )
        return done.returncode, done.stdout.decode()

    code, out = make("train")
    assert code == 2 and "RUNTIME is auto, local (.venv) or container, not 'cloud'" in out
    code, out = make("train", "RUNTIME=container")
    assert code == 0 and "trainer:torch2.6-cu124-train is here" in out


def test_every_line_of_the_example_is_a_comment() -> None:
    """So that a copy changes nothing; what it names is what Compose and make ask for."""
    lines = (ROOT / ".env.example").read_text().splitlines()
    assert all(line.startswith("#") or not line for line in lines)
    names = {match[1] for line in lines if (match := re.match(r"#([A-Z_]+)=", line))}
    asked = (ROOT / "docker-compose.yml").read_text() + (ROOT / "Makefile").read_text()
    assert {name for name in names - {"COMPOSE_FILE"} if name not in asked} == set()
    (files,) = (line.partition("=")[2] for line in lines if line.startswith("#COMPOSE_FILE="))
    assert all((ROOT / name).is_file() for name in files.split(":"))


@pytest.mark.skipif(MAKE is None, reason="no make here")
def test_no_python_is_one_line(machine: Machine) -> None:
    shutil.copy(ROOT / "Makefile", machine.root)
    assert MAKE
    done = subprocess.run(
        [MAKE, "train"], cwd=machine.root, env=machine.env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    first, _ = done.stderr.split("\n", 1)
    assert first == (
        "make: no Python from 3.9 on here: name one with PYTHON=…, or use "
        "docker compose run --rm train digits, which needs none"
    )


def test_an_old_python_can_read_the_scripts() -> None:
    for name in (
        "scripts/runtime.py",
        "scripts/engine_checks.py",
        "trainer/__init__.py",
        "trainer/version.py",
        "trainer/errors.py",
        "trainer/host/__init__.py",
        "trainer/host/gpus.py",
        "trainer/config/suggest.py",
    ):
        ast.parse((ROOT / name).read_text(), feature_version=(3, 9))


# The doctor.


def doctor(machine: Machine, *words: str, code: int, found: int = 1) -> tuple[str, str]:
    trainer = machine.root / ".venv/bin/trainer"
    trainer.write_text(f'#!/bin/sh\necho "in .venv:" "$@"\nexit {found}\n')
    return machine.run(*words, code=code, script="doctor")


def test_the_doctor_looks_at_the_machine_and_from_a_container(machine: Machine) -> None:
    machine.engine()
    out, _ = doctor(machine, "--", "digits", "--json", code=1)
    assert "in .venv: doctor digits --json\n" in out
    assert "runtime: from a container of trainer:torch2.9-cu128-train\n" in out
    (ran,) = [words for words in machine.asked() if words[0] == "run"]
    assert ran[-5:] == ["trainer:torch2.9-cu128-train", "trainer", "doctor", "digits", "--json"]
    assert "--gpus" not in ran


def test_the_doctor_says_once_what_is_wrong_with_its_words(machine: Machine) -> None:
    machine.engine()
    doctor(machine, "--", "digit", code=2, found=2)
    assert not [words for words in machine.asked() if words[0] == "run"]


def test_the_doctor_in_a_container_sees_the_gpus_that_it_can(machine: Machine) -> None:
    machine.engine(run_=(0, LISTED, ""), run___rm___pull_never=(0, LISTED, ""))
    machine.gpus()
    doctor(machine, code=1)
    assert machine.asked()[-1][-5:-3] == ["--gpus", "all"]


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"version": (1, "", "Cannot connect to the Docker daemon")}, "none is running"),
        ({"image_inspect": (1, "", "No such image")}, "no image trainer:torch2.9-cu128-train; make image"),
    ],
)
def test_the_doctor_without_a_container(machine: Machine, there: dict[str, Any], said: str) -> None:
    machine.engine(**there)
    out, _ = doctor(machine, code=1)
    assert "runtime: not looked at from a container: " in out
    assert said in out


def test_the_doctor_of_no_stack(machine: Machine) -> None:
    out, err = doctor(machine, "--stack", "torch2.9", code=2)
    assert (out, err.count("\n")) == ("", 1)
    assert "did you mean" in err
