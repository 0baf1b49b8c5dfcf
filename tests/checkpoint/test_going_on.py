"""Promise: whatever stopped a run, the next attempt ends with the same bits; a later end extends it."""

import argparse
import errno
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import trainer.train.start.rank
from tests.helpers.forked import attempt, replace, small
from tests.helpers.manifests import least_manifest
from tests.helpers.refusals import named, refused
from tests.helpers.rows import read_rows
from tests.helpers.run_folders import changed, rewrite, same, with_state
from trainer.checkpoint import store
from trainer.cli import make_parser
from trainer.commands.train import find_run, options_of
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import load_recipe, provisional
from trainer.errors import BadInputError
from trainer.host import files
from trainer.runs.folder import (
    write_json,
)
from trainer.train import loop, recording, summary
from trainer.train.components.task import data_of, make_task
from trainer.train.request import Request
from trainer.train.start.job import request_of_rank
from trainer.train.start.rank import train_rank, words_to_resume

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
    assert done.code == 0 and "resumes after step 5" in done.said
    assert same(folder, whole)


def test_what_a_command_needs_to_go_on_depends_on_what_was_typed() -> None:
    assert words_to_resume("trainer train digits --set seed=1") == " (with --resume newest)"
    assert words_to_resume("trainer train digits --resume auto") == " (with --resume newest)"
    for typed in (
        "--resume latest",
        "--out runs/a",
        "--out=runs/a",
        "--resume newest",
        "--resume=newest",
        "--resume runs/a",
    ):
        assert words_to_resume(f"trainer train digits {typed}") == ""


def test_a_run_to_resume_may_be_named(stopped: Path, tmp_path: Path) -> None:
    options = argparse.Namespace(resume=str(stopped), out=None, begin_from=None)
    find_run(options)
    assert (options.out, options.resume) == (stopped, "auto")
    find_run(options)  # a mode stays as it is
    assert (options.out, options.resume) == (stopped, "auto")
    with refused("folder"):
        find_run(argparse.Namespace(resume=str(stopped), out=tmp_path, begin_from=None))


def test_without_any_checkpoint_it_is_no_requeue(tmp_path: Path, stopped: Path) -> None:
    """Neither where nothing could be written, nor where what was there at the start is gone."""
    ended = attempt(tmp_path / "gone", stop_at=8, before=failing(8, remove=5))
    assert ended.code == 1 and named(ended.line, "checkpoint")
    ended = attempt(tmp_path / "new", stop_at=8, before=failing(5, 8))
    assert ended.code == 1 and named(ended.line, "checkpoint")
    folder = changed(tmp_path / "run", stopped)
    shutil.rmtree(folder / "checkpoints" / "step-00000005")
    ended = attempt(folder, stop_at=9, before=failing(9, remove=8))
    assert ended.code == 1 and "no checkpoint" in ended.line
    assert list((folder / "checkpoints").iterdir()) == []


def test_what_an_earlier_attempt_left_counts_while_it_is_there(tmp_path: Path, stopped: Path) -> None:
    folder = changed(tmp_path / "run", stopped)
    ended = attempt(folder, stop_at=9, before=failing(9))
    assert ended.code == 75 and "resumes after step 8" in ended.said.splitlines()[-1]
    # And a damaged one doesn't: nobody has read it in this attempt.
    (folder / "checkpoints" / "step-00000005" / "model.safetensors").unlink()
    ended = attempt(folder, stop_at=9, before=failing(9, remove=8))
    assert ended.code == 1


def test_a_checkpoint_by_time(tmp_path: Path) -> None:
    """Every step takes longer than the time between two."""
    folder = tmp_path / "run"
    recipe = small(checkpoint={"every": 0, "minutes": 1e-9, "keep": 9}, max_steps=4)
    assert attempt(folder, recipe).code == 0
    assert [path.name[-1] for path in sorted((folder / "checkpoints").iterdir())] == ["1", "2", "3", "4"]
    for minutes in (60, 0):
        never = tmp_path / f"never-{minutes}"
        assert attempt(never, small(checkpoint={"every": 0, "minutes": minutes}, max_steps=4)).code == 0
        left = [path.name[-1] for path in (never / "checkpoints").glob("step-*")]
        assert left == ["4"] * (minutes > 0), "the one at the end"


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

    def blind(number: int) -> None:
        def broken(*_: Any) -> Any:
            raise OSError(number, os.strerror(number))

        replace(files, "read_hashed", broken)

    for number in (errno.EIO, errno.EACCES):
        refused = attempt(folder, before=partial(blind, number))
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


def copy_checkpoint(of: Path, to: Path, name: str = "") -> None:
    shutil.copytree(of, to / "checkpoints" / (name or of.name), dirs_exist_ok=True)


def test_a_checkpoint_of_another_run_is_named_and_put_aside(
    tmp_path: Path, stopped: Path, whole: Path
) -> None:
    """Of the same shapes, and newer than all of the run's own."""
    other, folder = tmp_path / "other", changed(tmp_path / "run", stopped)
    assert attempt(other, small(seed=3), stop_at=12).code == 75
    newest = other / "checkpoints" / "step-00000012"
    copy_checkpoint(newest, folder)
    done = attempt(folder, small(checkpoint={"keep": 1}))
    assert done.code == 0, done.said
    assert named(done.said, "step-00000012")
    assert "resumes after step 8" in done.said
    assert same(folder, whole)
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["foreign-step-00000012", "step-00000016"], "it isn't one of those that are kept"


def test_a_foreign_checkpoint_costs_no_own_one_however_often_it_comes(tmp_path: Path, stopped: Path) -> None:
    """Neither by counting among those that are kept, nor because its new name is taken."""
    other, folder = tmp_path / "other", changed(tmp_path / "run", stopped)
    assert attempt(other, small(seed=3), stop_after=12).code == 75
    for after, names in ((9, {"foreign-step-00000012"}), (10, {"foreign-step-00000012-1"})):
        copy_checkpoint(other / "checkpoints" / "step-00000012", folder)
        done = attempt(folder, small(checkpoint={"keep": 1}), stop_after=after)
        assert done.code == 75 and named(done.said, "--stop-after")
        assert named(done.said, f"{', '.join(names)}")
        there = {path.name for path in (folder / "checkpoints").iterdir()}
        assert there >= {f"step-{after:08d}", *names}


def test_a_finished_run_without_a_checkpoint_is_not_begun_again(tmp_path: Path) -> None:
    """By the words that extend it its weights would be lost."""
    folder = tmp_path / "run"
    assert attempt(folder, small(max_steps=3, checkpoint={"every": 0})).code == 0
    before = (folder / "manifest.json").read_bytes()
    refused = attempt(folder, small(max_steps=6))
    assert (refused.code, refused.said) == (2, "")
    assert named(refused.line, folder)
    assert (folder / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"run_id": "00ff"}, "step-00000008 00ff"),
        ({"config_hash": "00ff"}, "step-00000008 configuration"),
    ],
)
def test_checkpoints_that_are_all_foreign_are_one_line(
    tmp_path: Path, stopped: Path, values: dict[str, str], said: str
) -> None:
    folder = changed(tmp_path / "run", stopped)
    rewrite(folder, with_state(**values))
    refused = attempt(folder)
    assert (refused.code, refused.said) == (2, "")
    assert named(refused.line, said)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-00000005",
        "step-00000008",
    ]


def test_a_forced_change_keeps_the_checkpoints_of_before(tmp_path: Path, stopped: Path) -> None:
    folder, faster = changed(tmp_path / "run", stopped), small(optim={"lr": 0.002})
    assert attempt(folder, faster, "force", stop_at=9).code == 75
    shutil.rmtree(folder / "checkpoints" / "step-00000009")
    assert "resumes after step 8" in attempt(folder, faster, stop_at=10).said


def test_a_finished_run_is_extended_from_its_end(tmp_path: Path) -> None:
    """Without a checkpoint of that, what came after the newest one would be trained again."""
    folder = tmp_path / "run"
    assert attempt(folder, small(max_steps=6)).code == 0
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    assert attempt(folder, small(max_steps=6)).code == 0  # nothing to do
    refused = attempt(folder, small(max_steps=9))
    assert refused.code == 2
    assert "it ended at step 6, and its newest good checkpoint is of step 5" in refused.line
    assert "resumes after step 5" in attempt(folder, small(max_steps=9), "force").said


def test_a_finished_run_is_extended_to_the_bits_of_a_longer_one(tmp_path: Path) -> None:
    """By a later end alone; the schedule is constant, so that its length changes nothing."""
    constant: dict[str, Any] = {"optim": {"schedule": "constant", "warmup_steps": 0.0}}
    short, long = (small(max_steps=steps, **constant) for steps in (6, 12))
    folder = tmp_path / "run"
    assert attempt(folder, short).code == 0
    refused = attempt(folder, small(max_steps=12, **constant, seed=1))
    assert refused.code == 2 and "(max_steps: 6" not in refused.line and "seed: 0, now 1" in refused.line
    assert named(attempt(folder, short).said, "finished")
    earlier = attempt(folder, small(max_steps=3, **constant))
    assert earlier.code == 2 and "(max_steps: 6, now 3)" in earlier.line
    done = attempt(folder, long)
    assert done.code == 0, done.said
    assert "resumes after step 6: the run ended at step 6 and is extended" in done.said
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["steps_done"], manifest["status"]) == (12, "finished")
    assert attempt(tmp_path / "long", long).code == 0
    assert same(folder, tmp_path / "long")
    assert named(attempt(folder, long, "force").said, "finished")


def test_an_extension_that_was_stopped_goes_on_and_can_be_extended_again(tmp_path: Path) -> None:
    """Without force: its end was given to be moved. One that never had reached an end is refused as ever."""
    constant: dict[str, Any] = {"optim": {"schedule": "constant", "warmup_steps": 0.0}}

    def to(steps: int) -> Recipe:
        return small(max_steps=steps, **constant)

    folder = tmp_path / "run"
    assert attempt(folder, to(6), stop_after=3).code == 75
    assert "(max_steps: 6, now 9)" in attempt(folder, to(9)).line
    assert attempt(folder, to(6)).code == 0
    assert attempt(folder, to(9), stop_after=7).code == 75
    assert "(max_steps: 9, now 8)" in attempt(folder, to(8)).line, "an earlier end"
    assert attempt(folder, to(9), stop_after=8).code == 75
    done = attempt(folder, to(12))
    assert done.code == 0, done.line
    assert "resumes after step 8: its end moves from step 9 to 12" in done.said
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
    assert named(ended.line, "weights")
    assert "the checkpoint of step 16 is kept: mend that, and the same command ends from there" in ended.line
    assert not list(folder.glob("*.safetensors")) and not list(folder.glob(".tmp-*"))
    done = attempt(folder)
    assert done.code == 0, done.said
    assert same(folder, whole)


def test_a_disk_that_is_full_at_the_last_line_is_one_line(tmp_path: Path) -> None:
    """The weights are written and the manifest isn't; then the end is repeated, with one row of it."""

    def full() -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        replace(summary, "update_manifest", refuse)

    folder = tmp_path / "run"
    ended = attempt(folder, small(max_steps=4), before=full)
    assert ended.code == 1 and "Traceback" not in ended.said
    assert named(ended.line, "manifest.json 4")
    assert attempt(folder, small(max_steps=4)).code == 0
    assert [row["step"] for row in read_rows(folder, ("end",))] == [4]


def test_a_checkpoint_without_its_hashes_is_left_out(tmp_path: Path, stopped: Path) -> None:
    folder = changed(tmp_path / "run", stopped)
    (folder / "checkpoints" / "step-00000008" / "SHA256SUMS").unlink()
    said = attempt(folder, stop_at=9).said
    assert "left out: step-00000008: SHA256SUMS is missing" in said and "resumes after step 5" in said


def test_newest_and_restarts_without_our_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank finds the folder of the newest run, or that of the attempt before."""
    monkeypatch.chdir(tmp_path)
    words = ["data.limit=64", "model.width=4", "parallel.threads=1", "max_steps=1"]
    recipe = load_recipe("digits", words)
    run = Path("runs", "digits-00000000-1")
    run.mkdir(parents=True)
    fingerprint = data_of(recipe, make_task(recipe))
    manifest = least_manifest(
        recipe="digits", config=recipe.model_dump(mode="json"), threads=1, fingerprint=fingerprint
    )
    (run / "manifest.json").write_text(json.dumps(manifest))

    def request(rank: str, *more: str) -> Request:
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "1")):
            monkeypatch.setenv(name, value)
        options = make_parser().parse_args(["train", "digits", *words, *more])
        return request_of_rank(options_of(options), *provisional("digits", words))

    assert {request(rank, "--resume", "newest").folder for rank in "01"} == {run}
    made = train_rank(request("0")).folder
    assert made != run.absolute() and made.is_dir()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert {request(rank).folder for rank in "01"} == {made}


# What fails, and by how many steps it is preceded in that attempt: then the code is 1, else it is bad input.
LATE: dict[str, tuple[int, Callable[[], object], dict[str, Any]]] = {
    "the first manifest": (0, lambda: full(recording, "update_manifest"), {}),
    "the last manifest": (4, lambda: full(summary, "update_manifest"), {}),
    "the last weights": (4, lambda: full(summary, "save_weights"), {}),
    "a batch": (2, lambda: refusing(loop, "train_step", 2), {}),
    "the first batch": (0, lambda: refusing(loop, "train_step", 0), {}),
    "an evaluation": (4, lambda: refusing(loop, "evaluate_run"), {}),
    "a stop": (1, lambda: refusing(loop, "requested"), {}),
    "no checkpoint for --stop-after": (3, failing(3), {"stop_after": 3}),
}


def full(module: Any, name: str) -> None:
    """Lets a function fail as on a full disk."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert hasattr(module, name)
    replace(module, name, refuse)


def refusing(module: Any, name: str, at: int | None = None) -> None:
    """Lets a function of the loop raise bad input: a step, or any call of another one."""
    true = getattr(module, name)

    def refuse(*given: Any) -> Any:
        if at is None or given[-1] == at:
            raise BadInputError("a file is gone; bring it back")
        return true(*given)

    replace(module, name, refuse)


@pytest.mark.parametrize("what", LATE)
def test_bad_input_after_a_step_was_trained_is_a_failure(what: str, tmp_path: Path) -> None:
    """One line, and code 1: the run has begun, so the same command may help, as after any other failure."""
    steps, fault, options = LATE[what]
    ended = attempt(tmp_path / "run", small(max_steps=4), before=fault, **options)
    assert ended.code == (1 if steps else 2), ended
    assert ended.line and "\n" not in ended.line and "Traceback" not in ended.said
    assert attempt(tmp_path / "run", small(max_steps=4)).code == 0


def test_bad_input_of_an_attempt_that_trains_nothing_more_is_bad_input(tmp_path: Path) -> None:
    """Nothing was trained before it was met: repeating the command can't help."""
    assert attempt(tmp_path / "run", stop_after=3).code == 75
    refused = attempt(tmp_path / "run", small(seed=3))
    assert refused.code == 2 and "seed" in refused.line
