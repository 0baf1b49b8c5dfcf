"""Promise: a run stopped anywhere resumes to the same bits; a checkpoint that doesn't fit is refused."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chaos import chaos, ending
from tests.helpers import digits_steps, preloaded
from tests.helpers.held import held, pid_of_rank
from tests.helpers.refusals import named, refused
from tests.helpers.run_folders import manifest
from tests.helpers.steps import State, assert_same_bits, go, saved
from tests.helpers.toys import build_alone, make_recipe
from tests.helpers.waiting import SECONDS, until
from tests.helpers.world import Ranks
from trainer.checkpoint.store import newest_good, write
from trainer.commands.verify.recorded import Recorded
from trainer.commands.verify.replay import replay_config
from trainer.distributed.parallel import World
from trainer.runs.differences import differences
from trainer.runs.folder import write_json
from trainer.runs.manifest import Manifest, read_stored, update_manifest
from trainer.train.components.checkpoint_choice import load_checkpoint
from trainer.train.components.run import build
from trainer.train.components.task import make_task
from trainer.train.options import Mode
from trainer.train.provenance import make_manifest
from trainer.train.start.decision import check_resumable
from trainer.train.state import numbers_of, tensors_of
from trainer.version import ARITHMETIC

ROOT = Path(__file__).parents[2]


# For ranks of tests.helpers.world.
DIGITS: dict[str, Any] = {**digits_steps.DIGITS, "model": {"width": 8, "norm": "group"}}
SETTINGS = (
    *("epochs=2", "max_steps=18", "evaluation.every=8 steps", "data.global_batch_size=64"),
    *("data.micro_batch_size=32", "model.width=4", "parallel.reduction=tree"),
    *("log.every=7", "checkpoint.every=5", "parallel.threads=1"),
)
RUN = [sys.executable, "-m", "trainer", "train", "digits", *SETTINGS]


def cut(
    folder: Path, step: int, rank: str, number: int, *words: str, to: str = "rank"
) -> "subprocess.CompletedProcess[str]":
    """A run that is sent a signal after a step at which a rank stands still: its launcher, or that rank."""
    beside = folder.with_name(f"beside-{step}")
    how: Any = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = preloaded.Popen([*RUN, "--out", str(folder), *words], env=held(beside, step, rank), **how)
    until(lambda: (beside / "held").exists() or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    # A kill finds the checkpoint before on the disk: a thread writes it while the training goes on.
    until((folder / "checkpoints" / f"step-{step // 5 * 5:08d}").exists)
    os.kill(process.pid if to == "launcher" else pid_of_rank(beside, rank), number)
    out, err = process.communicate(timeout=SECONDS)
    return subprocess.CompletedProcess(RUN, process.returncode, out, err)


def test_a_run_that_was_stopped_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """By its launcher; by a signal to one of two ranks; at last a rank is killed, and started again."""
    whole, folder = tmp_path / "whole", tmp_path / "cut"
    done = preloaded.run([*RUN, "--out", str(whole)], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    two = ("--nproc-per-node", "2")
    for stopped, names in (
        (cut(folder, 6, "0", signal.SIGTERM, to="launcher"), "SIGTERM 6"),
        (cut(folder, 11, "1", signal.SIGUSR1, *two), "SIGUSR1"),
    ):
        assert (stopped.returncode, stopped.stderr) == (75, "")
        assert named(stopped.stdout, names)
        assert manifest(folder)["status"] == "stopped"
    killed = cut(folder, 16, "0", signal.SIGKILL, *two, "--max-restarts", "1")
    assert killed.returncode == 0, killed.stderr
    assert ending(folder) == ending(whole)


@pytest.mark.slow  # the tests here cut at known places, in the training and in the midst of a write
def test_chaos_in_small() -> None:
    tally = chaos("alone", 4, seed=3)
    assert not tally.failures and tally.counts["cuts"] >= 2


def tensors_after(world: World, folder: str, steps: range) -> State:
    """Goes on in the folder's newest checkpoint, does some steps, and leaves another; what is in that."""
    recipe = make_recipe(**DIGITS)
    run = build(recipe, make_task(recipe), world, workers=0)
    load_checkpoint(run, newest_good(Path(folder))[0])
    assert run.state.step == steps.start
    (*_, loss) = go(run, steps)
    if world.rank == 0:
        write(Path(folder), steps.stop, saved(run), numbers_of(run.state, [loss]))
    torch.distributed.barrier(world.group)
    return saved(run)


@pytest.mark.compat
def test_four_ranks_go_on_with_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    """More than two: there the order of a sum is another one where DDP lays out its buckets otherwise."""
    for folder in ("whole", "cut"):
        (tmp_path / folder).mkdir()
    wanted = ranks.run(4, tensors_after, str(tmp_path / "whole"), range(5))[0]
    for steps in (range(2), range(2, 5)):
        answer = ranks.run(4, tensors_after, str(tmp_path / "cut"), steps)[0]
    assert_same_bits(wanted, answer)


def a_run(folder: Path) -> Manifest:
    recipe = make_recipe()
    run = build_alone(recipe, make_task(recipe))
    update_manifest(folder, make_manifest(run, "digits", "trainer train digits", {}, []))
    return stored_in(folder)


def stored_in(folder: Path) -> Manifest:
    stored = read_stored(folder)
    assert stored is not None
    return stored


def test_what_differs_is_said_and_can_be_forced(tmp_path: Path) -> None:
    stored = a_run(tmp_path)
    changed = make_recipe(optim={"lr": 0.5}, data={"workers": 3}, log={"every": 2}).model_dump(mode="json")
    assert differences(stored.config, changed) == ["optim.lr: 0.001, now 0.5"], "workers and logging are free"
    moved = [{"model": {"name": f"hf/{name}"}, "language": {"tokenizer": name}} for name in "ab"]
    assert differences(moved[0], moved[1]) == [], "their content is compared with the data and the weights"
    assert differences({"model": {"name": "gpt"}}, {"model": {"name": "hf/a"}})
    with refused("optim.lr 0.001 0.5"):
        check_resumable(tmp_path, stored, changed, "cpu", {}, "auto", 1)
    check_resumable(tmp_path, stored, changed, "cpu", {}, "force", 1)
    with refused(tmp_path):
        check_resumable(tmp_path, stored, stored.config, "cpu", {}, "never", 1)
    check_resumable(tmp_path, stored, stored.config, "cpu", {}, "auto", 1)


def test_a_run_of_another_arithmetic_is_gone_on_with_by_force_alone(tmp_path: Path) -> None:
    now, facts = a_run(tmp_path), manifest(tmp_path)
    assert now.arithmetic == ARITHMETIC == facts["arithmetic"]

    def of(arithmetic: int) -> Manifest:
        return now.model_copy(
            update={"attempts": [now.attempts[0].model_copy(update={"arithmetic": arithmetic})]}
        )

    def check(stored: Manifest, mode: Mode = "auto", steps: int = 1) -> None:
        check_resumable(tmp_path, stored, now.config, "cpu", {}, mode, steps)

    with refused(f"1 {ARITHMETIC} 2 3 --resume"):
        check(of(1))
    check(of(1), "force")
    finished = of(1).model_copy(update={"status": "finished", "planned_steps": 4})
    check(finished, steps=4)
    with refused("arithmetic 1"):
        check(finished, steps=5)
    with refused("arithmetic 99"):
        check(of(99))
    facts["attempts"][0].pop("arithmetic")  # as version 0.1 wrote it
    write_json(tmp_path / "manifest.json", facts)
    older = stored_in(tmp_path)
    assert older.arithmetic == 1
    with refused("arithmetic 1"):
        replay_config(Recorded(tmp_path, older, [], 0), [])


def test_micro_batch_and_threads_are_part_of_the_arithmetic() -> None:
    before = make_recipe().model_dump(mode="json")
    for changes in ({"data": {"micro_batch_size": 32}}, {"parallel": {"threads": 2}}):
        assert differences(before, make_recipe(**changes).model_dump(mode="json"))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    recipes = (make_recipe(model={"width": width}) for width in (4, 8))
    run, other = (build_alone(recipe, make_task(recipe)) for recipe in recipes)
    write(tmp_path, 3, tensors_of(run.state), numbers_of(run.state, [0.0]))
    before = saved(other)
    with refused("checkpoint"):
        load_checkpoint(other, newest_good(tmp_path)[0])
    assert_same_bits(saved(other), before)


SIGNALED = """
import os, signal, sys
from trainer import cli
from trainer.launch import signals

def now(*given, end=signals.end_on_signal):
    end(*given)
    os.kill(os.getpid(), signal.SIGTERM)

signals.end_on_signal = now
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_signal_before_the_launch_ends_at_once(tmp_path: Path) -> None:
    """With 75, as there is a checkpoint to go on from."""
    (tmp_path / "run" / "checkpoints" / "step-00000007").mkdir(parents=True)
    words = ["train", "digits", "--out", str(tmp_path / "run")]
    done = preloaded.run([sys.executable, "-c", SIGNALED, *words], cwd=ROOT)
    assert done.returncode == 75, done.stderr
    assert named(done.stderr, "SIGTERM")
    assert done.stderr.count("\n") == 1
