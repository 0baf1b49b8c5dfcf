"""The Compose file's services: images, ports, mounts and what they may do, as `docker compose` reads it."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.programs import ran

ROOT = Path(__file__).resolve().parents[2]


def _compose(*words: str, **env: str) -> Any:
    if not shutil.which("docker") or ran("docker", "compose", "version").returncode:
        pytest.skip("no docker compose here")
    ours = ("STACK", "TRAINER_DEV_IMAGE", "TRAINER_TRAIN_IMAGE", "JUPYTER_TOKEN", "CUDA_VISIBLE_DEVICES")
    given = {**{key: value for key, value in os.environ.items() if key not in ours}, **env}
    done = ran("docker", "compose", *words, "config", code=0, cwd=ROOT, env=given)
    assert done.stderr == ""
    return yaml.safe_load(done.stdout)["services"]


ALL = ("--profile", "train", "--profile", "ssh")


def test_the_compose_file() -> None:
    started = _compose()
    assert set(started) == {"jupyter", "tensorboard"}
    # Compose builds them at once, and of one name the second ends with "already exists".
    assert len({one["image"] for one in started.values()}) == 2
    services = _compose(*ALL)
    assert set(services) == {"jupyter", "tensorboard", "train", "ssh"}
    for name, service in services.items():
        stack = "trainer:torch2.9-cu128-" + ("train" if name in ("train", "tensorboard") else "dev")
        assert (service["image"], service["build"]["target"]) == (stack, stack.rpartition("-")[2])
        assert (service["cap_drop"], service["stop_grace_period"]) == (["ALL"], "40s")
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert {port["host_ip"] for port in service.get("ports", [])} <= {"127.0.0.1"}
        assert ("healthcheck" in service) == (name != "train")
        mounts = {mount["target"]: mount["source"] for mount in service["volumes"]}
        assert (mounts["/workspace"], mounts["/cache"]) == (str(ROOT), "cache")
        assert not {"init", "deploy"} & service.keys()  # the image has its own init
    # Passed on only where the caller sets it: an empty one would be refused.
    assert services["jupyter"]["environment"]["JUPYTER_TOKEN"] is None


def test_the_compose_files_variables() -> None:
    env = {"STACK": "torch2.6-cu124", "JUPYTER_PORT": "9000", "TENSORBOARD_PORT": "9001", "SSH_PORT": "9002"}
    services = _compose(*ALL, **env)
    assert services["train"]["image"] == "trainer:torch2.6-cu124-train"
    assert services["jupyter"]["build"]["args"]["STACK"] == "torch2.6-cu124"
    published = {name: one["ports"][0]["published"] for name, one in services.items() if "ports" in one}
    assert published == {"jupyter": "9000", "tensorboard": "9001", "ssh": "9002"}
    given = {"TRAINER_DEV_IMAGE": "there/dev:1", "TRAINER_TRAIN_IMAGE": "there/train:1"}
    images = {name: one["image"] for name, one in _compose(*ALL, **given).items()}
    assert {name for name, image in images.items() if image == "there/train:1"} == {"train"}
    assert set(images.values()) == {"there/dev:1", "there/train:1"}
    assert _compose(STACK="")["jupyter"]["image"] == "trainer:torch2.9-cu128-dev"


def test_the_gpu_file() -> None:
    services = _compose("-f", "docker-compose.yml", "-f", "scripts/compose/gpu.yml", *ALL)
    assert "deploy" not in services.pop("tensorboard")
    for service in services.values():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", -1, ["gpu"])
        assert service["environment"]["CUDA_VISIBLE_DEVICES"] is None
