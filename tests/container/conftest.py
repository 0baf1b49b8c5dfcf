"""The images that tests of containers need; without them they are skipped, with the reason."""

import os
import shutil

import pytest

from tests.helpers.programs import ran

STACK = "torch2.9-cu128"


def _missing(why: str) -> None:
    # CI builds the images: there a skip would hide that nothing was tested.
    if os.environ.get("TRAINER_REQUIRE_IMAGES"):
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture(autouse=True, scope="session")
def _engine() -> None:
    """Each of these tests needs an engine."""
    if not shutil.which("docker") or ran("docker", "version").returncode:
        _missing("no container engine answers here")


def _image(target: str) -> str:
    tag = f"trainer:{STACK}-{target}"
    if ran("docker", "image", "inspect", tag).returncode:
        _missing(f"no image {tag} here: make image builds it")
    return tag


@pytest.fixture(scope="session")
def dev_image() -> str:
    """The tag of the development image."""
    return _image("dev")


@pytest.fixture(scope="session")
def train_image() -> str:
    """The tag of the training image."""
    return _image("train")
