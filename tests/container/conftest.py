"""The images that tests of containers need; without them they are skipped, with the reason."""

import shutil
import subprocess

import pytest

STACK = "torch2.9-cu128"


def _image(target: str) -> str:
    tag = f"trainer:{STACK}-{target}"
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "version"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no container engine answers here")
    if subprocess.run(["docker", "image", "inspect", tag], capture_output=True, check=False).returncode:
        pytest.skip(f"no image {tag} here: make image builds it")
    return tag


@pytest.fixture(scope="session")
def dev_image() -> str:
    """The tag of the development image."""
    return _image("dev")


@pytest.fixture(scope="session")
def train_image() -> str:
    """The tag of the training image."""
    return _image("train")
