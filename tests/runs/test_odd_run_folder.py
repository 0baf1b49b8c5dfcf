"""Promise: whatever was done to a run folder, what is odd in it is one line, and nothing in it is lost."""

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.helpers.forked import attempt, replace, small
from tests.helpers.preparing import prepare_only
from tests.helpers.refusals import named
from tests.helpers.run_folders import changed, rewrite, with_state
from trainer import cli
from trainer.host.disks import Mount
from trainer.train.start import job as start


def with_tensors(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def changed_file(path: Path) -> None:
        tensors = safetensors.torch.load_file(path / f"{name}.safetensors")
        change(tensors)
        safetensors.torch.save_file(tensors, path / f"{name}.safetensors")

    return changed_file


ODD_CHECKPOINTS = {
    "row far": (with_state(row=500), "speaks of later ones"),
    "updates": (with_tensors("optimizer", lambda t: t["updates"].add_(10**6)), "more updates were applied"),
    "slot": (with_tensors("optimizer", lambda t: t.update({"stem.weight/x": torch.ones(1)})), "isn't"),
}


@pytest.fixture
def folder(tmp_path: Path, stopped: Path) -> Path:
    return changed(tmp_path / "run", stopped)


@pytest.mark.parametrize(("change", "said"), ODD_CHECKPOINTS.values(), ids=ODD_CHECKPOINTS)
def test_an_odd_checkpoint_is_one_line(folder: Path, change: Callable[[Path], object], said: str) -> None:
    rewrite(folder, change)
    refused = attempt(folder, code=2)
    assert refused.said == ""
    assert "step-00000008: isn't a checkpoint of this run" in refused.line and said in refused.line


def test_a_diverged_run_goes_on_and_is_known_as_such(tmp_path: Path) -> None:
    """Its losses and metrics aren't finite, for which JSON has no word."""
    folder = tmp_path / "run"
    recipe = small(optim={"name": "sgd", "lr": 1e30}, log={"every": 16}, anomaly={"nonfinite": "off"})
    attempt(folder, recipe, stop_at=12, code=75)
    state = json.loads((folder / "checkpoints" / "step-00000012" / "state.json").read_text())["state"]
    assert state["losses"] == ["nan"]
    attempt(folder, recipe, code=1)
    assert "is diverged already" in attempt(folder, recipe, code=1).said


FORCED: dict[str, tuple[dict[str, Any], str]] = {
    "another optimizer": ({"optim": {"name": "sgd"}}, "optimizer: .* isn't what SGD keeps"),
    "no average": ({"ema": {"decay": 0.0}}, "isn't the same"),
}


@pytest.mark.parametrize(("sections", "said"), FORCED.values(), ids=FORCED)
def test_what_cannot_be_forced_is_one_line(folder: Path, sections: dict[str, Any], said: str) -> None:
    before = (folder / "manifest.json").read_text()
    refused = attempt(folder, small(**sections), "force", code=2)
    assert refused.said == "" and re.search(said, refused.line)
    assert (folder / "manifest.json").read_text() == before


@pytest.mark.parametrize("how", ["container layer", "bind mount"])
def test_a_run_that_goes_with_its_container_says_so_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainer.runs.folder.read_mount", lambda _: Mount("overlay", "/", how))
    monkeypatch.setattr(start, "launch", prepare_only)
    for words, place in (([], "runs"), (["--out", "deep/mine"], "deep/mine")):
        with pytest.raises(AssertionError):  # the ranks would train
            cli.main(["train", "digits", *words])
        told = f'docker run -u "$(id -u):$(id -g)" -v "$PWD"/{Path(place).name}:{tmp_path}/{place} '
        assert (told in capsys.readouterr().err) == (how == "container layer")


def test_a_read_only_folder_is_one_line(folder: Path) -> None:
    def read_only() -> None:
        opened = os.open

        def refuse(path: Any, flags: int, *rest: Any, **names: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return opened(path, flags, *rest, **names)

        replace(os, "open", refuse)

    ended = attempt(folder, before=read_only, code=2)
    assert ended.said == ""
    assert named(ended.line, folder, os.strerror(errno.EROFS))
