"""Promise: a run folder has one owner, its rows fit its checkpoints, and a full disk loses no training."""

import errno
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.forked import attempt, replace, small
from tests.helpers.planted import put
from tests.helpers.refusals import named, refused
from tests.helpers.rows import read_rows
from tests.helpers.run_folders import held, same
from tests.helpers.toys import before_each_step_ends
from trainer.checkpoint import store
from trainer.host.latest import EVALUATION
from trainer.observe.sinks import keep_rows
from trainer.runs.folder import claim_folder, remove_unused
from trainer.runs.manifest import read_stored
from trainer.train.components.memory import check_space
from trainer.train.components.task import make_task


def test_two_never_train_in_one_folder(tmp_path: Path) -> None:
    """And the lock goes with its process, not with what that process forked."""
    folder = tmp_path / "run"
    folder.mkdir()
    with held(folder) as holder:
        assert named(attempt(folder, code=2).line, holder.pid)
        assert [path.name for path in folder.iterdir()] == [".lock"], "nothing was written"
        holder.kill()
        holder.join()
        attempt(folder, stop_at=1, code=75)


def test_what_a_killed_start_left_is_no_hindrance(tmp_path: Path) -> None:
    put(tmp_path, ".lock", ".tmp-0123456789abcdef-manifest.json")
    assert not claim_folder(tmp_path)
    (tmp_path / "mine").touch()
    with refused(tmp_path):
        claim_folder(tmp_path)
    remove_unused(tmp_path)
    assert (tmp_path / "mine").exists()
    (tmp_path / "mine").unlink()
    with held(tmp_path):
        remove_unused(tmp_path)
        assert tmp_path.exists(), "somebody is about to begin there"
    while tmp_path.exists():  # it takes a moment to end
        remove_unused(tmp_path)


@pytest.mark.parametrize(
    ("name", "written", "bad", "kept"),
    [
        ("kill", b'{"step": 1}\n{"step": 9}\n{"win', 0, b'{"step": 1}\n'),
        ("byte", b'\xff\xfe\x00\n{"step": 1}\n', 1, b'{"step": 1}\n'),
        ("infinity", b'{"step": Infinity}\n{"step": 1}\n', 1, b'{"step": 1}\n'),
        ("deep", b"[" * 100_000 + b'\n3\n{"step": 1}\n', 2, b'{"step": 1}\n'),
    ],
)
def test_rows_are_cut(tmp_path: Path, name: str, written: bytes, bad: int, kept: bytes) -> None:
    file = tmp_path / f"{name}.jsonl"
    file.write_bytes(written)
    assert keep_rows(file, 5) == bad
    assert file.read_bytes() == kept


def test_every_file_of_rows_is_cut_to_the_checkpoint(tmp_path: Path) -> None:
    """What a killed attempt had told of later steps is told once, by the one that trains them again."""
    folder, recipe = tmp_path / "run", small(evaluation={"every": "2 steps"})

    def die() -> None:
        before_each_step_ends(lambda done: os.kill(os.getpid(), signal.SIGKILL) if done == 10 else None)

    attempt(folder, recipe, before=die, code=-signal.SIGKILL)
    assert max(row["step"] for row in read_rows(folder, ("eval",))) == 8, "it survives a kill"
    for name in ("evaluations.jsonl", "memory.jsonl"):
        with (folder / name).open("ab") as file:
            file.write(b'\xff\n{"torn')
    (folder / "mine.csv").write_text("image,label\na,1\n")  # of a hook, not of a sink
    (folder / EVALUATION).touch()
    assert named(attempt(folder, recipe, code=0).said, "evaluations.jsonl 1")
    assert not (folder / EVALUATION).exists(), "it measured the weights of before"
    assert (folder / "mine.csv").read_text() == "image,label\na,1\n"
    for kind, steps in (("train", list(range(2, 17, 2))), ("eval", list(range(2, 17, 2))), ("end", [16])):
        assert [row["step"] for row in read_rows(folder, (kind,))] == steps
    found = [(row["at"], row["step"]) for row in read_rows(folder, ("memory",))]
    assert found == [("start", 0), ("end", 8), ("start", 8), ("end", 16)]


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
            last, beside = events[number - 1]
            assert last == "sync" and re.fullmatch(rf"\.tmp-[0-9a-f]{{16}}-{name}", beside)
            assert events[number + 1] == ("sync", folder.name)


def test_a_start_that_is_killed_can_be_repeated(tmp_path: Path) -> None:
    """Before its manifest has its name; as the launcher finds it."""
    folder = tmp_path / "run"

    def kill() -> None:
        replace(Path, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))

    attempt(folder, before=kill, code=-signal.SIGKILL)
    assert read_stored(folder) is None
    claim_folder(folder)
    attempt(folder, stop_at=1, code=75)


def test_what_a_run_has_written_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small()
    model = make_task(recipe).model()
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 2 << 20})())
    with refused("2 MiB 5"):
        check_space(tmp_path, recipe, model)
    with refused("5 MiB"):
        check_space(tmp_path, recipe, model, own_optimizer=True)
    names = ("checkpoints/step-00000001/model.safetensors", "model.safetensors")
    put(tmp_path, *names, content=bytes(2 << 20))
    check_space(tmp_path, recipe, model)


def test_a_full_disk_loses_rows_and_no_training(tmp_path: Path, whole: Path) -> None:
    """From step 3 on: no rows, no checkpoints, no manifest; TensorBoard fails in its thread."""

    def full() -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        from trainer.observe import sinks
        from trainer.runs import manifest

        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def sink_of(folder: Path, _: int) -> Any:
            write, close = jsonl_sink(folder)
            return (lambda row: refuse() if row["step"] > 3 else write(row)), close

        jsonl_sink = sinks.jsonl_sink
        replace(sinks, "jsonl_sink", sink_of)
        failing = [(RecordWriter, "write"), (RecordWriter, "flush")]
        failing += [(manifest, "write_json"), (store, "commit")]

        def fills(done: int) -> None:
            for thing, name in failing if done == 3 else ():
                replace(thing, name, refuse)

        before_each_step_ends(fills)

    recipe = small(log={"to": ["jsonl", "tensorboard"]}, checkpoint={"every": 1})
    folder = tmp_path / "run"
    ended = attempt(folder, recipe, stop_at=12, before=full, code=75)
    assert "resumes after step 2, its newest checkpoint" in ended.said
    assert "Traceback" not in ended.said
    assert ended.said.count("metrics records are lost") == 2, "once for each sink"
    attempt(folder, recipe, code=0)
    assert same(folder, whole)
