"""Promise: an anomaly comes again when a run is trained again, with the same bits; else that is said."""

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.files import contents
from tests.helpers.forked import attempt, small
from tests.helpers.poison import SEED, poison
from tests.helpers.refusals import named
from trainer.cli import main
from trainer.commands.verify import replay as module
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import load_recipe
from trainer.errors import BadInputError
from trainer.train.anomaly import read_anomalies

Capsys = pytest.CaptureFixture[str]


def replays_with(before: Callable[[], None] | None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replays in a fork with a fault in it; returns what these will have said."""
    said = list[str]()

    def start(request: argparse.Namespace, *_: Any) -> int:
        recipe = load_recipe(request.recipe, request.set)
        done = attempt(request.out, recipe, request.resume, stop_after=request.stop_after, before=before)
        said.append(done.said)
        return done.code

    monkeypatch.setattr(module, "start", start)
    return said


def run_of(folder: Path, before: Callable[[], None], **keys: Any) -> Path:
    recipe: Recipe = small(**SEED, anomaly={"spike_history": 10, **keys}, checkpoint={"keep": 3})
    attempt(folder, recipe, before=before)
    return folder


@pytest.fixture(scope="module")
def stopped_at_7(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that an anomaly of its step 7 stopped; nobody changes its files."""
    return run_of(tmp_path_factory.mktemp("runs") / "run", poison([6], "gradient"))


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_it_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys, policy: str) -> None:
    fault = poison([6, 12], "gradient")
    run = run_of(tmp_path / "run", fault, nonfinite=policy)
    before = contents(run)
    replays_with(fault, monkeypatch)
    for number, step in enumerate([7] if policy == "stop" else [7, 13], 1):
        assert main(["verify", str(run), "--anomaly", str(number)]) == 0
        out = capsys.readouterr().out
        assert named(out, f"{number} {step}")
        # From the newest checkpoint before it: every five steps and at the end, three kept.
        newest = {("stop", 7): 6, ("skip", 13): 11}.get((policy, step), 1)
        assert f"training step{'s' * (newest < step)} {newest}" in out
    assert contents(run) == before
    assert main(["verify", str(run)]) == 0
    assert f"training steps 1 to {6 if policy == 'stop' else 16} of 16" in capsys.readouterr().out


def test_a_run_that_was_stopped_at_once_has_only_its_anomaly(tmp_path: Path, capsys: Capsys) -> None:
    run = run_of(tmp_path / "run", poison([0], "gradient"))
    assert main(["verify", str(run)]) == 2
    assert "nothing was recorded before the step 1 that stopped it" in capsys.readouterr().err


def test_the_replay_names_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    recipe = small(optim={"name": "sgd", "lr": 1e30})
    assert attempt(tmp_path / "run", recipe).code == 1
    said = replays_with(None, monkeypatch)
    assert main(["verify", str(tmp_path / "run"), "--anomaly", "1"]) == 0
    assert "came again" in capsys.readouterr().out
    assert named(said[-1], "finite")


def test_a_leap_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    fault = poison([13], "leap")
    run = run_of(tmp_path / "run", fault, spike="stop")
    assert [one["kind"] for one in read_anomalies(run)] == ["spike"]
    replays_with(fault, monkeypatch)
    assert main(["verify", str(run), "--anomaly", "1"]) == 0
    assert "came again" in capsys.readouterr().out
    assert main(["verify", str(run)]) == 0
    assert "identical" in capsys.readouterr().out


def test_what_does_not_come_again_is_said(
    tmp_path: Path, stopped_at_7: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    run = shutil.copytree(stopped_at_7, tmp_path / "run")
    replays_with(None, monkeypatch)
    assert main(["verify", str(run), "--anomaly", "1"]) == 1
    assert "anomaly 1, step 7: did not come again" in capsys.readouterr().out
    (anomaly,) = read_anomalies(run)
    (run / "anomalies.jsonl").write_text(json.dumps({**anomaly, "samples": [0]}) + "\n")
    replays_with(poison([6], "gradient"), monkeypatch)
    assert main(["verify", str(run), "--anomaly", "1"]) == 1
    assert "came again, but samples was [0] and is [" in capsys.readouterr().out


@pytest.mark.parametrize("number", ["0", "2"])
def test_there_must_be_one(stopped_at_7: Path, capsys: Capsys, number: str) -> None:
    assert main(["verify", str(stopped_at_7), "--anomaly", number]) == 2
    assert f"--anomaly {number}: anomalies 1 to 1 were recorded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "processes", "device", "wanted"),
    [
        (None, None, "cpu", None),
        (None, 2, "cpu", 2),
        ("2", None, "cuda", 2),
        ("0,3", None, "cuda", 2),
        (None, 0, "cpu", "--nproc-per-node 0: give a number from 1 on"),
        (None, -1, "cuda", "--nproc-per-node -1: give a number from 1 on"),
        ("2", None, "cpu", "--gpus 2: the run was trained on CPUs"),
    ],
)
def test_the_ranks_that_are_asked_for(
    gpus: str | None, processes: int | None, device: str, wanted: int | str | None
) -> None:
    options = argparse.Namespace(gpus=gpus, nproc_per_node=processes)
    if isinstance(wanted, str):
        with pytest.raises(BadInputError, match=f"^{wanted}"):
            module.ranks_wanted(options, device)
    else:
        assert module.ranks_wanted(options, device) == wanted
