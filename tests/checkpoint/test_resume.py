"""Promise: a run stopped anywhere resumes to the same bits; a checkpoint that doesn't fit is refused."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chaos import chaos, ending
from tests.helpers import preloaded
from tests.helpers.held import held, pid_of_rank
from tests.helpers.refusals import named, refused
from tests.helpers.toys import make_recipe
from tests.helpers.waiting import SECONDS, until
from tests.helpers.world import Ranks
from trainer.checkpoint.store import newest_good, write
from trainer.commands.verify.recorded import Recorded
from trainer.commands.verify.replay import replay_config
from trainer.distributed.parallel import World
from trainer.runs.differences import differences
from trainer.runs.folder import write_json
from trainer.runs.manifest import read_stored, update_manifest
from trainer.train.components.checkpoint_choice import load_checkpoint
from trainer.train.components.run import build
from trainer.train.components.task import make_task
from trainer.train.provenance import make_manifest
from trainer.train.start.decision import check_resumable
from trainer.train.state import numbers_of, tensors_of
from trainer.train.step import train_step
from trainer.version import ARITHMETIC

ROOT = Path(__file__).parents[2]


ALONE = World(0, 1, 0, torch.device("cpu"), None)
# For ranks of tests.helpers.world.
DIGITS: dict[str, Any] = {
    "epochs": 1,
    "max_steps": 6,
    "data": {"global_batch_size": 64, "micro_batch_size": 16, "eval_batch_size": 50, "augment": "affine"},
    "model": {"width": 8, "norm": "group"},
    "optim": {"lr": 0.01, "max_grad_norm": 1.0},
    "ema": {"decay": 0.9},
}
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
    process = preloaded.Popen(
        [*RUN, "--out", str(folder), *words],
        cwd=ROOT,
        env=held(beside, step, rank),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
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
        assert json.loads((folder / "manifest.json").read_text())["status"] == "stopped"
    killed = cut(folder, 16, "0", signal.SIGKILL, *two, "--max-restarts", "1")
    assert killed.returncode == 0, killed.stderr
    assert ending(folder) == ending(whole)


@pytest.mark.slow  # the tests here cut at known places, in the training and in the midst of a write
def test_chaos_in_small() -> None:
    tally = chaos("alone", 4, seed=3)
    assert not tally.failures and tally.counts["cuts"] >= 2


def tensors_after(world: World, folder: str, steps: range) -> dict[str, torch.Tensor]:
    """Goes on in the folder's newest checkpoint, does some steps, and leaves another; what is in that."""
    recipe = make_recipe(**DIGITS)
    run = build(recipe, make_task(recipe), world, workers=0)
    load_checkpoint(run, newest_good(Path(folder))[0])
    assert run.state.step == steps.start
    batches = run.loader(run.share.batches(steps.start))
    run.replica.train()
    for step in steps:
        train_step(run, batches, step)
    tensors = tensors_of(run.state)
    if world.rank == 0:
        write(Path(folder), steps.stop, tensors, numbers_of(run.state, [float(run.state.loss)]))
    torch.distributed.barrier(world.group)
    return {f"{part}.{name}": one.clone() for part, found in tensors.items() for name, one in found.items()}


@pytest.mark.compat
def test_four_ranks_go_on_with_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    """More than two: there the order of a sum is another one where DDP lays out its buckets otherwise."""
    for folder in ("whole", "cut"):
        (tmp_path / folder).mkdir()
    wanted = ranks.run(4, tensors_after, str(tmp_path / "whole"), range(5))[0]
    for steps in (range(2), range(2, 5)):
        answer = ranks.run(4, tensors_after, str(tmp_path / "cut"), steps)[0]
    assert wanted.keys() == answer.keys()
    assert all(torch.equal(wanted[name], answer[name]) for name in wanted)


def a_run(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    recipe = make_recipe(**changes)
    run = build(recipe, make_task(recipe), ALONE, 0)
    update_manifest(folder, make_manifest(run, "digits", "trainer train digits", {}, []))
    return folder


def test_what_differs_is_said_and_can_be_forced(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    stored = read_stored(folder)
    assert stored is not None
    changed = make_recipe(optim={"lr": 0.5}, data={"workers": 3}, log={"every": 2}).model_dump(mode="json")
    assert differences(stored.config, changed) == ["optim.lr: 0.001, now 0.5"], "workers and logging are free"
    moved = [{"model": {"name": f"hf/{name}"}, "language": {"tokenizer": name}} for name in "ab"]
    assert differences(moved[0], moved[1]) == [], "their content is compared with the data and the weights"
    assert differences({"model": {"name": "gpt"}}, {"model": {"name": "hf/a"}})
    with refused("optim.lr 0.001 0.5"):
        check_resumable(folder, stored, changed, "cpu", {}, "auto", 1)
    check_resumable(folder, stored, changed, "cpu", {}, "force", 1)
    with refused(folder):
        check_resumable(folder, stored, stored.config, "cpu", {}, "never", 1)
    check_resumable(folder, stored, stored.config, "cpu", {}, "auto", 1)


def test_a_run_of_another_arithmetic_is_gone_on_with_by_force_alone(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    now = read_stored(folder)
    assert now is not None
    assert now.arithmetic == ARITHMETIC == json.loads((folder / "manifest.json").read_text())["arithmetic"]
    before = now.model_copy(update={"attempts": [now.attempts[0].model_copy(update={"arithmetic": 1})]})
    with refused(f"1 {ARITHMETIC} 2 3 --resume"):
        check_resumable(folder, before, now.config, "cpu", {}, "auto", 1)
    check_resumable(folder, before, now.config, "cpu", {}, "force", 1)
    finished = before.model_copy(update={"status": "finished", "planned_steps": 4})
    check_resumable(folder, finished, now.config, "cpu", {}, "auto", 4)
    with refused("arithmetic 1"):
        check_resumable(folder, finished, now.config, "cpu", {}, "auto", 5)
    newer = now.model_copy(update={"attempts": [now.attempts[0].model_copy(update={"arithmetic": 99})]})
    with refused("arithmetic 99"):
        check_resumable(folder, newer, now.config, "cpu", {}, "auto", 1)
    facts = json.loads((folder / "manifest.json").read_text())
    facts["attempts"][0].pop("arithmetic")  # as version 0.1 wrote it
    write_json(folder / "manifest.json", facts)
    older = read_stored(folder)
    assert older is not None
    assert older.arithmetic == 1
    recorded = Recorded(folder, older, [], 0)
    with refused("arithmetic 1"):
        replay_config(recorded, [])


def test_micro_batch_and_threads_are_part_of_the_arithmetic(tmp_path: Path) -> None:
    stored = read_stored(a_run(tmp_path / "run"))
    assert stored is not None
    for changes in ({"data": {"micro_batch_size": 32}}, {"parallel": {"threads": 2}}):
        assert differences(stored.config, make_recipe(**changes).model_dump(mode="json"))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    small, large = (make_recipe(model={"width": width}) for width in (4, 8))
    run, other = (build(recipe, make_task(recipe), ALONE, 0) for recipe in (small, large))
    write(tmp_path, 3, tensors_of(run.state), numbers_of(run.state, [0.0]))
    before = {name: tensor.clone() for name, tensor in other.state.model.state_dict().items()}
    with refused("checkpoint"):
        load_checkpoint(other, newest_good(tmp_path)[0])
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state.model.state_dict().items())


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
