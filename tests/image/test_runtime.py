"""P2, one command: container or .venv is chosen by what is there, and whatever is missing gets one line."""

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from container_words import docker_words, gpu_words
from engine_checks import check_driver, check_ports, check_stack
from runtime import Facts, decide, outside

from tests.helpers.engine_box import LISTED, Machine
from tests.helpers.refusals import refused
from trainer.errors import BadInputError
from trainer.host.gpus import Gpu, gpu_of_rank, visible_gpus

ROOT = Path(__file__).resolve().parents[2]
GPUS = [Gpu(str(n), "NVIDIA H100", f"GPU-{n}{n}-a") for n in range(4)]
TWO = frozenset({"GPU-0", "GPU-1"})

# The choice.

READY = Facts(gpus=TWO, seen=TWO)
CHOICES: list[tuple[Facts, bool | None, str]] = [
    (Facts(), True, "trainer:x-train is here"),
    (READY, True, "it sees every GPU (2)"),
    (replace(READY, runtime="local"), False, "RUNTIME=local"),
    (replace(READY, present=False), False, "no image trainer:x-train; make image STACK=x builds it"),
    (replace(READY, engine="no engine here"), False, "no engine here"),
    (replace(READY, seen=frozenset({"GPU-1"})), False, "a container sees 1 of 2 GPUs"),
    (replace(READY, outside="/data"), False, "/data is outside this folder"),
    (replace(READY, runtime="container", present=False), None, "RUNTIME=container: no image"),
    (replace(READY, present=False, conda="c"), None, "conda env create -f stacks/c/environment.yml"),
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
    [("", []), ("2", ["2"]), ("1,4,2", ["1"]), ("GPU-22", ["GPU-22-a"]), ("MIG-1/2", ["MIG-1/2"])],
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
    assert outside(["digits", "--out", "/not/there/yet"], "") == "/not/there/yet"
    assert outside(["digits", "--out=/not/there/yet"], "/not") == ""
    assert outside(["digits", "--set", "x=/not/there/yet"], "") == ""


# `make train`.


def test_in_the_container(machine: Machine) -> None:
    machine.engine()
    out, err = machine.run("train", "--", "digits", "--set", "optim.lr=0.1")
    assert err == ""
    first, command, last = out.splitlines()
    assert first == "runtime: container: trainer:torch2.9-cu128-train is here"
    assert last == "trained"
    words = machine.asked()[-1]
    assert words[-4:] == ["train", "digits", "--set", "optim.lr=0.1"]
    assert words[-6] == "trainer:torch2.9-cu128-train"
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


def test_a_users_groups_come_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """By them a lab's share can be read; a rootless engine, and the owner whom root becomes, have others."""
    monkeypatch.setattr(os, "getgid", lambda: 50)
    monkeypatch.setattr(os, "getgroups", lambda: [50, 7000, 0, 5000])

    def groups(caller: int, rootless: bool) -> list[str]:
        monkeypatch.setattr(os, "getuid", lambda: caller)
        return [word for word in docker_words("image", [], rootless=rootless) if "group-add" in word]

    assert groups(1000, rootless=False) == ["--group-add=5000", "--group-add=7000"]
    assert groups(1000, rootless=True) == groups(0, rootless=False) == []


def test_in_venv_as_no_image_is_built_or_pulled_unasked(machine: Machine) -> None:
    machine.engine(image_inspect=(1, "", "No such image"))
    out, _ = machine.run("train", "--gpus", "", "--", "digits", "--set", "a=1", code=75)
    assert out.startswith("runtime: .venv: ") and out.splitlines()[1:] == [
        "bootstrap.py --stack torch2.9-cu128 --venv .venv --groups train",
        ".venv/bin/trainer train digits --set a=1",
        "in .venv: train digits --set a=1",
    ]
    assert {words[0] for words in machine.asked()} == {"version", "image"}


def test_a_given_image_is_pulled(machine: Machine) -> None:
    machine.engine(image_inspect=(1, "", "No such image"), pull=(0, "", ""))
    out, _ = machine.run("train", "--image", "there/trainer:1", "--", "digits")
    assert "docker pull there/trainer:1\n" in out
    assert "there/trainer:1" in machine.asked()[-1]


def test_a_container_that_sees_fewer_gpus_is_not_taken(machine: Machine) -> None:
    machine.gpus()
    machine.engine()
    out, _ = machine.run("train", "--", "digits", code=75)
    assert ".venv: a container sees 0 of 2 GPUs" in out
    line = machine.refused("train", "--runtime", "container", "--", "digits")
    assert "RUNTIME=container: a container sees 0 of 2 GPUs" in line


@pytest.mark.parametrize(
    ("gpus", "variable", "given"),
    [
        ("", None, "all"),
        ("1", None, '"device=0"'),
        ("1,0", None, '"device=1,0"'),
        ("1", "1", '"device=1"'),
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


def test_an_old_driver(machine: Machine) -> None:
    machine.gpus("470.82.01", "8.0")
    line = machine.refused("train", "--", "digits")
    assert all(one in line for one in ("470.82.01", "525.60.13", "STACK=pytorch-cuda-11.8"))
    machine.run("train", "--", "digits", code=75, CUDA_VISIBLE_DEVICES="")  # on the CPU it doesn't matter
    newest = check_stack("torch2.14-cu130")
    check_driver(newest, "580.65.06", ["sm_90"])
    with refused("STACK=torch2.6-cu124"):
        check_driver(newest, "570.26", ["sm_61"])  # Pascal


@pytest.mark.parametrize(("gpus", "hidden"), [("3", {}), ("0,0", {}), ("1", {"CUDA_VISIBLE_DEVICES": ""})])
def test_gpus_that_are_not_there(machine: Machine, gpus: str, hidden: dict[str, str]) -> None:
    machine.gpus()
    machine.engine()
    assert gpus in machine.refused("train", "--gpus", gpus, "--", "digits", **hidden)


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with refused(str(port), "JUPYTER_PORT"):
            check_ports({"JUPYTER_PORT": str(port)})
    check_ports({"JUPYTER_PORT": str(port)})
    with refused("SSH_PORT"):
        check_ports({"SSH_PORT": "65536"})


def test_a_rank_uses_the_gpu_that_it_sees() -> None:
    own = {"SLURM_LOCALID": "3"}  # srun --gpus-per-task=1: each task sees its own as number 0
    assert [gpu_of_rank(3, 8, {}), gpu_of_rank(3, 4, own), gpu_of_rank(3, 1, own)] == [3, 3, 0]
    for local, visible, environ in ((3, 2, own), (3, 1, {})):
        with refused(f"LOCAL_RANK={local}"):
            gpu_of_rank(local, visible, environ)
