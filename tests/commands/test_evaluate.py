"""Promise: `trainer evaluate` gives the very numbers that training measured, and what lies behind them."""

import json
import os
import shutil
import sys
from base64 import b64decode
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.helpers import preloaded
from tests.helpers.refusals import named, refusal
from tests.helpers.rows import read_rows
from tests.helpers.trained import train_digits
from trainer.cli import main
from trainer.commands.evaluate.details import OfClasses, with_details
from trainer.commands.evaluate.evaluate import per_class
from trainer.config.recipe_file import load_recipe
from trainer.data.batch import Batch
from trainer.observe.charts.confusion import confusion_chart
from trainer.tasks.average_precision import average_precision, coco_figures
from trainer.tasks.sums import classified
from trainer.train.components.task import make_task
from trainer.train.model_of_run import open_run


def last_row(run: Path) -> dict[str, Any]:
    return read_rows(run, ("eval",))[-1]


def asked(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["evaluate", *map(str, words), "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_the_numbers_are_those_of_training(digits_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told, row = asked(capsys, digits_run), last_row(digits_run)
    assert told["metrics"] == {name: row[name] for name in ("loss", "accuracy", "top5")}
    assert told["weights"] == "ema.safetensors"
    assert told["samples"] == 360 == sum(count for _, _, count in told["confusion"])
    right = sum(count for true, taken_for, count in told["confusion"] if true == taken_for)
    assert right / 360 == told["metrics"]["accuracy"]


def test_several_ranks_give_the_same_numbers(digits_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", str(digits_run), "--json"]
    assert main(words) == 0
    two = preloaded.run([sys.executable, "-m", "trainer", *words, "--nproc-per-node", "2"])
    assert two.returncode == 0, two.stderr
    assert json.loads(two.stdout) == json.loads(capsys.readouterr().out)


def test_somebody_elses_ranks_are_not_waited_for(digits_run: Path) -> None:
    """A hook of a run of several ranks, or a pod of Kubeflow, has these in its environment."""
    ranks = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    words: list[str | Path] = [sys.executable, "-m", "trainer", "evaluate", digits_run, "--json"]
    done = preloaded.run(words, env={**os.environ, **ranks})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"]["loss"] == last_row(digits_run)["loss"]


def test_people_see_a_table_and_a_picture(
    digits_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "matrix.svg"
    assert main(["evaluate", str(digits_run), "--plot", str(plot)]) == 0
    said = capsys.readouterr().out
    assert f"accuracy {last_row(digits_run)['accuracy']:.4f}" in said
    assert "precision" in said
    assert plot.read_text().count("<title>") == 100


def test_the_report_has_the_last_evaluation(digits_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(digits_run, run)
    assert main(["evaluate", str(run)]) == 0
    mistakes = json.loads((run / "evaluation.json").read_text())["mistakes"]
    data = open_run(run).task.evaluation_data
    assert mistakes and data.arrays is not None
    sure = [one["sure"] for one in mistakes]
    assert sure == sorted(sure, reverse=True)
    for one in mistakes:
        assert one["label"] == data.arrays["label"][one["sample"]] != one["predicted"]
        picture = np.asarray(Image.open(BytesIO(b64decode(one["png"]))))
        assert (picture == data.arrays["image"][one["sample"], :, :, 0]).all()
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert 'id="evaluation"' in page and page.count('class="pixels"') == len(mistakes)


@pytest.mark.parametrize("odd", ["", "[]", '{"classes": ["a"], "confusion": [[0, 9, 1]]}', "a link"])
def test_an_odd_evaluation_is_left_out_of_the_report(digits_run: Path, tmp_path: Path, odd: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(digits_run, run)
    (run / "evaluation.json").unlink(missing_ok=True)
    if odd == "a link":
        (run / "evaluation.json").symlink_to("/etc/passwd")
    else:
        (run / "evaluation.json").write_text(odd)
    assert main(["report", str(run)]) == 0
    assert 'id="evaluation"' not in (run / "report.html").read_text()


def test_the_weights_that_are_asked_for(digits_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked(capsys, digits_run / "ema.safetensors")
    plain = asked(capsys, digits_run / "model.safetensors")
    assert plain["weights"] == "model.safetensors"
    assert plain["metrics"]["loss"] != last_row(digits_run)["loss"]


def test_a_checkpoint_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    train_digits(run, stop_after=30)
    steps = sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    assert steps
    newest = asked(capsys, run, "--checkpoint", "last")
    assert newest["weights"] == f"checkpoints/step-{steps[-1]:08d}/ema.safetensors"
    assert asked(capsys, run, "--checkpoint", steps[-1]) == newest == asked(capsys, run)
    assert main(["evaluate", str(run), "--checkpoint", "7"]) == 2
    refusal(2, capsys.readouterr().err, f"7 {', '.join(map(str, reversed(steps)))}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere"),
        (["{run}", "--checkpoint", "first"], "first best last"),
        (["{run}", "--plot", "matrix.png"], ".svg"),
        (["{run}", "--plot", "nowhere/matrix.svg"], "nowhere/matrix.svg"),
        (["{run}", "--set", "optim.lr=1"], "optim.lr"),
        (["{run}", "--nproc-per-node", "0"], "--nproc-per-node"),
        (["{weights}"], "folder"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], said: str, digits_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "model.safetensors"
    weights.touch()
    assert main(["evaluate", *(word.format(run=digits_run, weights=weights) for word in words)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert named(told.err, said)
    assert told.err.count("\n") == 1


def test_a_plot_that_cannot_be_written_at_last_loses_no_result(
    digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("trainer.commands.evaluate.evaluate.write_whole", full)
    assert main(["evaluate", str(digits_run), "--plot", str(tmp_path / "m.svg")]) == 2
    out, err = capsys.readouterr()
    assert "accuracy" in out and named(err, "m.svg")
    (tmp_path / "m.svg").mkdir()  # what can be known before is
    assert main(["evaluate", str(digits_run), "--plot", str(tmp_path / "m.svg")]) == 2
    assert capsys.readouterr().out == ""


def test_the_matrix_and_the_table_are_scikit_learns() -> None:
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support  # here: it imports SciPy

    random = np.random.default_rng(0)
    label, predicted = random.integers(0, 4, 200), random.integers(0, 3, 200)  # nobody says 3
    matrix = confusion_matrix(label, predicted)
    rows = per_class([(*cell, matrix[cell]) for cell in zip(*matrix.nonzero(), strict=True)], "abcd")
    for name, column in zip(
        ("precision", "recall", "f1"),
        precision_recall_fscore_support(label, predicted, zero_division=np.nan)[:3],
        strict=True,
    ):
        ours = [np.nan if row[name] is None else row[name] for row in rows]
        np.testing.assert_allclose(ours, column, rtol=1e-12)
    assert rows[0]["confused_with"] == "abcd"[max((1, 2, 3), key=lambda n: (matrix[0][n], -n))]


def test_a_class_that_never_comes_divides_by_nothing() -> None:
    (_, row) = per_class([(0, 0, 2)], ("a", "<b>"))
    assert row == dict.fromkeys(("precision", "recall", "f1", "confused_with")) | {
        "class": "<b>",
        "samples": 0,
    }
    assert "<b>" not in confusion_chart([(0, 0, 2)], ("a", "<b>"))


def test_many_classes_need_no_matrix_of_all() -> None:
    """That of so many classes has 160 GB."""
    task = OfClasses(SimpleNamespace(describe=lambda: {"classes": [str(n) for n in range(200_000)]}))  # type: ignore[arg-type]
    rows = {"label": torch.tensor([7, 7, 199_999]), "predicted": torch.tensor([7, 9, 0])}
    task.summarize({**rows, "sure": torch.tensor([0.9, 0.8, 0.7])})
    assert task.details["confusion"] == [[7, 7, 1], [7, 9, 1], [199_999, 0, 1]]
    assert per_class(task.details["confusion"], task.classes)[7]["confused_with"] == "9"


def test_the_top_five_are_counted_where_there_are_more_classes() -> None:
    logits = torch.tensor([[6.0, 5, 4, 3, 2, 1]]).expand(3, -1)
    label = torch.tensor([0, 4, 5])
    batch = Batch({}, None, None, 3)
    assert {
        name: int(count) for name, count in classified(logits, label, batch).items() if name != "loss"
    } == {
        "accuracy": 1,
        "top5": 2,
    }
    padded = Batch({}, torch.tensor([1.0, 0.0, 1.0]), None, 2)  # padding counts for nothing
    assert int(classified(logits, label, padded)["top5"]) == 1
    assert set(classified(logits[:, :5], label % 5, batch)) == {"loss", "accuracy"}


def found_and_there(seed: int) -> dict[str, Any]:
    """Rows of six images with five boxes each, found nearly where they are."""
    random = np.random.default_rng(seed)
    corner = random.uniform(0, 80, (6, 5, 2))
    boxes = np.concatenate([corner, corner + random.uniform(5, 120, (6, 5, 2))], 2)
    return {
        "boxes": boxes + random.normal(0, 2, boxes.shape),
        "scores": random.uniform(0.1, 1, (6, 5)),
        "labels": random.integers(0, 2, (6, 5)),
        "true_boxes": boxes,
        "true_labels": random.integers(0, 2, (6, 5)),
        "true_crowd": np.zeros((6, 5), np.int64),
        "true_area": (boxes[..., 2:] - boxes[..., :2]).prod(-1),
        "pixel": np.ones((6, 1)),
        "true_count": np.full(6, 5),
    }


def test_a_detector_has_the_twelve_beside_its_own_metric() -> None:
    details = with_details(make_task(load_recipe("digits-detection", [])))
    rows = {name: torch.from_numpy(array) for name, array in found_and_there(1).items()}
    rows["true_count"] = rows["true_count"][:, None]
    metrics = details.summarize(rows)
    assert metrics["map"] > 0
    assert details.details["coco"]["AP"] == pytest.approx(metrics["map"], abs=1e-12)


def test_cocos_twelve_agree_with_the_metric_of_training() -> None:
    rows = found_and_there(1)
    ours, coco = average_precision(rows, 2), coco_figures(rows, 2)
    assert len(coco) == 12
    assert coco["AP"] == pytest.approx(ours["map"], abs=1e-12)
    assert coco["AP50"] == pytest.approx(ours["map_50"], abs=1e-12)
    assert coco["AR1"] <= coco["AR10"] <= coco["AR100"]  # type: ignore[operator]
    few = {**rows, "true_area": np.full((6, 5), 100.0)}
    assert coco_figures(few, 2)["APlarge"] is None


def test_answers_are_ranked_once_and_one_that_is_no_number_is_never_right() -> None:
    """Against sklearn, which breaks ties by the class's number, too; and accuracy never exceeds top5."""
    from sklearn.metrics import top_k_accuracy_score

    random = np.random.default_rng(0)
    for classes in (6, 10, 100):
        scores = random.integers(0, 3, (500, classes)).astype(np.float32)
        label = random.integers(0, classes, 500)
        sums = classified(torch.from_numpy(scores), torch.from_numpy(label), Batch({}, None, None, 500))
        assert int(sums["accuracy"]) == (scores.argmax(1) == label).sum()
        assert int(sums["accuracy"]) <= int(sums["top5"])
        # sklearn gives the later of equal classes the better place: the other way round.
        mirrored = top_k_accuracy_score(
            classes - 1 - label, scores[:, ::-1], k=5, labels=np.arange(classes), normalize=False
        )
        assert int(sums["top5"]) == mirrored
    odd = torch.zeros(3, 10)
    odd[0], odd[1, 4], odd[2] = torch.nan, torch.nan, torch.inf
    sums = classified(odd, torch.tensor([0, 0, 0]), Batch({}, None, None, 3))
    assert (int(sums["accuracy"]), int(sums["top5"])) == (1, 1)


def test_other_data_must_have_the_same_classes(
    digits_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    copy.mkdir()
    for file in ("manifest.json", "config.yaml", "ema.safetensors", "model.safetensors"):
        (copy / file).write_bytes((digits_run / file).read_bytes())
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["data"]["classes"][0] = "zero"
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert main(["evaluate", str(copy)]) == 2
    refusal(2, capsys.readouterr().err, "classes")


def test_a_run_without_classes_has_metrics_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    words = [
        "data.samples=8",
        "max_steps=2",
        "parallel.threads=1",
        "data.global_batch_size=4",
        "data.micro_batch_size=4",
        "data.name=synthetic",
    ]
    words += ["language.sequence_length=32", "language.layers=1", "language.width=32", "language.heads=2"]
    settings = [word for setting in words for word in ("--set", setting)]
    assert (
        preloaded.run(
            [sys.executable, "-m", "trainer", "train", "gpt-stdlib", "--out", run, *settings]
        ).returncode
        == 0
    )
    capsys.readouterr()
    told = asked(capsys, run)
    assert told["metrics"]["loss"] == last_row(run)["loss"]
    assert "confusion" not in told
    assert open_run(run).recipe.task == "language"
    assert main(["evaluate", str(run), "--plot", "matrix.svg"]) == 2


@pytest.fixture(scope="module")
def somebodys(digits_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The averaged weights of a run, as Lightning's module would name them, with something beside them."""
    state = load_file(digits_run / "ema.safetensors")
    file = tmp_path_factory.mktemp("weights") / "theirs.safetensors"
    save_file({**{f"model.{name}": one for name, one in state.items()}, "loss.w": torch.ones(3)}, file)
    return file


@pytest.mark.parametrize(
    "words",
    [("digits", "model.width=16", "--weights"), ("--set", "model.width=16", "digits", "seed=9", "--weights")],
)
def test_somebodys_weights_are_measured_without_training(
    words: Sequence[str], digits_run: Path, somebodys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told, row = asked(capsys, *words, somebodys), last_row(digits_run)
    assert told["metrics"]["accuracy"] == row["accuracy"]
    assert told["metrics"]["loss"] == pytest.approx(row["loss"], rel=1e-6)
    assert named(told["weights"], "model. 1")
    assert told["run"] == "digits"


def test_a_runs_configuration_is_a_recipe_for_them(
    digits_run: Path, somebodys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = asked(capsys, digits_run / "config.yaml", "--weights", somebodys)
    assert told["metrics"] == {name: last_row(digits_run)[name] for name in told["metrics"]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digits"], "digits: is a recipe, which has no weights: give a run folder, or --weights FILE"),
        (["mine.yaml"], "mine.yaml: is a recipe"),
        (["no-run"], "no-run: not a run folder"),
        (["OTHER"], "or a recipe: trainer evaluate --weights OTHER RECIPE"),
        (["RUN", "--weights", "OTHER"], "RUN is a folder: --weights needs a recipe, such as RUN/config.yaml"),
        (["digits", "--weights", "gone.safetensors"], "--weights: can't read gone.safetensors"),
        (["digits", "--weights", "x.ckpt"], "--weights: x.ckpt is not a safetensors file. A pickle can run"),
        (["digits", "--weights", "hub:x"], "give hub:ORG/NAME@REVISION"),
        (
            ["digits", "--weights", "OTHER", "--checkpoint", "best"],
            "give one of them; a checkpoint is a run's",
        ),
        (["digits", "--weights", "OTHER", "--on", "far"], "--on far: there is no such evaluation set"),
        (["digits", "--weights", "OTHER", "model.width=8"], "Choose|It holds another model"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    words: list[str],
    message: str,
    digits_run: Path,
    somebodys: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.ckpt").write_bytes(b"PK\x03\x04 is a zip archive, as torch.save writes them")
    places = {"RUN": str(digits_run), "OTHER": str(somebodys)}
    for word, place in places.items():
        message = message.replace(word, place)
    assert main(["evaluate", *(places.get(word, word) for word in words)]) == 2
    error = capsys.readouterr().err
    assert any(each in error for each in message.split("|")), error
    assert "reinit" not in error
    assert error.count("\n") == 1
