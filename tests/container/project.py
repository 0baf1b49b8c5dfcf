"""A checkout that belongs to somebody else than the image's user and root, with its Compose project."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.container.run import engine
from tests.helpers.ports import free_port
from tests.helpers.programs import ran

ROOT = Path(__file__).resolve().parents[2]
OWNER = 12345


def copy_checkout(folder: Path, owner: int = OWNER, mode: int = 0o755) -> Path:
    """A copy of this checkout without what git ignores, owned by somebody."""
    if os.geteuid():
        pytest.skip("only root can give a checkout to somebody else")
    anywhere = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "*.egg-info", ".hypothesis")

    def ignored(place: str, names: list[str]) -> set[str]:
        own = {"runs", "build"} if Path(place) == ROOT else set()  # trainer/runs is a room
        return anywhere(place, names) | own

    shutil.copytree(ROOT, folder, ignore=ignored, symlinks=True)
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, owner, owner, follow_symlinks=False)
    folder.chmod(mode)
    return folder


def free_ports(count: int) -> list[str]:
    return [str(free_port()) for _ in range(count)]


ALL = ("--profile", "train", "--profile", "ssh")


@dataclass
class Project:
    """A checkout with its Compose project, named by its folder."""

    root: Path
    env: dict[str, str]

    def compose(self, *words: str, env: Mapping[str, str] | None = None, **options: Any) -> str:
        """Runs `docker compose words…` in the checkout; options are those of `engine`."""
        given = {**self.env, **(env or {})}
        return engine("compose", "--progress", "quiet", *words, cwd=self.root, env=given, **options)

    def script(self, *words: str) -> str:
        """Runs `scripts/runtime.py words…` in the checkout; returns its stdout."""
        options: dict[str, Any] = {"cwd": self.root, "env": self.env, "stdin": subprocess.DEVNULL}
        return ran(sys.executable, "scripts/runtime.py", *words, code=0, **options).stdout

    def container(self, service: str) -> str:
        return self.compose(*ALL, "ps", "--all", "--quiet", service).strip()

    def strangers(self) -> list[str]:
        """Files in the checkout that don't belong to its owner."""
        owner = self.root.stat().st_uid
        return [str(path) for path in self.root.rglob("*") if path.lstat().st_uid != owner]

    def down(self) -> None:
        self.compose(*ALL, "down", "--volumes", "--timeout", "5")


@contextmanager
def started_project(folder: Path, **options: int) -> Iterator[Project]:
    jupyter, tensorboard, ssh = free_ports(3)
    ours = ("JUPYTER_TOKEN", "TRAINER_DEV_IMAGE", "TRAINER_TRAIN_IMAGE", "STACK")
    env = {key: value for key, value in os.environ.items() if key not in ours}
    env |= {"JUPYTER_PORT": jupyter, "TENSORBOARD_PORT": tensorboard, "SSH_PORT": ssh}
    env |= {"COMPOSE_PROJECT_NAME": f"trainer-test-{os.getpid()}-{jupyter}"}
    project = Project(copy_checkout(folder, **options), env)
    try:
        yield project
    finally:
        project.down()
