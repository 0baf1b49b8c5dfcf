"""Promise: the manifest's commit is that of the package's own repository, or none."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from trainer.train import provenance


def test_a_repository_around_an_installed_package_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    def git(*words: Any) -> str:
        command = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    file = tmp_path / "site-packages" / "trainer" / "train" / "provenance.py"
    file.parent.mkdir(parents=True)
    file.write_text("")
    monkeypatch.setattr(provenance, "__file__", str(file))
    assert provenance._commit() == (None, None), "no repository"
    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message=theirs")
    assert provenance._commit() == (None, None)
    git("add", file)
    git("commit", "--quiet", "--message=ours")
    assert provenance._commit() == (git("rev-parse", "HEAD"), False)
    file.write_text("changed")
    assert provenance._commit() == (git("rev-parse", "HEAD") + "+", True)
