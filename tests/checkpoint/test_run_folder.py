"""Promise: whatever was done to a run folder, the next attempt goes on to the same bits or says why not."""

import argparse
import contextlib
import errno
import hashlib
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import trainer.train.attempt
from tests.helpers.few_pictures import make_folder
from tests.helpers.forked import attempt, replace, small
from tests.helpers.rows import read_rows
from trainer import cli
from trainer.checkpoint import store
from trainer.config.model import ModelConfig
from trainer.config.recipe import Recipe
from trainer.data import dataset
from trainer.data.dataset import ArrayDataset, spread
from trainer.data.formats.files import in_folder
from trainer.errors import BadInputError
from trainer.host import files
from trainer.host.disks import Mount
from trainer.models.images import build_model
from trainer.observe.sinks import keep_rows
from trainer.train import between_steps, start, summary
from trainer.train.resume import read_stored
from trainer.train.run import make_task
from trainer.train.run_folder import check_space, claim_folder, new_folder, remove_unused, write_json
from trainer.train.run_lock import lock


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The final weights and average."""
    return {
        f"{file.stem}/{name}": tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in safetensors.torch.load_file(file).items()
    }


def same(folder: Path, other: Path) -> bool:
    ours, theirs = weights(folder), weights(other)
    return (
        bool(ours)
        and ours.keys() == theirs.keys()
        and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert attempt(folder).code == 0
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped after step 8: checkpoints of steps 5 and 8."""
    folder = tmp_path_factory.mktemp("runs") / "stopped"
    assert attempt(folder, stop_at=8).code == 75
    return folder


# One run at a time.


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Any]:
    """A process that holds a folder's lock, and has a child of its own that outlives it."""

    def hold(ready: Any) -> None:
        lock(folder)
        if (child := os.fork()) == 0:
            time.sleep(600)
            os._exit(0)
        ready.send(child)
        time.sleep(600)

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(theirs,))
    process.start()
    child = ours.recv()
    try:
        yield process
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)


def test_two_never_train_in_one_folder(tmp_path: Path) -> None:
    """And the lock goes with its process, not with what that process forked."""
    folder = tmp_path / "run"
    folder.mkdir()
    with held(folder) as holder:
        second = attempt(folder)
        assert second.code == 2
        assert f"a run is going on there (process {holder.pid} on " in second.line
        assert [path.name for path in folder.iterdir()] == [".lock"], "nothing was written"
        holder.kill()
        holder.join()
        assert attempt(folder, stop_at=1).code == 75


def test_a_running_rank_holds_the_lock(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def look() -> None:
        from trainer.train import attempt as module

        def refused(*_: Any) -> None:
            child = os.fork()
            if child == 0:
                try:
                    lock(folder)
                except BadInputError:
                    os._exit(7)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            print("refused")

        replace(module, "read_stored", refused)

    assert "refused" in attempt(folder, stop_at=1, before=look).said


def test_what_a_killed_start_left_is_no_hindrance(tmp_path: Path) -> None:
    for name in (".lock", ".writable", "manifest.tmp"):
        (tmp_path / name).touch()
    assert not claim_folder(tmp_path)
    (tmp_path / "mine").touch()
    with pytest.raises(BadInputError, match="isn't empty"):
        claim_folder(tmp_path)
    remove_unused(tmp_path)
    assert (tmp_path / "mine").exists()
    (tmp_path / "mine").unlink()
    with held(tmp_path):
        remove_unused(tmp_path)
        assert tmp_path.exists(), "somebody is about to begin there"
    while tmp_path.exists():  # it takes a moment to end
        remove_unused(tmp_path)


# The data and the device are part of a run.


def changed(folder: Path, stopped: Path) -> Path:
    """A copy of the stopped run, to be changed."""
    return Path(shutil.copytree(stopped, folder))


def test_changed_data_is_refused_and_can_be_forced(tmp_path: Path, stopped: Path) -> None:
    folder = changed(tmp_path / "run", stopped)

    def other_pixel() -> None:
        from trainer.train import attempt as module

        def task_of(recipe: Recipe) -> Any:
            task: Any = make_task(recipe)
            task.evaluation_data.arrays["image"][3, 0, 0, 0] ^= 1
            return task

        replace(module, "make_task", task_of)

    refused = attempt(folder, before=other_pixel)
    assert refused.code == 2
    assert "(evaluation data: 8 samples " in refused.line and "training data" not in refused.line
    assert attempt(folder, mode="force", before=other_pixel).code == 0
    newest = max((folder / "checkpoints").iterdir())
    state = json.loads((newest / "state.json").read_text())["state"]
    assert state["fingerprint"].keys() == {"training data", "evaluation data", "order"}


def test_another_kind_of_device_is_refused(tmp_path: Path, stopped: Path) -> None:
    folder = changed(tmp_path / "run", stopped)
    manifest = json.loads((folder / "manifest.json").read_text())
    write_json(folder / "manifest.json", {**manifest, "device": {"kind": "cuda"}})
    refused = attempt(folder)
    assert refused.code == 2 and "(trained on cuda, now cpu)" in refused.line
    assert attempt(folder, mode="force").code == 0


def test_a_fingerprint_tells_arrays_apart() -> None:
    image, label = np.arange(4 * 3, dtype=np.uint8).reshape(4, 3), np.arange(4)
    own = ArrayDataset({"image": image, "label": label}).fingerprint()
    assert own == ArrayDataset({"label": label.copy(), "image": np.asfortranarray(image)}).fingerprint()
    others: list[Any] = [
        {"image": image ^ 1, "label": label},
        {"image": image, "label": label[::-1]},
        {"image": image[:3], "label": label[:3]},
        {"image": image.reshape(4, 1, 3), "label": label},
        {"image": image.view(np.int8), "label": label},
        {"picture": image, "label": label},
    ]
    found = {own, *(ArrayDataset(arrays).fingerprint() for arrays in others)}
    assert len(found) == 1 + len(others)


def test_a_fingerprint_of_many_bytes_reads_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    large = np.zeros((1 << 16, 1 << 14), np.uint8)  # 1 GiB, of which hardly a page is ever made
    rows = 0

    def counted(count: int, budget: int) -> Any:
        nonlocal rows
        found = spread(count, budget)
        rows += len(found)
        return found

    monkeypatch.setattr(dataset, "spread", counted)
    first = ArrayDataset({"x": large}).fingerprint()
    assert 0 < rows * large.shape[1] <= 1 << 25
    large[-1, -1] = 1
    assert ArrayDataset({"x": large}).fingerprint() != first, "the ends belong to what is hashed"


def test_a_fingerprint_tells_folders_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_folder(tmp_path / "data") / "train"

    def fingerprint() -> str:
        return in_folder(root).fingerprint()

    own = fingerprint()
    moved = Path(shutil.copytree(root, tmp_path / "moved"))
    assert in_folder(moved).fingerprint() == own, "wherever it lies"
    first = min(root.rglob("*.png"))
    data = first.read_bytes()
    first.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    other_content = fingerprint()
    first.write_bytes(data + b"\0")
    monkeypatch.setattr("trainer.data.formats.files._CONTENTS", 0)
    without_content = fingerprint()
    first.write_bytes(data)
    other_size = fingerprint()
    first.rename(first.with_name("renamed.png"))
    other_name = fingerprint()
    assert len({own, other_content, without_content, other_size, other_name}) == 5


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
    assert "stopped by SIGTERM after step 8; the same command goes on after step 5" in ended.said
    done = attempt(folder)
    assert done.code == 0 and "goes on after step 5" in done.said
    assert same(folder, whole)


def test_what_a_command_needs_to_go_on_depends_on_what_was_typed() -> None:
    assert between_steps._with("trainer train digits --set seed=1") == " (with --resume newest)"
    for typed in ("--out runs/a", "--out=runs/a", "--resume newest", "--resume=newest"):
        assert between_steps._with(f"trainer train digits {typed}") == ""


def test_without_any_checkpoint_it_is_no_requeue(tmp_path: Path, stopped: Path) -> None:
    """Neither where nothing could be written, nor where what was there at the start is gone."""
    ended = attempt(tmp_path / "gone", stop_at=8, before=failing(8, remove=5))
    assert ended.code == 1 and "no checkpoint could be written to go on from" in ended.line
    ended = attempt(tmp_path / "new", stop_at=8, before=failing(5, 8))
    assert ended.code == 1 and "no checkpoint could be written to go on from" in ended.line
    folder = changed(tmp_path / "run", stopped)
    shutil.rmtree(folder / "checkpoints" / "step-00000005")
    ended = attempt(folder, stop_at=9, before=failing(9, remove=8))
    assert ended.code == 1 and "no checkpoint" in ended.line
    assert list((folder / "checkpoints").iterdir()) == []


def test_what_an_earlier_attempt_left_counts_while_it_is_there(tmp_path: Path, stopped: Path) -> None:
    folder = changed(tmp_path / "run", stopped)
    ended = attempt(folder, stop_at=9, before=failing(9))
    assert ended.code == 75 and "goes on after step 8" in ended.said.splitlines()[-1]
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
        replace(trainer.train.attempt, "threads_per_rank", lambda *_: 3)

    asked = small(parallel={"threads": "auto"})
    assert attempt(folder, asked, stop_at=9, before=on_a_larger_machine).code == 75
    assert json.loads((folder / "manifest.json").read_text())["threads"] == 1
    state = json.loads((folder / "checkpoints" / "step-00000009" / "state.json").read_text())["state"]
    assert state["threads"] == 1


# A disk that fails for a moment is no reason to give up what it holds.


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_checkpoint_that_cannot_be_read_now_is_kept(
    tmp_path: Path, stopped: Path, whole: Path, number: int
) -> None:
    folder = changed(tmp_path / "run", stopped)
    rows = (folder / "metrics.jsonl").read_text()

    def blind() -> None:
        def broken(*_: Any) -> Any:
            raise OSError(number, os.strerror(number))

        replace(files, "read_hashed", broken)

    refused = attempt(folder, before=blind)
    assert refused.code == 2
    assert re.search(r"step-00000008: \S+ can't be read now \(.*mend that, or move it away", refused.line)
    assert (folder / "metrics.jsonl").read_text() == rows
    assert attempt(folder).code == 0
    assert same(folder, whole)


# Bookkeeping.


BAD_ROWS = {
    "bad byte": b"\xff\xfe\x00\n",
    "infinity": b'{"kind": "train", "step": Infinity}\n',
    "deep": b"[" * 100_000 + b"\n",
    "no object": b"3\n",
    "another separator": "\u2028\n".encode(),
}


@pytest.mark.parametrize("bad", BAD_ROWS.values(), ids=BAD_ROWS)
def test_rows_that_cannot_be_read_are_cut(tmp_path: Path, stopped: Path, whole: Path, bad: bytes) -> None:
    folder = changed(tmp_path / "run", stopped)
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join([*lines[:2], bad, *lines[2:]]) + b'{"torn')
    done = attempt(folder)
    assert done.code == 0
    assert "metrics.jsonl: 1 lines that can't be read were removed" in done.said
    steps = [[row["step"] for row in read_rows(one)] for one in (folder, whole)]
    assert steps[0] == steps[1]


def test_a_line_that_a_kill_cut_off_needs_no_words(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n{"step": 9}\n{"win')
    assert keep_rows(file, 5) == 0
    assert file.read_bytes() == b'{"step": 1}\n'


@pytest.mark.parametrize("bad", [b"2,\xff\n", b"\n", b"x,1\n"])
def test_a_table_is_cut_likewise(tmp_path: Path, bad: bytes) -> None:
    file = tmp_path / "train.csv"
    file.write_bytes(b"step,loss\r\n1,0.5\r\n" + bad + b"9,0.1\r\n")
    assert keep_rows(file, 5) == 1
    assert file.read_bytes() == b"step,loss\r\n1,0.5\r\n"
    file.write_bytes(b"\xff\n1,0.5\n")
    assert keep_rows(file, 5) == 2
    assert file.read_bytes() == b""


def test_the_manifest_comes_first_and_all_is_on_the_disk_before_the_end(tmp_path: Path) -> None:
    """The order in which files get their names, and that each was synced before, with its folder after."""

    def watch() -> None:
        fsync, move = os.fsync, Path.replace

        def synced(file: int) -> None:
            print("sync", Path(f"/proc/self/fd/{file}").readlink().name)
            fsync(file)

        def moved(path: Path, to: Path) -> Path:
            print("move", to.name)
            return move(path, to)

        replace(os, "fsync", synced)
        replace(Path, "replace", moved)

    folder = tmp_path / "run"
    said = attempt(folder, small(max_steps=2), before=watch).said
    events = [tuple(line.split()) for line in said.splitlines() if line.startswith(("sync ", "move "))]
    moves = [name for kind, name in events if kind == "move"]
    weights = ["model.safetensors", "ema.safetensors"]
    assert moves == ["manifest.json", "config.yaml", *weights, "manifest.json", "report.html"]
    for number, (kind, name) in enumerate(events):
        if kind == "move" and name != "report.html":  # which can be written again at any time
            assert events[number - 1] == ("sync", f"{Path(name).stem}.tmp")
            assert events[number + 1] == ("sync", folder.name)


def test_a_start_that_is_killed_anywhere_can_be_repeated(tmp_path: Path) -> None:
    """Before the manifest has its name, and after; as the launcher finds it."""
    for number, name in enumerate(("manifest.json", "config.yaml")):
        folder = tmp_path / str(number)

        def kill(name: str = name) -> None:
            move = Path.replace

            def dying(self: Path, to: Path) -> Path:
                if to.name == name:
                    os.kill(os.getpid(), signal.SIGKILL)
                return move(self, to)

            replace(Path, "replace", dying)

        assert attempt(folder, before=kill).code == -signal.SIGKILL
        if read_stored(folder) is None:
            claim_folder(folder)
        assert attempt(folder, stop_at=1).code == 75


# Space.


def test_what_a_run_has_written_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(ModelConfig(), 1, 10)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 2 << 20})())
    with pytest.raises(BadInputError, match="2 MiB are free"):
        check_space(tmp_path, model, copies=2)
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    for name in ("checkpoints/step-00000001/model.safetensors", "model.safetensors"):
        (tmp_path / name).write_bytes(bytes(2 << 20))
    check_space(tmp_path, model, copies=2)


def test_a_full_disk_loses_rows_and_no_training(tmp_path: Path, whole: Path) -> None:
    """From step 3 on: no rows, no checkpoints, no manifest; TensorBoard fails in its thread."""

    def full() -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        from trainer.observe import sinks
        from trainer.train import run_folder

        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def sink_of(file: Any) -> Any:
            write = jsonl_sink(file)
            return lambda row: refuse() if row["step"] > 3 else write(row)

        jsonl_sink = sinks.jsonl_sink
        replace(run_folder, "jsonl_sink", sink_of)
        step_done = between_steps.BetweenSteps.step_done

        def fills(self: Any, done: int) -> None:
            if done == 3:
                for thing, name in (
                    (RecordWriter, "write"),
                    (RecordWriter, "flush"),
                    (run_folder, "write_json"),
                    (store, "commit"),
                ):
                    replace(thing, name, refuse)
            step_done(self, done)

        replace(between_steps.BetweenSteps, "step_done", fills)

    recipe = small(log={"to": ["jsonl", "tensorboard"]}, checkpoint={"every": 1})
    folder = tmp_path / "run"
    ended = attempt(folder, recipe, stop_at=12, before=full)
    assert ended.code == 75, ended.said
    assert "goes on after step 2, its newest checkpoint" in ended.said
    assert "Traceback" not in ended.said
    assert ended.said.count("rows of metrics are lost") == 2, "once for each sink"
    done = attempt(folder, recipe)
    assert done.code == 0
    assert same(folder, whole)


# A rank started by torchrun itself.


def test_a_finished_run_is_not_trained_again(whole: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in whole.iterdir()}
    again = attempt(whole)
    assert again.code == 0 and "is finished already; nothing to do" in again.said
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
    assert re.search(r"left out: step-00000012: it is of another run \(\w{8}; this one is \w{8}\)", done.said)
    assert "goes on after step 8" in done.said
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
        assert done.code == 75 and "without --stop-after it goes on from there" in done.said
        assert f"checkpoints of other runs were renamed: {', '.join(names)}" in done.said
        there = {path.name for path in (folder / "checkpoints").iterdir()}
        assert there >= {f"step-{after:08d}", *names}


def test_a_finished_run_without_a_checkpoint_is_not_begun_again(tmp_path: Path) -> None:
    """By the words that extend it its weights would be lost."""
    folder = tmp_path / "run"
    assert attempt(folder, small(max_steps=3, checkpoint={"every": 0})).code == 0
    before = (folder / "manifest.json").read_bytes()
    refused = attempt(folder, small(max_steps=6), "force")
    assert (refused.code, refused.said) == (2, "")
    assert "the finished run has no checkpoint to be extended from; give another --out" in refused.line
    assert (folder / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"run_id": ""}, "step-00000008: it names no run: an older trainer wrote it"),
        ({"run_id": "00ff"}, "step-00000008: it is of another run \\(00ff; this one is "),
        ({"config_hash": "00ff"}, "step-00000008: its configuration is none that this run was trained with"),
    ],
)
def test_checkpoints_that_are_all_foreign_are_one_line(
    tmp_path: Path, stopped: Path, values: dict[str, str], said: str
) -> None:
    folder = changed(tmp_path / "run", stopped)
    rewrite(folder, with_state(**values))
    refused = attempt(folder)
    assert (refused.code, refused.said) == (2, "")
    assert re.search(f"none of its checkpoints can be trusted \\({said}", refused.line)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-00000005",
        "step-00000008",
    ]


def test_a_forced_change_keeps_the_checkpoints_of_before(tmp_path: Path, stopped: Path) -> None:
    folder, faster = changed(tmp_path / "run", stopped), small(optim={"lr": 0.002})
    assert attempt(folder, faster, "force", stop_at=9).code == 75
    shutil.rmtree(folder / "checkpoints" / "step-00000009")
    assert "goes on after step 8" in attempt(folder, faster, stop_at=10).said


def test_a_finished_run_is_extended_to_the_bits_of_a_longer_one(tmp_path: Path) -> None:
    """By the words that the refusal names; the schedule is constant, so that its length changes nothing."""
    constant: dict[str, Any] = {"optim": {"schedule": "constant", "warmup": 0.0}}
    short, long = (small(max_steps=steps, **constant) for steps in (6, 12))
    folder = tmp_path / "run"
    assert attempt(folder, short).code == 0
    refused = attempt(folder, long)
    assert refused.code == 2 and "(max_steps: 6, now 12)" in refused.line and "--resume force" in refused.line
    done = attempt(folder, long, "force")
    assert done.code == 0, done.said
    assert "goes on after step 6: the run ended at step 6 and is extended" in done.said
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["steps"], manifest["status"]) == (12, "finished")
    assert attempt(tmp_path / "long", long).code == 0
    assert same(folder, tmp_path / "long")
    assert "is finished already; nothing to do" in attempt(folder, long, "force").said


def test_a_disk_that_is_full_at_the_end_loses_no_training(tmp_path: Path, whole: Path) -> None:
    """One line; then the same command writes the weights from the last checkpoint."""

    def full() -> None:
        from safetensors import SafetensorError

        def refuse(_: Any, path: Path) -> None:
            path.write_bytes(b"half")
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

        replace(safetensors.torch, "save_file", refuse)

    folder = tmp_path / "run"
    ended = attempt(folder, before=full)
    assert ended.code == 2 and "Traceback" not in ended.said
    assert "the final weights can't be written (Error while serializing" in ended.line
    assert "the checkpoint of step 16 is kept: mend that, and the same command ends from there" in ended.line
    assert not list(folder.glob("*.safetensors")) and not list(folder.glob("*.tmp"))
    done = attempt(folder)
    assert done.code == 0, done.said
    assert same(folder, whole)


def test_a_disk_that_is_full_at_the_last_line_is_one_line(tmp_path: Path) -> None:
    """The weights are written and the manifest isn't; then the end is repeated, with one row of it."""

    def full() -> None:
        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        replace(summary, "write_json", refuse)

    folder = tmp_path / "run"
    ended = attempt(folder, small(max_steps=4), before=full)
    assert ended.code == 2 and "Traceback" not in ended.said
    assert "manifest.json can't be written (No space left on device); the checkpoint of step 4" in ended.line
    assert attempt(folder, small(max_steps=4)).code == 0
    kinds = [json.loads(line)["kind"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert kinds.count("end") == 1 and kinds[-1] == "end"


def test_a_checkpoint_without_its_hashes_is_left_out(tmp_path: Path, stopped: Path) -> None:
    folder = changed(tmp_path / "run", stopped)
    (folder / "checkpoints" / "step-00000008" / "SHA256SUMS").unlink()
    said = attempt(folder, stop_at=9).said
    assert "left out: step-00000008: SHA256SUMS is missing" in said and "goes on after step 5" in said


def test_newest_and_restarts_without_our_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank finds the folder of the newest run, or that of the attempt before."""
    monkeypatch.chdir(tmp_path)
    recipe = small()
    options: Any = argparse.Namespace(out=None, resume="newest", recipe="small", set=[])
    monkeypatch.delenv("TRAINER_RUN_FOLDER", raising=False)
    run = Path("runs", "small-00000000-1")
    run.mkdir(parents=True)
    (run / "manifest.json").write_text("{}")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert start._folder_of_rank(options, recipe) == run
    options.resume = "auto"
    monkeypatch.setenv("RANK", "0")
    made = start._folder_of_rank(options, recipe)
    assert made != run and made.is_dir()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert start._folder_of_rank(options, recipe) == made


# Files of ours that say something odd.


def rewrite(folder: Path, change: Callable[[Path], object]) -> None:
    """Changes every checkpoint, and its hashes with it."""
    for path in (folder / "checkpoints").glob("step-*"):
        change(path)
        names = [line.split("  ")[1] for line in (path / "SHA256SUMS").read_text().splitlines()]
        lines = [f"{hashlib.sha256((path / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
        (path / "SHA256SUMS").write_text("".join(lines))


def with_state(**values: Any) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        file = path / "state.json"
        about = json.loads(file.read_text())
        about["state"].update(values)
        file.write_text(json.dumps(about))

    return change


def with_tensors(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def changed_file(path: Path) -> None:
        tensors = safetensors.torch.load_file(path / f"{name}.safetensors")
        change(tensors)
        safetensors.torch.save_file(tensors, path / f"{name}.safetensors")

    return changed_file


def halve(tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({name: one.half() for name, one in tensors.items() if one.is_floating_point()})


ODD_CHECKPOINTS = {
    "row": (with_state(row=-1), "row: Input should be greater"),
    "row far": (with_state(row=500), "speaks of later ones"),
    "losses": (with_state(losses=["x"]), "losses.0"),
    "no losses": (with_state(losses=[]), "losses: "),
    "seconds": (with_state(seconds="1e999"), "seconds: "),
    "samples": (with_state(samples=10**60), "samples: "),
    "metrics": (with_state(metrics=[1]), "metrics: "),
    "best": (with_state(best=[1.0]), "best"),
    "best inf": (with_state(best=["inf", 6]), "best"),
    "best far": (with_state(best=[1.0, 60]), "speaks of later ones"),
    "updates": (with_tensors("optimizer", lambda t: t["updates"].add_(10**6)), "more updates were applied"),
    "dtype": (with_tensors("model", halve), "isn't the same in the checkpoint"),
    "slot": (with_tensors("optimizer", lambda t: t.update({"stem.weight/x": torch.ones(1)})), "isn't"),
}


@pytest.mark.parametrize(("change", "said"), ODD_CHECKPOINTS.values(), ids=ODD_CHECKPOINTS)
def test_an_odd_checkpoint_is_one_line(
    tmp_path: Path, stopped: Path, change: Callable[[Path], object], said: str
) -> None:
    folder = changed(tmp_path / "run", stopped)
    rewrite(folder, change)
    refused = attempt(folder)
    assert (refused.code, refused.said) == (2, "")
    assert "step-00000008: isn't a checkpoint of this run" in refused.line and said in refused.line


ODD_MANIFESTS: dict[str, dict[str, Any]] = {
    "config list": {"config": []},
    "config null": {"config": None},
    "no threads": {"threads": 0},
    "many threads": {"threads": 10**30},
    "device": {"device": {"kind": "tpu"}},
    "status": {"status": "fine"},
    "world": {"world_size": True},
    "fingerprint": {"fingerprint": [1]},
    "infinity": {"x": math.inf},
}


@pytest.mark.parametrize("change", ODD_MANIFESTS.values(), ids=ODD_MANIFESTS)
def test_an_odd_manifest_is_one_line(tmp_path: Path, stopped: Path, change: dict[str, Any]) -> None:
    text = (stopped / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(json.dumps({**json.loads(text), "more": 1}))
    assert read_stored(tmp_path) is not None
    (tmp_path / "manifest.json").write_text(json.dumps({**json.loads(text), **change}))
    with pytest.raises(BadInputError, match="can't be read as a run's manifest"):
        read_stored(tmp_path)


def test_a_diverged_run_goes_on_and_is_known_as_such(tmp_path: Path) -> None:
    """Its losses and metrics aren't finite, for which JSON has no word."""
    folder, other = tmp_path / "run", tmp_path / "other"
    recipe = small(
        optim={"name": "sgd", "lr": 1e30}, log={"every": 16, "to": ["csv"]}, anomaly={"nonfinite": "off"}
    )
    assert attempt(other, recipe).code == 1
    assert attempt(folder, recipe, stop_at=12).code == 75
    state = json.loads((folder / "checkpoints" / "step-00000012" / "state.json").read_text())["state"]
    assert state["losses"] == ["nan"]
    assert attempt(folder, recipe).code == 1
    assert (folder / "train.csv").read_text().split(",")[2] == (other / "train.csv").read_text().split(",")[2]
    again = attempt(folder, recipe)
    assert again.code == 1 and "is diverged already" in again.said


FORCED: dict[str, tuple[dict[str, Any], str]] = {
    "another optimiser": ({"optim": {"name": "sgd"}}, "optimizer: .* isn't what SGD keeps"),
    "muon": ({"optim": {"name": "muon"}}, "optimizer: .* isn't what Muon keeps"),
    "as short": ({"max_steps": 8}, "nothing is left to train; raise epochs or max_steps"),
    "shorter": ({"max_steps": 3}, "nothing is left to train"),
    "no average": ({"ema": {"decay": 0.0}}, "isn't the same"),
}


@pytest.mark.parametrize(("sections", "said"), FORCED.values(), ids=FORCED)
def test_what_cannot_be_forced_is_one_line(
    tmp_path: Path, stopped: Path, sections: dict[str, Any], said: str
) -> None:
    folder = changed(tmp_path / "run", stopped)
    before = (folder / "manifest.json").read_text()
    refused = attempt(folder, small(**sections), "force")
    assert (refused.code, refused.said) == (2, "")
    assert re.search(said, refused.line)
    assert (folder / "manifest.json").read_text() == before


def test_from_sgd_to_adamw_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert attempt(folder, small(optim={"name": "sgd"}), stop_at=4).code == 75
    refused = attempt(folder, small(), "force")
    assert refused.code == 2 and "momentum_buffer isn't what AdamW keeps" in refused.line


def a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.touch()


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("name", "change"),
    [("checkpoints", a_file), ("config.yaml", a_folder), ("metrics.jsonl", a_folder), (".lock", a_folder)],
)
def test_odd_things_in_a_run_folder_are_one_line(
    tmp_path: Path, stopped: Path, name: str, change: Callable[[Path], None]
) -> None:
    folder = changed(tmp_path / "run", stopped)
    change(folder / name)
    refused = attempt(folder)
    assert (refused.code, refused.said) == (2, "")
    assert str(folder) in refused.line


def test_a_read_only_folder_is_one_line(tmp_path: Path, stopped: Path) -> None:
    folder = changed(tmp_path / "run", stopped)

    def read_only() -> None:
        opened = os.open

        def refuse(path: Any, flags: int, *rest: Any, **names: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return opened(path, flags, *rest, **names)

        replace(os, "open", refuse)

    refused = attempt(folder, before=read_only)
    assert (refused.code, refused.said) == (2, "")
    assert "can't be written (Read-only file system)" in refused.line


def test_a_link_to_nowhere_is_called_that(tmp_path: Path) -> None:
    """mkdir(2) says "File exists"."""
    runs = tmp_path / "runs"
    runs.symlink_to("scratch/runs")
    told = r"runs is a link to scratch/runs, which isn't there\); give another"
    with pytest.raises(BadInputError, match=told):
        new_folder(runs, "digits", small())
    with pytest.raises(BadInputError, match=told):
        claim_folder(runs / "mine")
    (tmp_path / "scratch" / "runs").mkdir(parents=True)
    assert new_folder(runs, "digits", small()).parent == runs


@pytest.mark.parametrize("how", ["container layer", "bind mount", "volume", "mount"])
def test_a_run_that_goes_with_its_container_says_so_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainer.train.run_folder.read_mount", lambda _: Mount("overlay", "/", how))
    monkeypatch.setattr(start, "launch", lambda *_, **__: 0)
    for words, folder in (([], "runs"), (["--out", "deep/mine"], "deep/mine")):
        assert cli.main(["train", "digits", *words]) == 0
        told = f'{folder} lies in the container itself and goes with it: docker run -v "$PWD/'
        told += f'{Path(folder).name}:{tmp_path}/{folder}" keeps it'
        assert (told in capsys.readouterr().err) == (how == "container layer")
