"""P2, one command: what the engine is told of users, groups, folders, GPUs; what is missing gets a line."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from engine_checks import check_ports
from runtime import docker_words, gpu_words

from tests.helpers.engine_box import LISTED, Machine
from tests.helpers.refusals import refused
from trainer.host.gpus import Gpu, gpu_of_rank, visible_gpus

GPUS = [Gpu(str(n), "NVIDIA H100", f"GPU-{n}{n}-a") for n in range(4)]


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


@pytest.mark.parametrize(
    ("caller", "rootless", "user", "groups"),
    [
        (1000, False, "1000:50", ["--group-add=5000", "--group-add=7000"]),
        (1000, True, "0:0", []),  # the container's root is the caller, and knows no groups of the host
        (0, False, "0:0", []),  # the entrypoint becomes the checkout's owner
    ],
)
def test_whose_files_they_are(
    monkeypatch: pytest.MonkeyPatch, caller: int, rootless: bool, user: str, groups: list[str]
) -> None:
    """By groups a lab's share can be read."""
    monkeypatch.setattr(os, "getuid", lambda: caller)
    monkeypatch.setattr(os, "getgid", lambda: 50)
    monkeypatch.setattr(os, "getgroups", lambda: [50, 7000, 0, 5000])
    words = docker_words("image", [], rootless=rootless)
    assert words[words.index("--user") + 1] == user
    assert ("--cap-add=SETUID" in words) == (user == "0:0")
    assert [word for word in words if "group-add" in word] == groups


def test_a_shell_sees_the_checkout_and_data_and_may_do_nothing_more(machine: Machine, tmp_path: Path) -> None:
    machine.engine(info=(0, '["name=seccomp,profile=builtin","name=rootless"]', ""))
    data = tmp_path / "da,ta"
    out, err = machine.run("shell", "--data", str(data), "--", "python", "-V")
    assert err == "" and out.splitlines()[0].startswith("docker run --rm --user 0:0 --cap-drop ALL ")
    words = machine.asked()[-1]
    assert words[-3:] == ["trainer:torch2.9-cu128-dev", "python", "-V"]
    assert f"type=bind,source={machine.root},target=/workspace" in words
    assert f'type=bind,"source={data}","target={data}",readonly' in words
    assert "no-new-privileges" in words and "--gpus" not in words
    assert words[words.index("TRAINER_IMAGE_DIGEST=sha256:11aa") - 1] == "--env"
    machine.engine(image_inspect=(1, "", ""))
    assert "make image STACK=torch2.9-cu128 builds it" in machine.refused("shell")


@pytest.mark.parametrize(("variable", "given"), [(None, "all"), ("1", '"device=1"'), ("", None)])
def test_gpus_in_a_container(machine: Machine, variable: str | None, given: str | None) -> None:
    machine.gpus()
    machine.engine(**{"run --rm --pull=never": (0, LISTED, "")})
    machine.env |= {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    machine.run("shell")
    words = machine.asked()[-1]
    assert (words[words.index("--gpus") + 1] if "--gpus" in words else None) == given


def doctor(machine: Machine, *words: str) -> str:
    trainer = machine.root / ".venv/bin/trainer"
    trainer.write_text('#!/bin/sh\necho "in .venv:" "$@"\nexit 1\n')
    return machine.run("doctor", *words, code=1)[0]


def test_the_doctor_looks_at_the_machine_and_from_a_container(machine: Machine) -> None:
    machine.gpus()
    machine.engine(run_=(0, LISTED, ""), run___rm___pull_never=(0, LISTED, ""))
    out = doctor(machine, "--", "digits", "--json")
    assert "in .venv: doctor digits --json\n" in out
    ran = machine.asked()[-1]
    assert ran[-5:] == ["trainer:torch2.9-cu128-train", "trainer", "doctor", "digits", "--json"]
    assert ran[-7:-5] == ["--gpus", "all"]


@pytest.mark.parametrize(
    ("there", "said"), [({"version": (1, "", "Cannot connect to the Docker daemon")}, "none is running")]
)
def test_the_doctor_without_a_container(machine: Machine, there: dict[str, Any], said: str) -> None:
    machine.engine(**there)
    assert f"not looked at from a container: the container engine doesn't answer: {said}" in doctor(machine)


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with refused(str(port), "JUPYTER_PORT"):
            check_ports({"JUPYTER_PORT": str(port)})
    check_ports({"JUPYTER_PORT": str(port)})


def test_a_rank_uses_the_gpu_that_it_sees() -> None:
    own = {"SLURM_LOCALID": "3"}  # srun --gpus-per-task=1: each task sees its own as number 0
    assert [gpu_of_rank(3, 8, {}), gpu_of_rank(3, 4, own), gpu_of_rank(3, 1, own)] == [3, 3, 0]
    for local, visible, environ in ((3, 2, own), (3, 1, {})):
        with refused(f"LOCAL_RANK={local}"):
            gpu_of_rank(local, visible, environ)
