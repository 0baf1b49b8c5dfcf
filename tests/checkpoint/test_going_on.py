"""Promise: whatever stopped a run, the next attempt ends with the same bits; a later end extends it."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainer.train.start.rank
from tests.helpers.forked import attempt, replace, small
from tests.helpers.refusals import named
from tests.helpers.run_folders import changed, same
from trainer.checkpoint import store
from trainer.config.recipe import Recipe
from trainer.errors import BadInputError
from trainer.host import files
from trainer.runs.folder import (
    write_json,
)
from trainer.train import loop, recording, summary

# What a stop leaves is what is on the disk.


def failing(*steps: int, remove: int | None = None) -> Callable[[], None]:
    """Refuses to write the checkpoints of some steps; removes that of another before."""

    def put_in() -> None:
        commit = store.commit

        def faulty(folder: Path, step: int, *rest: Any) -> Any:
            if step in steps:
                if remove is not None:
                    shutil.rmtree(folder / f"step-{remove:08d}")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return commit(folder, step, *rest)

        replace(store, "commit", faulty)

    return put_in


def test_a_checkpoint_of_this_attempt_is_enough_to_go_on(tmp_path: Path, whole: Path) -> None:
    """The last write fails; the one before is named, and used."""
    folder = tmp_path / "run"
    ended = attempt(folder, stop_at=8, before=failing(8))
    assert ended.code == 75
    assert named(ended.said, "SIGTERM 8 5")
    done = attempt(folder)
    assert done.code == 0 and same(folder, whole)


def test_without_any_checkpoint_it_is_no_requeue(tmp_path: Path, stopped: Path) -> None:
    """Neither where nothing could be written, nor where what was there at the start is gone."""
    ended = attempt(tmp_path / "new", stop_at=8, before=failing(5, 8))
    assert ended.code == 1 and named(ended.line, "checkpoint")
    folder = changed(tmp_path / "run", stopped)
    shutil.rmtree(folder / "checkpoints" / "step-00000005")
    ended = attempt(folder, stop_at=9, before=failing(9, remove=8))
    assert ended.code == 1 and named(ended.line, "checkpoint")


def test_threads_are_those_that_the_run_was_begun_with(tmp_path: Path, stopped: Path) -> None:
    folder = changed(tmp_path / "run", stopped)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["config"]["parallel"]["threads"] = "auto"
    write_json(folder / "manifest.json", {**manifest, "threads": 1})

    def on_a_larger_machine() -> None:
        # Not the other way round: OpenMP's threads don't survive a fork, and more of them can crash it.
        replace(trainer.train.start.rank, "threads_per_rank", lambda *_: 3)

    asked = small(parallel={"threads": "auto"})
    assert attempt(folder, asked, stop_at=9, before=on_a_larger_machine).code == 75
    assert json.loads((folder / "manifest.json").read_text())["threads"] == 1
    state = json.loads((folder / "checkpoints" / "step-00000009" / "state.json").read_text())["state"]
    assert state["threads"] == 1


# A disk that fails for a moment is no reason to give up what it holds.


def test_a_checkpoint_that_cannot_be_read_now_is_kept(tmp_path: Path, stopped: Path, whole: Path) -> None:
    folder = changed(tmp_path / "run", stopped)
    rows = (folder / "metrics.jsonl").read_text()

    def blind() -> None:
        def broken(*_: Any) -> Any:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        replace(files, "read_hashed", broken)

    refused = attempt(folder, before=blind)
    assert refused.code == 2
    assert named(refused.line, "step-00000008")
    assert (folder / "metrics.jsonl").read_text() == rows
    assert attempt(folder).code == 0
    assert same(folder, whole)


# A rank started by torchrun itself.


def test_a_finished_run_is_not_trained_again(whole: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in whole.iterdir()}
    again = attempt(whole)
    assert again.code == 0 and named(again.said, "finished")
    assert {path.name: path.stat().st_mtime_ns for path in whole.iterdir() if path.name != ".lock"} == {
        name: at for name, at in before.items() if name != ".lock"
    }


def test_a_checkpoint_of_another_run_is_named_and_put_aside(
    tmp_path: Path, stopped: Path, whole: Path
) -> None:
    """Of the same shapes, and newer than all of the run's own."""
    other, folder = tmp_path / "other", changed(tmp_path / "run", stopped)
    assert attempt(other, small(seed=3), stop_at=12).code == 75
    newest = other / "checkpoints" / "step-00000012"
    shutil.copytree(newest, folder / "checkpoints" / newest.name)
    done = attempt(folder, small(checkpoint={"keep": 1}))
    assert done.code == 0, done.said
    assert named(done.said, "step-00000012 8")
    assert same(folder, whole)
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["foreign-step-00000012", "step-00000016"], "it isn't one of those that are kept"


def test_a_finished_run_without_a_checkpoint_is_not_begun_again(tmp_path: Path) -> None:
    """By the words that extend it its weights would be lost."""
    folder = tmp_path / "run"
    assert attempt(folder, small(max_steps=3, checkpoint={"every": 0})).code == 0
    before = (folder / "manifest.json").read_bytes()
    refused = attempt(folder, small(max_steps=6))
    assert (refused.code, refused.said) == (2, "")
    assert named(refused.line, folder)
    assert (folder / "manifest.json").read_bytes() == before


def test_a_finished_run_is_extended_from_its_end(tmp_path: Path) -> None:
    """Without a checkpoint of that, what came after the newest one would be trained again."""
    folder = tmp_path / "run"
    assert attempt(folder, small(max_steps=6)).code == 0
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    assert attempt(folder, small(max_steps=6)).code == 0  # nothing to do
    refused = attempt(folder, small(max_steps=9))
    assert refused.code == 2 and named(refused.line, "6 5")
    assert attempt(folder, small(max_steps=9), "force").code == 0


def test_a_finished_run_is_extended_to_the_bits_of_a_longer_one(tmp_path: Path) -> None:
    """By a later end alone; the schedule is constant, so that its length changes nothing."""
    constant: dict[str, Any] = {"optim": {"schedule": "constant", "warmup_steps": 0.0}}
    short, long = (small(max_steps=steps, **constant) for steps in (6, 12))
    folder = tmp_path / "run"
    assert attempt(folder, short).code == 0
    refused = attempt(folder, small(max_steps=12, **constant, seed=1))
    assert refused.code == 2 and "max_steps" not in refused.line and named(refused.line, "seed 0 1")
    earlier = attempt(folder, small(max_steps=3, **constant))
    assert earlier.code == 2 and named(earlier.line, "max_steps 6 3")
    done = attempt(folder, long)
    assert done.code == 0, done.said
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["steps_done"], manifest["status"]) == (12, "finished")
    assert attempt(tmp_path / "long", long).code == 0
    assert same(folder, tmp_path / "long")


def test_an_extension_that_was_stopped_goes_on_and_can_be_extended_again(tmp_path: Path) -> None:
    """Without force: its end was given to be moved. One that never had reached an end is refused as ever."""
    constant: dict[str, Any] = {"optim": {"schedule": "constant", "warmup_steps": 0.0}}

    def to(steps: int) -> Recipe:
        return small(max_steps=steps, **constant)

    folder = tmp_path / "run"
    assert attempt(folder, to(6), stop_after=3).code == 75
    assert named(attempt(folder, to(9)).line, "max_steps 6 9")
    assert attempt(folder, to(6)).code == 0
    assert attempt(folder, to(9), stop_after=7).code == 75
    assert named(attempt(folder, to(8)).line, "max_steps 9 8"), "an earlier end"
    done = attempt(folder, to(12))
    assert done.code == 0, done.line
    assert attempt(tmp_path / "long", to(12)).code == 0
    assert same(folder, tmp_path / "long")


def test_a_disk_that_is_full_at_the_end_loses_no_training(tmp_path: Path, whole: Path) -> None:
    """One line; then the same command writes the weights from the last checkpoint."""

    def full() -> None:
        from trainer.train import recording

        def refuse(path: Path, _: Any) -> None:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        replace(recording, "write_file", refuse)

    folder = tmp_path / "run"
    ended = attempt(folder, before=full)
    assert ended.code == 1 and "Traceback" not in ended.said
    assert named(ended.line, "weights 16")
    assert not list(folder.glob("*.safetensors")) and not list(folder.glob(".tmp-*"))
    done = attempt(folder)
    assert done.code == 0, done.said
    assert same(folder, whole)


def refusing_a_batch() -> None:
    true = vars(loop)["train_step"]

    def refuse(*given: Any) -> Any:
        if given[-1] == 2:
            raise BadInputError("a file is gone; bring it back")
        return true(*given)

    replace(loop, "train_step", refuse)


# What fails, and by how many steps it is preceded in that attempt: then the code is 1, else it is bad input.
LATE: dict[str, tuple[int, Callable[[], object], dict[str, Any]]] = {
    "the first manifest": (0, lambda: full(recording, "update_manifest"), {}),
    "the last manifest": (4, lambda: full(summary, "update_manifest"), {}),
    "a batch": (2, refusing_a_batch, {}),
    "no checkpoint for --stop-after": (3, failing(3), {"stop_after": 3}),
}


def full(module: Any, name: str) -> None:
    """Lets a function fail as on a full disk."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert hasattr(module, name)
    replace(module, name, refuse)


@pytest.mark.parametrize("what", LATE)
def test_bad_input_after_a_step_was_trained_is_a_failure(what: str, tmp_path: Path) -> None:
    """One line, and code 1: the run has begun, so the same command may help, as after any other failure."""
    steps, fault, options = LATE[what]
    ended = attempt(tmp_path / "run", small(max_steps=4), before=fault, **options)
    assert ended.code == (1 if steps else 2), ended
    assert ended.line and "\n" not in ended.line and "Traceback" not in ended.said
    assert attempt(tmp_path / "run", small(max_steps=4)).code == 0
