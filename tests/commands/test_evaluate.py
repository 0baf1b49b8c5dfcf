"""Promise: `trainer evaluate` gives the very numbers that training measured, and what lies behind them."""

import json
import math
import shutil
import sys
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.helpers import preloaded
from tests.helpers.commands import command, refuse
from tests.helpers.refusals import named
from tests.helpers.rows import read_rows
from tests.helpers.trained import train_digits
from trainer.commands.evaluate.details import OfClasses
from trainer.commands.evaluate.evaluate import per_class
from trainer.data.batch import Batch
from trainer.tasks.sums import classified
from trainer.train.model_of_run import open_run


def last_row(run: Path) -> dict[str, Any]:
    return read_rows(run, ("eval",))[-1]


def asked(*words: object) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(command("evaluate", *words, "--json").out)
    return told


def test_the_numbers_are_those_of_training(digits_run: Path) -> None:
    told, row = asked(digits_run), last_row(digits_run)
    assert told["metrics"] == {name: row[name] for name in ("loss", "accuracy", "top5")}
    assert told["weights"] == "ema.safetensors"
    assert told["samples"] == 360 == sum(count for _, _, count in told["confusion"])
    right = sum(count for true, taken_for, count in told["confusion"] if true == taken_for)
    assert right / 360 == told["metrics"]["accuracy"]


def test_several_ranks_give_the_same_numbers(digits_run: Path) -> None:
    words = ["evaluate", str(digits_run), "--json", "--nproc-per-node", "2"]
    two = preloaded.run([sys.executable, "-m", "trainer", *words])
    assert two.returncode == 0, two.stderr
    assert json.loads(two.stdout) == asked(digits_run)


def test_somebody_elses_ranks_are_not_waited_for(digits_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of a run of several ranks, or a pod of Kubeflow, has these in its environment."""
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**ranks, "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert asked(digits_run)["metrics"]["loss"] == last_row(digits_run)["loss"]


def test_people_see_a_table_and_the_report_has_it(digits_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(digits_run, tmp_path / "run")
    assert named(command("evaluate", run).out, f"accuracy {last_row(run)['accuracy']:.4f} precision")
    mistakes = json.loads((run / "evaluation.json").read_text())["mistakes"]
    data = open_run(run).task.evaluation_data
    assert mistakes and data.arrays is not None
    sure = [one["sure"] for one in mistakes]
    assert sure == sorted(sure, reverse=True)
    for one in mistakes:
        assert one["label"] == data.arrays["label"][one["sample"]] != one["predicted"]
        picture = np.asarray(Image.open(BytesIO(b64decode(one["png"]))))
        assert (picture == data.arrays["image"][one["sample"], :, :, 0]).all()
    command("report", run)
    page = (run / "report.html").read_text()
    assert 'id="evaluation"' in page and page.count('class="pixels"') == len(mistakes)
    assert page.count(" as ") >= 100  # a cell of the matrix has a title


def test_the_weights_that_are_asked_for(digits_run: Path) -> None:
    plain = asked(digits_run / "model.safetensors")
    assert plain["weights"] == "model.safetensors"
    assert plain["metrics"]["loss"] != last_row(digits_run)["loss"]


def test_a_checkpoint_that_is_asked_for(tmp_path: Path) -> None:
    run = train_digits(tmp_path / "run", stop_after=30)
    steps = sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    assert steps
    newest = asked(run, "--checkpoint", "last")
    assert newest["weights"] == f"checkpoints/step-{steps[-1]:08d}/ema.safetensors"
    assert asked(run, "--checkpoint", steps[-1]) == newest == asked(run)
    refuse(["evaluate", run, "--checkpoint", 7], f"7 {', '.join(map(str, reversed(steps)))}")


def test_the_table_is_by_the_book() -> None:
    random = np.random.default_rng(0)
    label, predicted = random.integers(0, 4, 200), random.integers(0, 3, 200)  # nobody says 3
    matrix = np.zeros((4, 4), np.int64)
    np.add.at(matrix, (label, predicted), 1)
    rows = per_class([(*cell, matrix[cell]) for cell in zip(*matrix.nonzero(), strict=True)], "abcd")
    for number, row in enumerate(rows):
        right = ((label == number) & (predicted == number)).sum()
        precision = right / (predicted == number).sum() if number < 3 else None
        recall = right / (label == number).sum()
        assert (row["precision"], row["recall"]) == (precision, recall)
        assert row["f1"] == pytest.approx(2 * precision * recall / (precision + recall) if precision else 0)
    assert rows[0]["confused_with"] == "abcd"[max((1, 2, 3), key=lambda n: (matrix[0][n], -n))]


def test_many_classes_need_no_matrix_of_all() -> None:
    """That of so many classes has 80 GB."""
    task = OfClasses(SimpleNamespace(describe=lambda: {"classes": [str(n) for n in range(100_000)]}))  # type: ignore[arg-type]
    rows = {"label": torch.tensor([7, 7, 99_999]), "predicted": torch.tensor([7, 9, 0])}
    task.summarize({**rows, "sure": torch.tensor([0.9, 0.8, 0.7])})
    assert [one["sample"] for one in task.details["mistakes"]] == [1, 2]
    task.summarize({**rows, "sure": torch.tensor([0.9, math.nan, 0.7])})
    assert [one["sample"] for one in task.details["mistakes"]] == [2], "JSON has no NaN"
    assert task.details["confusion"] == [[7, 7, 1], [7, 9, 1], [99_999, 0, 1]]
    assert per_class(task.details["confusion"], task.classes)[7]["confused_with"] == "9"


def test_answers_are_ranked_once_and_one_that_is_no_number_is_never_right() -> None:
    """Of equal scores the smaller class is the better one; and accuracy never exceeds top5."""
    random = np.random.default_rng(0)
    for classes in (6, 10, 100):
        scores = random.integers(0, 3, (500, classes)).astype(np.float32)
        label = random.integers(0, classes, 500)
        sums = classified(torch.from_numpy(scores), torch.from_numpy(label), Batch({}, None, None, 500))
        ranked = [sorted(range(classes), key=lambda n, row=row: -row[n]) for row in scores]  # type: ignore[misc]
        for name, most in (("accuracy", 1), ("top5", 5)):
            assert int(sums[name]) == sum(one in best[:most] for one, best in zip(label, ranked, strict=True))
    padded = Batch({}, torch.tensor([1.0, 0.0, 1.0]), None, 2)  # padding counts for nothing
    logits = torch.tensor([[6.0, 5, 4, 3, 2, 1]]).expand(3, -1)
    assert int(classified(logits, torch.tensor([0, 4, 5]), padded)["top5"]) == 1
    odd = torch.zeros(3, 10)
    odd[0], odd[1, 4], odd[2] = torch.nan, torch.nan, torch.inf
    sums = classified(odd, torch.tensor([0, 0, 0]), Batch({}, None, None, 3))
    assert (int(sums["accuracy"]), int(sums["top5"])) == (1, 1)


def test_somebodys_weights_are_measured_without_training(digits_run: Path, tmp_path: Path) -> None:
    """The average of a run, as Lightning's module would name it, with something beside it."""
    state, somebodys = load_file(digits_run / "ema.safetensors"), tmp_path / "theirs.safetensors"
    save_file({**{f"model.{name}": one for name, one in state.items()}, "loss.w": torch.ones(3)}, somebodys)
    words, row = ("--set", "model.width=16", "digits", "seed=9", "--weights"), last_row(digits_run)
    told = asked(*words, somebodys)
    assert told["metrics"]["accuracy"] == row["accuracy"]
    assert told["metrics"]["loss"] == pytest.approx(row["loss"], rel=1e-6)
    assert named(told["weights"], "model. 1")
    told = asked(digits_run / "config.yaml", "--weights", somebodys)
    assert told["metrics"] == {name: row[name] for name in told["metrics"]}


@pytest.mark.parametrize("odd", ["[]", '{"classes": ["a"], "confusion": [[0, 9, 1]]}', "a link"])
def test_an_odd_evaluation_is_left_out_of_the_report(digits_run: Path, tmp_path: Path, odd: str) -> None:
    run = shutil.copytree(digits_run, tmp_path / "run")
    (run / "evaluation.json").unlink(missing_ok=True)
    if odd == "a link":
        (run / "evaluation.json").symlink_to("/etc/passwd")
    else:
        (run / "evaluation.json").write_text(odd)
    command("report", run)
    assert 'id="evaluation"' not in (run / "report.html").read_text()
