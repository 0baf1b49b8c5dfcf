"""Promise: whatever stopped a run, the next attempt ends with the same bits; a later end extends it."""

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainer.train.start.rank
from tests.chaos import ending
from tests.helpers.forked import attempt, replace, small
from tests.helpers.marked import flip
from tests.helpers.refusals import named, refused
from tests.helpers.run_folders import changed, manifest, same
from tests.helpers.steps import ALONE
from trainer.checkpoint import store
from trainer.checkpoint.folder import read
from trainer.config.recipe import Recipe
from trainer.errors import BadInputError
from trainer.host import files
from trainer.host.processes import children
from trainer.runs.folder import write_json
from trainer.runs.manifest import read_stored
from trainer.train import loop, recording, summary
from trainer.train.components.checkpoint_choice import newest_checkpoint
from trainer.train.starting_weights import begins_fresh


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def commits(happens: dict[int, Callable[[Path], object]]) -> Callable[[], None]:
    """Lets something happen before the checkpoints of some steps are written."""

    def put_in() -> None:
        commit = store.commit

        def faulty(folder: Path, step: int, *rest: Any) -> Any:
            if step in happens:
                happens[step](folder)
            return commit(folder, step, *rest)

        replace(store, "commit", faulty)

    return put_in


def test_a_run_that_is_killed_while_it_writes_goes_on_with_the_same_bits(tmp_path: Path, whole: Path) -> None:
    """A checkpoint that was damaged is named, and the one before is used."""
    folder = tmp_path / "run"
    die = commits({15: lambda _: os.kill(os.getpid(), signal.SIGKILL)})
    attempt(folder, before=die, code=-signal.SIGKILL)
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    flip(damaged / "checkpoints" / "step-00000010" / "optimizer.safetensors", -1, 0)
    for one in (folder, damaged):
        attempt(one, code=0)
        assert ending(one) == ending(whole)
    assert named(manifest(damaged)["notes"], "step-00000010", "optimizer.safetensors")


def test_a_fault_of_the_disk_does_not_end_the_training(tmp_path: Path, whole: Path) -> None:
    """Full for a checkpoint; then the folder of checkpoints is deleted."""
    attempt(tmp_path / "run", before=commits({10: no_space, 15: shutil.rmtree}), code=0)
    assert ending(tmp_path / "run") == ending(whole)
    assert store.newest_good(tmp_path / "run" / "checkpoints")[0] is not None


def test_a_killed_loader_worker_fails_the_run_and_it_can_go_on(tmp_path: Path, whole: Path) -> None:
    """Loader workers change no bit."""

    def kill_workers(_: Path) -> None:
        for worker in children(os.getpid()):
            os.kill(worker, signal.SIGKILL)

    recipe = small(data={"workers": 2, "resident": False})
    attempt(tmp_path / "run", recipe, before=commits({10: kill_workers}), code=1)
    attempt(tmp_path / "run", recipe, code=0)
    assert ending(tmp_path / "run") == ending(whole)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again_unasked(
    tmp_path: Path, stopped: Path
) -> None:
    folder = changed(tmp_path / "run", stopped)
    for path in (folder / "checkpoints").glob("step-*"):
        (path / "model.safetensors").unlink()
    with refused("model.safetensors"):
        newest_checkpoint(folder, "auto", ALONE)
    assert newest_checkpoint(folder, "force", ALONE)[0] is None
    assert [begins_fresh(folder, read_stored(folder), mode) for mode in ("auto", "force")] == [False, True]


def test_a_checkpoint_of_this_attempt_is_enough_to_go_on(tmp_path: Path) -> None:
    """The last write fails; the one before is named."""
    ended = attempt(tmp_path / "run", stop_at=8, before=commits({8: no_space}), code=75)
    assert named(ended.said, "SIGTERM 8 5")


def test_without_any_checkpoint_it_is_no_requeue(tmp_path: Path, stopped: Path) -> None:
    """Neither where nothing could be written, nor where what was there at the start is gone."""
    ended = attempt(tmp_path / "new", stop_at=8, before=commits({5: no_space, 8: no_space}), code=1)
    assert named(ended.line, "checkpoint")
    folder = changed(tmp_path / "run", stopped)

    def gone(checkpoints: Path) -> None:
        shutil.rmtree(checkpoints)
        no_space()

    ended = attempt(folder, stop_at=9, before=commits({9: gone}), code=1)
    assert named(ended.line, "checkpoint")


def test_threads_are_those_that_the_run_was_begun_with(tmp_path: Path, stopped: Path) -> None:
    folder = changed(tmp_path / "run", stopped)
    facts = manifest(folder)
    facts["config"]["parallel"]["threads"] = "auto"
    write_json(folder / "manifest.json", {**facts, "threads": 1})

    # A larger machine, and not the other way round: OpenMP's threads don't survive a fork, more can crash it.
    larger = lambda: replace(trainer.train.start.rank, "threads_per_rank", lambda *_: 3)  # noqa: E731
    attempt(folder, small(parallel={"threads": "auto"}), stop_at=9, before=larger, code=75)
    assert manifest(folder)["threads"] == 1
    assert read(folder / "checkpoints" / "step-00000009").state["threads"] == 1


def test_a_checkpoint_that_cannot_be_read_now_is_kept(tmp_path: Path, stopped: Path) -> None:
    """A disk that fails for a moment is no reason to give up what it holds."""
    folder = changed(tmp_path / "run", stopped)
    rows = (folder / "metrics.jsonl").read_text()

    def broken(*_: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    ended = attempt(folder, before=lambda: replace(files, "read_hashed", broken), code=2)
    assert named(ended.line, "step-00000008")
    assert (folder / "metrics.jsonl").read_text() == rows
    assert newest_checkpoint(folder, "auto", ALONE)[0] is not None


def test_a_checkpoint_of_another_run_is_named_and_put_aside(
    tmp_path: Path, stopped: Path, whole: Path
) -> None:
    """Of the same shapes, and newer than all of the run's own."""
    other, folder = tmp_path / "other", changed(tmp_path / "run", stopped)
    attempt(other, small(seed=3), stop_at=12, code=75)
    newest = other / "checkpoints" / "step-00000012"
    shutil.copytree(newest, folder / "checkpoints" / newest.name)
    done = attempt(folder, small(checkpoint={"keep": 1}), code=0)
    assert named(done.said, "step-00000012 8")
    assert same(folder, whole)
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["foreign-step-00000012", "step-00000016"], "it isn't one of those that are kept"


def test_a_finished_run_is_not_trained_again(whole: Path) -> None:
    def times() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in whole.iterdir() if path.name != ".lock"}

    before = times()
    again = attempt(whole, code=0)
    assert named(again.said, "finished")
    assert times() == before


def to(steps: int, **changes: Any) -> Recipe:
    """The same run with another end: the schedule is constant, so that its length changes nothing."""
    return small(max_steps=steps, optim={"schedule": "constant", "warmup_steps": 0.0}, **changes)


def test_an_extension_that_was_stopped_goes_on_and_can_be_extended_again(tmp_path: Path) -> None:
    """To the bits of a longer run, by a later end alone; what never had reached an end is refused as ever."""
    folder, without = tmp_path / "run", tmp_path / "without"
    attempt(folder, to(6), stop_after=3, code=75)
    assert named(attempt(folder, to(9)).line, "max_steps 6 9")
    attempt(folder, to(6), code=0)
    shutil.copytree(folder, without)
    for recipe, names in ((to(12, seed=1), "seed 0 1"), (to(3), "max_steps 6 3")):
        ended = attempt(folder, recipe, code=2)
        assert named(ended.line, names)
        assert named(ended.line, "max_steps") == (recipe.seed == 0)
    attempt(folder, to(9), stop_after=7, code=75)
    assert named(attempt(folder, to(8)).line, "max_steps 9 8"), "an earlier end"
    attempt(folder, to(12), code=0)
    facts = manifest(folder)
    assert (facts["steps_done"], facts["status"]) == (12, "finished")
    attempt(tmp_path / "long", to(12), code=0)
    assert same(folder, tmp_path / "long")
    # Without its end's checkpoint it would train again what came after the newest one, or all.
    before = (without / "manifest.json").read_bytes()
    for gone, names in (("checkpoints/step-00000006", "6 5"), ("checkpoints", str(without))):
        shutil.rmtree(without / gone)
        ended = attempt(without, to(9))
        assert (ended.code, ended.said) == (2, "") and named(ended.line, names)
    assert (without / "manifest.json").read_bytes() == before


def test_a_disk_that_is_full_at_the_end_loses_no_training(tmp_path: Path, whole: Path) -> None:
    """One line; then the same command writes the weights from the last checkpoint."""

    def refuse(path: Path, _: Any) -> None:
        path.write_bytes(b"half")
        no_space()

    folder = tmp_path / "run"
    ended = attempt(folder, before=lambda: replace(recording, "write_file", refuse), code=1)
    assert "Traceback" not in ended.said
    assert named(ended.line, "weights 16")
    assert not list(folder.glob("*.safetensors")) and not list(folder.glob(".tmp-*"))
    attempt(folder, code=0)
    assert same(folder, whole)


TRAIN_STEP = vars(loop)["train_step"]


def no_batch(*given: Any) -> Any:
    if given[-1] == 2:
        raise BadInputError("a file is gone; bring it back")
    return TRAIN_STEP(*given)


# What fails, and by how many steps it is preceded in that attempt: then the code is 1, else it is bad input.
LATE: dict[str, tuple[int, Callable[[], object], dict[str, Any]]] = {
    "the first manifest": (0, lambda: replace(recording, "update_manifest", no_space), {}),
    "the last manifest": (4, lambda: replace(summary, "update_manifest", no_space), {}),
    "a batch": (2, lambda: replace(loop, "train_step", no_batch), {}),
    "no checkpoint for --stop-after": (3, commits({3: no_space}), {"stop_after": 3}),
}


@pytest.mark.parametrize("what", LATE)
def test_bad_input_after_a_step_was_trained_is_a_failure(what: str, tmp_path: Path) -> None:
    """One line, and code 1: the run has begun, so the same command may help, as after any other failure."""
    steps, fault, options = LATE[what]
    ended = attempt(tmp_path / "run", small(max_steps=4), before=fault, **options)
    assert ended.code == (1 if steps else 2), ended
    assert ended.line and "\n" not in ended.line and "Traceback" not in ended.said
