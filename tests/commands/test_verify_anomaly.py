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
from tests.helpers.refusals import named, refused
from trainer.cli import main
from trainer.commands.verify import replay as module
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import load_recipe
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


def test_it_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    fault = poison([6, 12], "gradient")
    run = run_of(tmp_path / "run", fault, nonfinite="skip")
    before = contents(run)
    replays_with(fault, monkeypatch)
    assert main(["verify", str(run), "--anomaly", "2"]) == 0
    # From the newest checkpoint before it: every five steps and at the end, three kept.
    assert named(capsys.readouterr().out, "2 13 11")
    assert contents(run) == before


def test_a_run_that_an_anomaly_stopped_is_replayed_up_to_it(
    stopped_at_7: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    replays_with(poison([6], "gradient"), monkeypatch)
    assert main(["verify", str(stopped_at_7)]) == 0
    assert named(capsys.readouterr().out, "1 6 16")
    assert main(["verify", str(stopped_at_7), "--anomaly", "2"]) == 2
    assert named(capsys.readouterr().err, "--anomaly 2")


def test_a_run_that_was_stopped_at_once_has_only_its_anomaly(tmp_path: Path, capsys: Capsys) -> None:
    run = run_of(tmp_path / "run", poison([0], "gradient"))
    assert main(["verify", str(run)]) == 2
    assert named(capsys.readouterr().err, "1")


def test_what_does_not_come_again_is_said(
    tmp_path: Path, stopped_at_7: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    run = shutil.copytree(stopped_at_7, tmp_path / "run")
    replays_with(None, monkeypatch)
    assert main(["verify", str(run), "--anomaly", "1"]) == 1
    assert named(capsys.readouterr().out, "1 7 not")
    (anomaly,) = read_anomalies(run)
    (run / "anomalies.jsonl").write_text(json.dumps({**anomaly, "samples": [0]}) + "\n")
    replays_with(poison([6], "gradient"), monkeypatch)
    assert main(["verify", str(run), "--anomaly", "1"]) == 1
    assert named(capsys.readouterr().out, "samples [0]")


@pytest.mark.parametrize(
    ("gpus", "processes", "device", "wanted"),
    [(None, None, "cpu", None), (None, 2, "cpu", 2), ("0,3", None, "cuda", 2)],
)
def test_the_ranks_that_are_asked_for(
    gpus: str | None, processes: int | None, device: str, wanted: int | None
) -> None:
    options = argparse.Namespace(gpus=gpus, nproc_per_node=processes)
    assert module.ranks_wanted(options, device) == wanted
    with refused("--gpus 2"):
        module.ranks_wanted(argparse.Namespace(gpus="2", nproc_per_node=None), "cpu")
