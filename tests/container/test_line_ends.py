"""A checkout with Windows' line ends builds an image that starts; with real scripts, locks and Dockerfile."""

import shutil
from pathlib import Path

import pytest

from tests.container.run import engine

pytestmark = pytest.mark.container

ROOT = Path(__file__).resolve().parents[2]
STACK = "torch2.9-cu128"


def test_an_image_from_a_checkout_of_windows_starts(train_image: str, tmp_path: Path) -> None:
    """Above the wheels, which stand in the image already: they are the minutes of a build."""
    for name in ("trainer", "scripts", "stacks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Dockerfile", ".dockerignore", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    for path in tmp_path.rglob("*"):
        if path.is_file() and b"\0" not in (content := path.read_bytes()):
            path.write_bytes(content.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))
    uv, tag = "trainer:crlf-uv", "trainer:crlf"
    # What stands for uv does nothing: the trainer is in that image as well.
    (tmp_path / "uv").write_text("#!/bin/sh\n")
    (tmp_path / "uv.Dockerfile").write_text(
        f"FROM {train_image}\nUSER 0\nCOPY --chmod=755 uv /opt/uv/bin/uv\n"
    )
    (tmp_path / "uv.Dockerfile.dockerignore").write_text("")
    noise = (".*",)  # of BuildKit
    engine(
        "buildx",
        "build",
        "--tag",
        uv,
        "--load",
        "--file",
        tmp_path / "uv.Dockerfile",
        tmp_path,
        expected=noise,
    )
    names = ("conda-base", "debian-base", "wheels", "uv")
    given = [f"--build-context={name}=docker-image://{uv}" for name in names]
    engine("buildx", "build", *given, "--target=train", "--tag", tag, "--load", tmp_path, expected=noise)
    # Whether the stack is one, before anything is downloaded.
    engine("buildx", "build", *given, "--target=stack", tmp_path, expected=noise)
    try:
        words = (
            "bash",
            "-lc",
            "command -v trainer && uv 2>&1 | head -n 1; pip --version; tail -n 1 /etc/passwd",
        )
        said = engine("run", "--rm", "--network=none", tag, *words)
        assert said.startswith("/opt/trainer/bin/trainer\nuv: it isn't in the image") and "\r" not in said
        assert "pip 2" in said
        engine("run", "--rm", "--user=0", tag, "python", "-c", "import os; print(os.getuid())")
    finally:
        engine("rmi", "--force", tag, uv)
