"""Promise: a fault of disk, loader worker or clock costs no bit; a damaged checkpoint is named."""

import errno
import json
import mmap
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chaos import Ending, ending, kinds, recipe_of, start, undisturbed
from tests.helpers.refusals import refused
from tests.helpers.waiting import SECONDS
from trainer.checkpoint import store
from trainer.checkpoint.store import newest_good
from trainer.config.recipe import Recipe
from trainer.distributed.parallel import World
from trainer.host.processes import children
from trainer.train.components.checkpoint_choice import newest_checkpoint

ALONE = World(0, 1, 0, torch.device("cpu"), None)
KIND = {**kinds()[0], "every": 3}


def short(**changes: Any) -> Recipe:
    """The recipe of that kind, of few steps; in the midst of an evaluation's and of a row's."""
    values = recipe_of({**KIND, **changes}).model_dump(mode="json")
    return Recipe.model_validate({**values, "max_steps": 18, "evaluation": {"every": "8 steps"}})


def disturbed_disk(fault: str, folder: Path, phase: mmap.mmap) -> int | None:
    """A short run in a fork whose disk has a fault while checkpoints are written; its exit code."""
    recipe = short()
    commit, calls = store.commit, []

    def faulty(*arguments: Any) -> Any:
        calls.append(arguments)
        if fault == "killed before" and len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "killed after" and len(calls) == 3:
            commit(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "deleted" and len(calls) == 3:
            shutil.rmtree(folder / "checkpoints")
        if fault == "full" and len(calls) in (2, 3):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return commit(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "commit", faulty)
        process = start(recipe, folder, phase)
        process.join(SECONDS)
    return process.exitcode


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Ending:
    """How a short run in a fork ends that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    undisturbed(short(), folder)
    return ending(folder)


@pytest.mark.parametrize("fault", ["full", "deleted"])
def test_a_fault_of_the_disk_does_not_end_the_training(tmp_path: Path, wanted: Ending, fault: str) -> None:
    """Full for two checkpoints, or the folder of checkpoints deleted under way."""
    assert disturbed_disk(fault, tmp_path, mmap.mmap(-1, 1)) == 0
    assert ending(tmp_path) == wanted
    assert newest_good(tmp_path / "checkpoints")[0] is not None


@pytest.mark.parametrize("fault", ["killed before", "killed after"])
def test_a_run_that_is_killed_while_it_writes_goes_on_with_the_same_bits(
    tmp_path: Path, wanted: Ending, killed: Path, fault: str
) -> None:
    phase = mmap.mmap(-1, 1)
    folder = tmp_path / "run"
    if fault == "killed after":
        shutil.copytree(killed, folder)
    else:
        folder.mkdir()
        assert disturbed_disk(fault, folder, phase) == -signal.SIGKILL
    goes_on(folder, short(), phase, wanted)


def goes_on(folder: Path, recipe: Recipe, phase: mmap.mmap, wanted: Ending) -> None:
    """Trains to the end."""
    process = start(recipe, folder, phase)
    process.join(SECONDS)
    assert process.exitcode == 0
    assert ending(folder) == wanted


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is killed right after its third checkpoint; nobody changes it."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    folder.mkdir()
    assert disturbed_disk("killed after", folder, mmap.mmap(-1, 1)) == -signal.SIGKILL
    return folder


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, wanted: Ending, killed: Path
) -> None:
    folder = shutil.copytree(killed, tmp_path / "run")
    newest = max((folder / "checkpoints").glob("step-*"))
    file = newest / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[random.Random(0).randrange(len(data))] ^= 1
    file.write_bytes(data)
    goes_on(folder, short(), mmap.mmap(-1, 1), wanted)
    notes = json.loads((folder / "manifest.json").read_text())["notes"]
    assert any(newest.name in note and "optimizer.safetensors" in note for note in notes), notes


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again_unasked(
    tmp_path: Path, killed: Path
) -> None:
    folder = shutil.copytree(killed, tmp_path / "run")
    for path in (folder / "checkpoints").glob("step-*"):
        (path / "model.safetensors").unlink()
    with refused("model.safetensors"):
        newest_checkpoint(folder, "auto", ALONE)
    assert newest_checkpoint(folder, "force", ALONE)[0] is None


def test_a_killed_loader_worker_fails_the_run_and_it_can_go_on(tmp_path: Path, wanted: Ending) -> None:
    """Loader workers change no bit."""
    phase, recipe = mmap.mmap(-1, 1), short(workers=2)
    commit = store.commit

    def killing(*arguments: Any) -> Any:
        commit(*arguments)
        for worker in children(os.getpid()):
            os.kill(worker, signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "commit", killing)
        process = start(recipe, tmp_path, phase)
        process.join(SECONDS)
    assert process.exitcode == 1
    goes_on(tmp_path, recipe, phase, wanted)
