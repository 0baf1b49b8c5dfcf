"""Promise: stopped anywhere, a run goes on as if nothing had happened; and what doesn't fit is said."""

import errno
import hashlib
import json
import mmap
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.chaos import chaos, ending, kinds, recipe_of, start, undisturbed
from tests.distributed.test_ranks import DIGITS
from tests.helpers.rows import read_rows
from tests.helpers.toys import make_recipe
from tests.helpers.world import Ranks
from trainer.attempt import _go_on, _newest
from trainer.checkpoint import store
from trainer.checkpoint.store import newest_good, write
from trainer.errors import BadInputError
from trainer.manifest import make_manifest
from trainer.parallel import World
from trainer.plan import Share
from trainer.rank import children
from trainer.resume import check_resumable, differences, newest_run, read_stored
from trainer.run import assemble, make_task
from trainer.run_folder import write_json
from trainer.state import tensors_of
from trainer.step import train_window

ROOT = Path(__file__).parents[2]
ALONE = World(0, 1, 0, torch.device("cpu"), None)
RUN = ["train", "digits", "--set", "epochs=20", "--set", "log.every=7", "--set", "evaluate_every=4"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "trainer", *arguments]


def trainer(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(*arguments), cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )


def weights_of(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.glob("*.safetensors")}


def rows_of(folder: Path) -> list[Any]:
    keys = ("kind", "window", "loss", "gradient_norm", "accuracy", "learning_rate", "applied")
    return [tuple(row.get(key) for key in keys) for row in read_rows(folder)]


def come_some_way(process: "subprocess.Popen[str]", folder: Path) -> None:
    """Waits until a run has written some rows."""
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 12:
        time.sleep(0.02)
        assert process.poll() is None, process.communicate()


def stopped_somewhere(
    folder: Path, *arguments: str, to: str = "launcher", number: int = signal.SIGTERM
) -> Any:
    """Starts a run and signals its launcher, or one of its ranks, once it has come some way."""
    process = subprocess.Popen(
        command(*RUN, *arguments, "--out", str(folder)),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    come_some_way(process, folder)
    began = time.monotonic()
    if to == "launcher":
        process.send_signal(number)
    else:
        os.kill(int(pid_of_rank(process.pid, to)), number)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err, time.monotonic() - began


def pid_of_rank(launcher: int, rank: str) -> str:
    """The process whose environment says that it is this rank of that launcher."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = path.read_text(errors="ignore")
        except OSError:
            continue
        command_line = (path.parent / "cmdline").read_text()
        if f"\0RANK={rank}\0" in f"\0{text}" and "\0trainer\0train" in command_line:
            parents = ancestors(path.parent.name)
            if str(launcher) in parents:
                return path.parent.name
    raise AssertionError("no such rank")


def ancestors(pid: str) -> set[str]:
    found = set()
    while pid not in ("0", "1"):
        pid = (Path("/proc") / pid / "stat").read_text().rpartition(")")[2].split()[1]
        found.add(pid)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    done = trainer(*RUN, "--out", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


def test_a_run_that_was_stopped_goes_on_with_the_same_bits(tmp_path: Path, whole: Path) -> None:
    """By SIGTERM, then by SIGUSR1; the third attempt comes to the end, and the fourth finds nothing to do."""
    folder = tmp_path / "cut"
    code, out, err, seconds = stopped_somewhere(folder)
    assert (code, err) == (75, "")
    assert "stopped by SIGTERM after window" in out
    assert seconds < 25
    assert json.loads((folder / "manifest.json").read_text())["status"] == "stopped"
    listed = trainer("checkpoints", str(folder))
    assert listed.returncode == 0
    done = trainer(*RUN, "--out", str(folder))
    assert done.returncode == 0, done.stderr
    assert "goes on after window" in done.stdout
    assert weights_of(folder) == weights_of(whole)
    assert rows_of(folder) == rows_of(whole)
    before = weights_of(folder)
    again = trainer(*RUN, "--out", str(folder))
    assert (again.returncode, again.stderr) == (0, "")
    assert "finished already; nothing to do" in again.stdout
    other = trainer(*RUN, "--out", str(folder), "--set", "optim.lr=1")
    assert other.returncode == 2
    assert "another configuration (optim.lr: 0.006, now 1" in other.stderr
    assert weights_of(folder) == before


@pytest.mark.slow  # the histories of tests/helpers/topologies.py signal any rank, too, without a command line
def test_whichever_rank_gets_the_signal_all_stop_together(tmp_path: Path) -> None:
    two = ["--ranks", "2", "--set", "data.micro_batch=32"]
    done = trainer(*RUN, *two, "--out", str(tmp_path / "whole"))
    assert done.returncode == 0, done.stderr
    code, out, err, _ = stopped_somewhere(tmp_path / "cut", *two, to="1", number=signal.SIGUSR1)
    assert (code, err) == (75, "")
    assert "stopped by SIGUSR1 after window" in out
    done = trainer(*RUN, *two, "--out", str(tmp_path / "cut"))
    assert done.returncode == 0, done.stderr
    assert weights_of(tmp_path / "cut") == weights_of(tmp_path / "whole")
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")


def test_a_killed_rank_is_started_again_and_ends_with_the_same_bits(tmp_path: Path, whole: Path) -> None:
    code, out, err, _ = stopped_somewhere(
        tmp_path / "run", "--max-restarts", "3", "--set", "checkpoint.every=10", to="0", number=signal.SIGKILL
    )
    assert code == 0, err
    assert "starting again (1 of 3)" in err
    assert "goes on after window" in out
    assert weights_of(tmp_path / "run") == weights_of(whole)
    assert rows_of(tmp_path / "run") == rows_of(whole)


def test_chaos_in_small() -> None:
    tally = chaos(kills=16, signals=6, seed=3)
    assert not tally.failures
    assert tally.counts["identical"] >= 2


def cut_in(world: World, folder: str, windows: range) -> tuple[list[float], list[list[int]]]:
    """Goes on in the folder's newest checkpoint, does some windows, and leaves another."""
    recipe = make_recipe(**DIGITS | {"model": {"width": 8, "norm": "group"}})
    task = make_task(recipe)
    parts = assemble(recipe, task, world, workers=0)
    t = parts.training
    found, _ = newest_good(Path(folder))
    progress = _go_on(t, found, world)
    assert progress.window == windows.start
    losses = []
    batches = parts.loader(t.share.batches(windows.start))
    t.replica.train()
    for window in windows:
        before = float(t.loss)
        train_window(t, batches, window)
        losses.append(float(t.loss) - before)
    if world.rank == 0:
        state = {
            "row": 0,
            "losses": [float(t.loss)],
            "seconds": 0.0,
            "samples": 0,
            "figures": {},
            "best": None,
        }
        write(Path(folder), windows.stop, tensors_of(t), state)
    share = Share(t.share.plan, world.rank, world.size)
    numbers = share.shards(torch.arange(windows.start, windows.stop).repeat_interleave(1).numpy())
    return losses, t.share.plan.read(numbers).sample.tolist()


@pytest.mark.compat
def test_another_number_of_ranks_goes_on_with_the_same_samples(ranks: Ranks, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    mixed = tmp_path / "mixed"
    for folder in (whole, mixed):
        folder.mkdir()
    ((wanted, _),) = ranks.run(1, cut_in, str(whole), range(6))
    losses: list[float] = []
    for size, windows in ((2, range(2)), (4, range(2, 4)), (1, range(4, 6))):
        answers = ranks.run(size, cut_in, str(mixed), windows)
        losses += torch.tensor([part for part, _ in answers], dtype=torch.float64).sum(0).tolist()
    assert losses == pytest.approx(wanted, rel=1e-4)


def tensors_after(world: World, folder: str, windows: range) -> dict[str, torch.Tensor]:
    """What `cut_in` leaves."""
    cut_in(world, folder, windows)
    if world.group is not None:
        torch.distributed.barrier(world.group)  # rank 0 writes
    found, _ = newest_good(Path(folder))
    assert found is not None
    return {
        f"{part}.{name}": tensor.clone()
        for part, tensors in found.tensors.items()
        for name, tensor in tensors.items()
    }


@pytest.mark.compat
def test_four_ranks_go_on_with_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    """More than two: there the order of a sum is another one where DDP lays out its buckets otherwise."""
    for folder in ("whole", "cut"):
        (tmp_path / folder).mkdir()
    wanted = ranks.run(4, tensors_after, str(tmp_path / "whole"), range(5))[0]
    for windows in (range(2), range(2, 5)):
        answer = ranks.run(4, tensors_after, str(tmp_path / "cut"), windows)[0]
    assert wanted.keys() == answer.keys()
    assert all(torch.equal(wanted[name], answer[name]) for name in wanted)


def a_run(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    recipe = make_recipe(**changes)
    task = make_task(recipe)
    plan = assemble(recipe, task, World(0, 1, 0, torch.device("cpu"), None), 0).training.share.plan
    world = World(0, 1, 0, torch.device("cpu"), None)
    write_json(folder / "manifest.json", make_manifest(recipe, "digits", world, plan, 1, {}, {}, []))
    return folder


def test_what_differs_is_said_and_can_be_forced(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    stored = read_stored(folder)
    assert stored is not None
    changed = make_recipe(optim={"lr": 0.5}, data={"workers": 3}, log={"every": 2}).model_dump(mode="json")
    assert differences(stored.config, changed) == ["optim.lr: 0.001, now 0.5"], "workers and logging are free"
    with pytest.raises(
        BadInputError, match=r"another configuration \(optim\.lr: 0\.001, now 0\.5\); .* force"
    ):
        check_resumable(folder, stored, changed, "cpu", {}, "auto")
    check_resumable(folder, stored, changed, "cpu", {}, "force")
    with pytest.raises(BadInputError, match="holds a run already"):
        check_resumable(folder, stored, stored.config, "cpu", {}, "never")
    check_resumable(folder, stored, stored.config, "cpu", {}, "auto")


def test_micro_batch_and_threads_are_part_of_the_arithmetic(tmp_path: Path) -> None:
    stored = read_stored(a_run(tmp_path / "run"))
    assert stored is not None
    for changes in ({"data": {"micro_batch": 32}}, {"parallel": {"threads": 2}}):
        assert differences(stored.config, make_recipe(**changes).model_dump(mode="json"))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"config": 1}', "[" * 100_000])
def test_a_manifest_that_is_none_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(BadInputError, match="can't be read as a run's manifest"):
        read_stored(tmp_path)


def test_the_newest_run_is_found_or_missed_with_a_line(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="there is no run of digits"):
        newest_run(tmp_path, "digits")
    for number in (2, 1):
        a_run(tmp_path / f"digits-0000-{number}")
        os.utime(tmp_path / f"digits-0000-{number}" / "manifest.json", (number, number))
    assert newest_run(tmp_path, "digits").name == "digits-0000-2"


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    world = World(0, 1, 0, torch.device("cpu"), None)
    small, large = (make_recipe(model={"width": width}) for width in (4, 8))
    t = assemble(small, make_task(small), world, 0).training
    state = {"row": 0, "losses": [0.0], "seconds": 0.0, "samples": 0, "figures": {}, "best": None}
    write(tmp_path, 3, tensors_of(t), state)
    other = assemble(large, make_task(large), world, 0).training
    before = {name: tensor.clone() for name, tensor in other.model.state_dict().items()}
    with pytest.raises(BadInputError, match="isn't a checkpoint of this run"):
        _go_on(other, newest_good(tmp_path)[0], world)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.model.state_dict().items())


@pytest.mark.compat
def test_a_model_file_of_a_checkpoint_is_plain_safetensors(tmp_path: Path) -> None:
    recipe = make_recipe(model={"width": 8, "channels_last": True})
    t = assemble(recipe, make_task(recipe), World(0, 1, 0, torch.device("cpu"), None), 0).training
    path = write(tmp_path, 1, tensors_of(t), {})
    fresh = make_task(recipe).model()
    fresh.load_state_dict(safetensors.torch.load_file(path / "model.safetensors"))
    for name, tensor in t.model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)


def disturbed_disk(fault: str, folder: Path, phase: mmap.mmap) -> int | None:
    """A short run in a fork whose disk has a fault while checkpoints are written; its exit code."""
    recipe = recipe_of({**kinds()[0], "every": 3})
    commit, calls = store.commit, []

    def faulty(*arguments: Any) -> Any:
        calls.append(arguments)
        if fault == "deleted" and len(calls) == 3:
            shutil.rmtree(folder / "checkpoints")
        if fault in ("full", "broken") and len(calls) in (2, 3):
            number = errno.ENOSPC if fault == "full" else errno.EIO
            raise OSError(number, os.strerror(number))
        return commit(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "commit", faulty)
        process = start(recipe, folder, phase)
        process.join(60)
    return process.exitcode


@pytest.mark.parametrize("fault", ["full", "broken", "deleted"])
def test_a_fault_of_the_disk_does_not_end_the_training(tmp_path: Path, fault: str) -> None:
    """Full or broken for two checkpoints, or the folder of checkpoints deleted under way."""
    phase = mmap.mmap(-1, 1)
    for name in ("whole", "faulty"):
        (tmp_path / name).mkdir()
    wanted, _ = undisturbed(recipe_of({**kinds()[0], "every": 3}), tmp_path / "whole", phase)
    assert disturbed_disk(fault, tmp_path / "faulty", phase) == 0
    assert ending(tmp_path / "faulty") == wanted
    assert newest_good(tmp_path / "faulty" / "checkpoints")[0] is not None


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    phase, random_ = mmap.mmap(-1, 1), random.Random(0)
    recipe = recipe_of({**kinds()[0], "every": 7})
    (tmp_path / "whole").mkdir()
    wanted, _ = undisturbed(recipe, tmp_path / "whole", phase)
    folder = tmp_path / "run"
    folder.mkdir()
    process = start(recipe, folder, phase)
    while len(list((folder / "checkpoints").glob("step-*"))) < 2:
        time.sleep(0.002)
        assert process.is_alive() or process.exitcode == 0, process.exitcode
    process.kill()
    process.join()
    newest = max((folder / "checkpoints").glob("step-*"))
    file = newest / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    else:
        file.unlink()
    process = start(recipe, folder, phase)
    process.join()
    assert process.exitcode == 0
    assert ending(folder) == wanted
    notes = json.loads((folder / "manifest.json").read_text())["notes"]
    assert any(newest.name in note and "optimizer.safetensors" in note for note in notes), notes


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again_unasked(tmp_path: Path) -> None:
    folder, phase = tmp_path / "run", mmap.mmap(-1, 1)
    folder.mkdir()
    recipe = recipe_of({**kinds()[0], "every": 3})
    process = start(recipe, folder, phase)
    while not list((folder / "checkpoints").glob("step-*")):
        time.sleep(0.002)
        assert process.is_alive() or process.exitcode == 0, process.exitcode
    process.kill()
    process.join()
    for path in (folder / "checkpoints").glob("step-*"):
        (path / "model.safetensors").unlink()
    with pytest.raises(BadInputError, match=r"none .* can be trusted \(step-\d+: model.safetensors .* force"):
        _newest(folder, "auto", ALONE)
    assert _newest(folder, "force", ALONE)[0] is None


def jumping() -> float:
    """A wall clock that somebody sets to and fro, by up to ten years."""
    return random.uniform(1.4e9, 2.1e9)


def test_a_wall_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints by time are on; the same count of them comes, and the same bits."""
    phase = mmap.mmap(-1, 1)
    kind = {**kinds()[0], "every": 7}
    for name in ("whole", "run"):
        (tmp_path / name).mkdir()
    wanted, _ = undisturbed(recipe_of(kind), tmp_path / "whole", phase)
    monkeypatch.setattr(time, "time", jumping)
    monkeypatch.setattr(time, "time_ns", lambda: int(jumping() * 1e9))
    assert undisturbed(recipe_of(kind), tmp_path / "run", phase)[0] == wanted
    kept = [sorted(f.name for f in (tmp_path / name / "checkpoints").iterdir()) for name in ("whole", "run")]
    assert kept[0] == kept[1]


def test_only_what_is_shown_asks_the_wall_clock() -> None:
    asks = re.compile(r"\btime\.time(_ns)?\(|datetime\.(now|utcnow|today)|CLOCK_REALTIME")
    found = {
        f"{path.relative_to(ROOT / 'trainer')}"
        for path in (ROOT / "trainer").rglob("*.py")
        # The doctor looks at the clock itself.
        if asks.search(path.read_text()) and path.parent.name != "doctor"
    }
    # The cache orders files of processes that are long gone, and decides only what is fetched again.
    shown = {"observe/sinks.py", "checkpoint/show.py", "data/cache.py"}
    assert found <= shown, "what decides something takes time.monotonic()"


@pytest.mark.parametrize("resumable", [True, False])
def test_a_signal_before_the_launch_ends_at_once(tmp_path: Path, resumable: bool) -> None:
    """75 only if there is a checkpoint to go on from; as the first process of a container, too."""
    if resumable:
        (tmp_path / "run" / "checkpoints" / "step-00000007").mkdir(parents=True)
    before = (
        "import os, signal, sys; from trainer import cli, preempt; real = preempt.end_on_signal\n"
        "def now(*a): real(*a); os.kill(os.getpid(), signal.SIGTERM)\n"
        "preempt.end_on_signal = now; sys.exit(cli.main(sys.argv[1:]))"
    )
    words = ["train", "digits", "--out", str(tmp_path / "run")]
    isolated = ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child"] if can_unshare() else []
    done = subprocess.run(
        [*isolated, sys.executable, "-c", before, *words],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == (75 if resumable else 1), done.stderr
    assert "stopped by SIGTERM before it began" in done.stderr
    assert done.stderr.count("\n") == 1


def can_unshare() -> bool:
    """Whether this user may make processes a world of their own."""
    words = ["unshare", "--fork", "--pid", "--mount-proc", "true"]
    return (
        bool(shutil.which("unshare"))
        and not subprocess.run(words, capture_output=True, check=False).returncode
    )


@pytest.mark.slow  # tests/container stops a real container
@pytest.mark.skipif(not can_unshare(), reason="needs unshare and the right to use it")
def test_as_the_first_process_of_a_container_it_stops_with_a_checkpoint(tmp_path: Path, whole: Path) -> None:
    """Signals that have no handler don't reach a process 1."""
    folder = tmp_path / "run"
    process = subprocess.Popen(
        ["unshare", "--fork", "--pid", "--mount-proc", *command(*RUN, "--out", str(folder))],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    come_some_way(process, folder)
    (first,) = children(process.pid)
    os.kill(first, signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (75, "")
    done = trainer(*RUN, "--out", str(folder))
    assert done.returncode == 0, done.stderr
    assert weights_of(folder) == weights_of(whole)


def test_a_killed_loader_worker_fails_the_run_and_it_can_go_on(tmp_path: Path) -> None:
    phase = mmap.mmap(-1, 1)
    recipe = recipe_of({**kinds()[0], "workers": 2, "every": 3})
    for name in ("whole", "run"):
        (tmp_path / name).mkdir()
    wanted, _ = undisturbed(recipe, tmp_path / "whole", phase)
    process = start(recipe, tmp_path / "run", phase)
    while not list((tmp_path / "run" / "checkpoints").glob("step-*")):
        time.sleep(0.002)
        assert process.is_alive() or process.exitcode == 0, process.exitcode
    workers = children(process.pid or 0)
    os.kill(min(workers), signal.SIGKILL)
    process.join(60)
    if process.exitcode != 0:  # unless it had done all its work
        process = start(recipe, tmp_path / "run", phase)
        process.join()
    assert process.exitcode == 0
    assert ending(tmp_path / "run") == wanted
