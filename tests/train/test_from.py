"""Promise: a run begins from another's checkpoint with its very bits, says what differs, needs it once."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml

from tests.helpers import preloaded
from tests.helpers.forked import attempt, replace, small
from tests.helpers.refusals import named, refusal, refused
from tests.helpers.rows import read_rows
from tests.helpers.run_folders import changed, rewrite, with_state
from tests.helpers.toys import before_each_step_ends
from trainer.checkpoint.folder import read
from trainer.config.recipe import Recipe
from trainer.runs.folder import KEPT
from trainer.train.components.checkpoint_choice import chosen_checkpoint
from trainer.train.start import rank as trainer
from trainer.train.state import numbers_of, tensors_of

# The schedule stays where it is, so that only what is taken over decides.
CONSTANT: dict[str, Any] = {"optim": {"schedule": "constant", "warmup_steps": 0.0}}


def recipe(**sections: Any) -> Recipe:
    return small(**{**CONSTANT, **sections})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints of steps 15 and 16, and the best."""
    folder = tmp_path_factory.mktemp("from") / "source"
    done = attempt(folder, recipe(checkpoint={"best": True}))
    assert done.code == 0, done.said
    return folder


def manifest(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return read


def learned(folder: Path) -> list[bytes]:
    return [(folder / f"{name}.safetensors").read_bytes() for name in ("model", "ema")]


def checkpoint_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def at_step_0(folder: Path, of: Recipe, source: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state that a run begins with: its tensors, and its numbers."""
    file = folder.with_suffix(".begun")

    def look() -> None:
        def stop_there(run: Any, *_: Any, **__: Any) -> None:
            tensors = {
                f"{kind}|{name}": t.contiguous()
                for kind, part in tensors_of(run.state).items()
                for name, t in part.items()
            }
            numbers = json.dumps({**numbers_of(run.state, []), "step": run.state.step})
            copies = {name: tensor.clone() for name, tensor in tensors.items()}
            safetensors.torch.save_file(copies, file, {"numbers": numbers})
            os._exit(0)

        replace(trainer, "train", stop_there)

    done = attempt(folder, of, before=look, source=source)
    assert done.code == 0, done.line
    tensors: dict[str, Any] = {}
    for name, tensor in safetensors.torch.load_file(file).items():
        kind, _, rest = name.partition("|")
        tensors.setdefault(kind, {})[rest] = tensor
    with safetensors.safe_open(file, "pt") as opened:
        return tensors, json.loads(opened.metadata()["numbers"])


def test_a_run_begins_with_the_very_bits(tmp_path: Path, source: Path) -> None:
    """All but the counts: these are a new run's."""
    tensors, numbers = at_step_0(tmp_path / "run", recipe(), str(source))
    there = read(checkpoint_of(source, 16)).tensors
    counts = {"updates": torch.zeros(1, dtype=torch.int64), "ema/moved_at": torch.zeros(1, dtype=torch.int64)}
    wanted = {**there, "optimizer": {**there["optimizer"], **counts}}
    assert tensors.keys() == wanted.keys() == {"model", "optimizer", "ema"}
    for kind, part in wanted.items():
        assert tensors[kind].keys() == part.keys()
        for name, tensor in part.items():
            assert torch.equal(tensors[kind][name], tensor), (kind, name)
    assert (numbers["step"], numbers["best"], numbers["no_better"]) == (0, None, 0)
    assert numbers["averaged_before"] == 16, "the average has found its pace"


def test_stopped_or_killed_it_goes_on_without_the_other_run(tmp_path: Path, source: Path) -> None:
    """By a signal after its first checkpoint, and by kill -9 before it: then from what it keeps."""
    assert attempt(tmp_path / "whole", recipe(seed=1), source=str(source)).code == 0
    assert learned(tmp_path / "whole") != learned(source)
    gone = tmp_path / "gone"

    def die() -> None:
        before_each_step_ends(lambda done: os.kill(os.getpid(), signal.SIGKILL) if done == 3 else None)

    for name, ends, options in (
        ("stopped", 75, {"stop_at": 8}),
        ("killed", -signal.SIGKILL, {"before": die}),
    ):
        folder = tmp_path / name
        shutil.copytree(source, gone)
        beside = checkpoint_of(gone, 16)  # nothing of what lies there besides is taken
        (beside / ".snapshot").mkdir()
        (beside / "link").symlink_to(tmp_path / "whole" / "config.yaml")
        faults: Any = options
        begun = attempt(folder, recipe(seed=1), source=str(gone), **faults)
        assert begun.code == ends
        assert not {".snapshot", "link"} & {path.name for path in (folder / KEPT).rglob("*")}
        shutil.rmtree(gone)
        done = attempt(folder, recipe(seed=1), source=str(gone))
        assert done.code == 0, done.line
        assert ("begins again" in done.said) == (name == "killed")
        assert learned(folder) == learned(tmp_path / "whole")
        assert read_rows(folder, ("train", "eval"))[0]["loss"] == read_rows(tmp_path / "whole")[0]["loss"]


@pytest.mark.parametrize(
    ("sections", "kind"),
    [({"optim": {"name": "sgd", "lr": 0.01}}, "optimizer"), ({"ema": {"decay": 0}}, "ema")],
)
def test_what_does_not_fit_is_left(tmp_path: Path, source: Path, sections: dict[str, Any], kind: str) -> None:
    tensors, _ = at_step_0(tmp_path / "run", recipe(**sections), str(source))
    there = read(checkpoint_of(source, 16)).tensors
    assert {name for name in there if name != kind} == {name for name in tensors if name != kind}
    assert all(torch.equal(tensors["model"][name], tensor) for name, tensor in there["model"].items())
    assert not any(tensor.any() for tensor in tensors.get(kind, {}).values()), "nothing of the other"


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return preloaded.run([sys.executable, "-m", "trainer", *words], cwd=folder)


@pytest.fixture
def place(tmp_path: Path, source: Path) -> Path:
    """A folder with the recipe, and the run as `a`."""
    values = recipe(checkpoint={"best": True}).model_dump(mode="json", exclude_none=True)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    shutil.copytree(source, tmp_path / "a")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["none"], "--init-from none manifest.json"),
        (["a@x"], "--init-from a@x best last"),
        (["a@7"], "7 16"),
        (["a", "model.width=8"], "stem.weight"),
        (["a", "model.pretrained=x.safetensors"], "model.pretrained"),
        (["a", "--out", "a"], "a --init-from"),
    ],
)
def test_what_it_cannot_begin_from_is_one_line(place: Path, words: list[str], names: str) -> None:
    done = command(place, "train", "mine.yaml", "--init-from", *words)
    refusal(done.returncode, done.stderr, names)
    assert not (place / "runs").exists() or not list((place / "runs").iterdir()), "nothing was begun"


@pytest.mark.parametrize("best", [5, [1.0, "x"], [1.0, 99]])
def test_an_odd_best_is_one_line(tmp_path: Path, source: Path, best: Any) -> None:
    rewrite(changed(tmp_path / "a", source), with_state(best=best))
    with refused("step-00000016 state.json"):
        chosen_checkpoint(tmp_path / "a", "best", "--init-from a@best")


def test_a_damaged_checkpoint_is_one_line(place: Path) -> None:
    weights = checkpoint_of(place / "a", 16) / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    done = command(place, "train", "mine.yaml", "--init-from", "a")
    refusal(done.returncode, done.stderr, "step-00000016", "model.safetensors", "SHA256SUMS", "RUN@STEP")


def test_from_the_command_line_on_two_ranks_and_replayed(place: Path) -> None:
    """With the run's own recipe, as none is given; on two ranks; and `verify` has all that it needs."""
    two = ["--nproc-per-node", "2", "data.micro_batch_size=4", "max_steps=6"]
    done = command(place, "train", "--init-from", "a@15", "--out", "b", "seed=5", *two)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(place / "a")
    proof = command(place, "verify", "b")
    assert proof.returncode == 0, proof.stdout + proof.stderr


def test_the_same_command_goes_on_with_the_run_that_it_began(place: Path) -> None:
    words = ["train", "mine.yaml", "--init-from", "a@15", "--out", "b"]
    assert command(place, *words, "--stop-after", "5").returncode == 75
    other = command(place, *words[:3], "a@16", *words[4:])
    refusal(other.returncode, other.stderr, "15")
    assert command(place, *words).returncode == 0


def test_a_run_is_resumed_with_its_own_recipe(place: Path) -> None:
    """No recipe and no settings again; a setting beside it is checked as ever."""
    words = ["train", "mine.yaml", "seed=3", "optim.lr=0.002"]
    assert command(place, *words, "--out", "b", "--stop-after", "5").returncode == 75
    (place / "mine.yaml").unlink()
    other = command(place, "train", "--resume", "b", "seed=4")
    refusal(other.returncode, other.stderr, "seed 3 4")
    done = command(place, "train", "--resume", "b", "log.every=4")
    assert done.returncode == 0, done.stderr
    config = manifest(place / "b")["config"]
    assert (config["seed"], config["optim"]["lr"], config["log"]["every"]) == (3, 0.002, 4)


def test_a_redacted_value_must_be_given(place: Path) -> None:
    facts = manifest(place / "a")
    facts["config"]["data"]["path"] = "https://***@host/data"
    (place / "a" / "manifest.json").write_text(json.dumps(facts))
    refused = command(place, "train", "--resume", "a")
    assert refused.returncode == 2 and named(refused.stderr, "data.path --set data.path=")


def test_a_step_and_the_best_can_be_chosen(tmp_path: Path, source: Path) -> None:
    best = read(checkpoint_of(source, 16)).state["best"][1]
    for number, (which, step) in enumerate((("15", 15), ("best", best), ("last", 16))):
        tensors, _ = at_step_0(tmp_path / str(number), recipe(), f"{source}@{which}")
        there = read(checkpoint_of(source, step)).tensors["model"]
        assert all(torch.equal(tensors["model"][name], tensor) for name, tensor in there.items())
