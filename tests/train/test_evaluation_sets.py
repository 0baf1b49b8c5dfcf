"""Promise: more sets to measure on have rows of their own, one may decide, and training keeps its bits."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from tests.helpers import preloaded
from tests.helpers.forked import attempt, replace
from tests.helpers.refusals import named, refusal, refused
from tests.helpers.rows import read_rows
from trainer.checkpoint import CHECKPOINTS
from trainer.cli import main
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import load_recipe, make_recipe
from trainer.train import evaluate as evaluating
from trainer.train.components.task import make_task, more_sets


def pictures(folder: Path, count: int, seed: int, classes: tuple[str, ...] = ("cat", "dog")) -> None:
    noise = np.random.default_rng(seed)
    for number in range(count):
        file = folder / classes[number % len(classes)] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 255, (24, 24, 3), np.uint8)).save(file)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """near/train, val and test; and far, of which there is no more than val."""
    root = tmp_path_factory.mktemp("data")
    pictures(root / "near" / "train", 16, 0)
    pictures(root / "near" / "val", 6, 1)
    pictures(root / "near" / "test", 11, 2)
    pictures(root / "far" / "val", 3, 3)
    return root


def recipe(data: Path, sets: dict[str, Any] | None = None, **evaluation: Any) -> Recipe:
    far = {"test": {"split": "test"}, "far": {"path": str(data / "far")}}
    sets = far if sets is None else sets
    sizes = {"image_size": 16, "global_batch_size": 4, "micro_batch_size": 2, "eval_batch_size": 4}
    return Recipe.model_validate(
        {
            "epochs": 3,
            "data": {"name": "folder", "path": str(data / "near"), **sizes, "workers": 0},
            "model": {"width": 4, "norm": "group"},
            "evaluation": {"every": "3 steps", "sets": sets, **evaluation},
            "ema": {"decay": 0.9},
            "optim": {"lr": 0.01},
            "parallel": {"threads": 1, "reduction": "tree"},
            "log": {"every": 2},
            "checkpoint": {"every": 4, "minutes": 0},
        }
    )


def written(folder: Path, values: Recipe) -> Path:
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(values.model_dump(mode="json", exclude_none=True)))
    return file


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    done = attempt(folder, recipe(data))
    assert done.code == 0, done.said
    return folder


def learned(folder: Path, kinds: tuple[str, ...] = ("train", "eval")) -> list[dict[str, Any]]:
    left_out = ("seconds", "per_s", "time/", "memory", "cpu/", "disk/", "network/", "loader/", "gc/")
    return [
        {name: value for name, value in row.items() if not any(part in name for part in left_out)}
        for row in read_rows(folder, kinds)
    ]


def weights(folder: Path) -> tuple[bytes, bytes]:
    return (folder / "model.safetensors").read_bytes(), (folder / "ema.safetensors").read_bytes()


def test_training_and_the_main_set_keep_their_bits(data: Path, run: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    assert attempt(alone, recipe(data, sets={})).code == 0
    assert weights(alone) == weights(run)
    assert learned(alone, ("train",)) == learned(run, ("train",))
    main_set = [
        {n: v for n, v in row.items() if not n.startswith("eval/")} for row in learned(run, ("eval",))
    ]
    assert learned(alone, ("eval",)) == main_set
    assert [row["step"] for row in main_set] == [3, 6, 9, 12]


def on(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> dict[str, Any]:
    assert main(["evaluate", str(run), *words, "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_each_set_has_the_numbers_of_its_own_pictures(
    data: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The oracle: a data set of which the same pictures are the main part to measure on."""
    row = read_rows(run, ("eval",))[-1]
    for name, samples, source in (("test", 11, data / "near" / "test"), ("far", 3, data / "far" / "val")):
        other = tmp_path / name
        other.mkdir()
        (other / "train").symlink_to(data / "near" / "train")
        (other / "val").symlink_to(source)
        main_part = on(capsys, run, "--set", f"data.path={other}")
        assert main_part["samples"] == samples
        assert main_part["metrics"] == {n: row[f"eval/{name}/{n}"] for n in ("loss", "accuracy")}
        told = on(capsys, run, "--on", name)
        assert (told["set"], told["samples"], told["metrics"]) == (name, samples, main_part["metrics"])
    elsewhere = tmp_path / "moved"
    (data / "far").rename(elsewhere)
    try:
        moved = on(capsys, run, "--on", "far", "--set", f"evaluation.sets.far.path={elsewhere}")
        assert moved["metrics"] == told["metrics"]
        on(capsys, run, "--on", "test")  # whose data is here
    finally:
        elsewhere.rename(data / "far")
    assert main(["evaluate", str(run), "--on", "tset"]) == 2
    said = capsys.readouterr().err
    assert named(said, "--on test")


def test_stopped_and_resumed_it_is_the_same(data: Path, run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert attempt(folder, recipe(data), stop_after=5).code == 75
    assert attempt(folder, recipe(data)).code == 0
    assert weights(folder) == weights(run)
    assert learned(folder) == learned(run)


def test_another_content_of_a_set_is_no_resume(data: Path, tmp_path: Path) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    assert attempt(folder, recipe(data), stop_after=5).code == 75
    pictures(other / "val", 3, 9)
    moved = {"test": {"split": "test"}, "far": {"path": str(other)}}
    refused = attempt(folder, recipe(data, sets=moved))
    assert refused.code == 2
    assert named(refused.line, "far")


def test_on_two_ranks_with_workers_it_is_the_same(data: Path, run: Path, tmp_path: Path) -> None:
    written(tmp_path, recipe(data))
    words: list[str | Path] = [sys.executable, "-m", "trainer", "train", "mine.yaml", "--out", "run"]
    done = preloaded.run([*words, "--nproc-per-node", "2", "--set", "data.workers=1"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows, theirs = (read_rows(folder, ("eval",))[-1] for folder in (tmp_path / "run", run))
    assert rows == theirs
    assert weights(tmp_path / "run") == weights(run)


def scored(scores: dict[str, list[float]]) -> Callable[[], None]:
    """Accuracies by set, one after another."""

    def put_in() -> None:
        given_ = {name: iter(each) for name, each in scores.items()}
        names: Iterator[str] = iter(())

        def measured(*_: object) -> dict[str, float]:
            nonlocal names
            name = next(names, None)
            if name is None:
                names = iter(scores)
                name = next(names)
            return {"loss": 1.0, "accuracy": next(given_[name])}

        replace(evaluating, "evaluate", measured)

    return put_in


FAR_IS_BEST_AT_6 = {"data": [0.1, 0.2, 0.3, 0.4], "test": [0.0] * 4, "far": [0.5, 0.9, 0.6, 0.6]}


@pytest.mark.parametrize(("decides", "best", "ends"), [("far", 6, 12), ("test", 3, 9)])
def test_one_set_decides(data: Path, tmp_path: Path, decides: str, best: int, ends: int) -> None:
    chosen = recipe(data, decides=decides, patience=2 if decides == "test" else 0)
    done = attempt(tmp_path / "run", chosen, before=scored(FAR_IS_BEST_AT_6))
    assert done.code == 0, done.said
    state = json.loads((tmp_path / "run" / CHECKPOINTS / f"step-{ends:08d}" / "state.json").read_text())
    assert state["state"]["best"][1] == best
    assert (tmp_path / "run" / CHECKPOINTS / f"step-{best:08d}").exists()


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        ("{far: {path: ODD}}", "evaluation.sets.far 2 owl"),
        ("{far: {split: tset}}", "/near/tset"),
    ],
)
def test_bad_sets_are_one_line_and_leave_no_folder(data: Path, tmp_path: Path, sets: str, line: str) -> None:
    pictures(tmp_path / "odd" / "val", 2, 0, ("cat", "owl"))
    written(tmp_path, recipe(data, sets={}))
    setting = f"evaluation.sets={sets}".replace("ODD", str(tmp_path / "odd"))
    words = [sys.executable, "-m", "trainer", "train", "mine.yaml", "--out", "run", "--set", setting]
    done = preloaded.run(words, cwd=tmp_path)
    refusal(done.returncode, done.stderr, line, folder=tmp_path / "run")


def test_missing_files_of_a_set_are_looked_up(data: Path, tmp_path: Path) -> None:
    from trainer.train.components.task import check_files

    table = tmp_path / "table"
    for part in ("train", "val"):
        pictures(table / part, 4, 5)
        rows = [f"{part}/{name}/{n}.png,{name}" for n, name in enumerate(("cat", "dog") * 2)]
        (table / f"{part}.csv").write_text("\n".join(["path,label", *rows, ""]))
    values = recipe(data, sets={"far": {"name": "table", "path": str(table)}})
    task = make_task(values)
    check_files(values, task)
    (table / "val" / "cat" / "0.png").unlink()
    with refused("evaluation.sets.far 0.png"):
        check_files(values, task)


def test_language_has_sets_of_its_own_tokens(tmp_path: Path) -> None:
    (tmp_path / "main.txt").write_text("abcab " * 200)
    (tmp_path / "near.txt").write_text("cba " * 100)
    (tmp_path / "odd.txt").write_text("abcz" * 100)
    values = {
        "epochs": 1,
        "task": "language",
        "data": {"name": "text", "path": str(tmp_path / "main.txt")},
        "language": {"sequence_length": 8},
    }
    near = make_task(make_recipe(values, [f"evaluation.sets.near.path={tmp_path / 'near.txt'}"]))
    (held,) = more_sets(near).values()
    out = {name: np.empty((1, *field.shape), field.dtype) for name, field in held.fields.items()}
    held.read(np.array([0]), None, out)
    characters = near.describe()["characters"]
    assert "".join(characters[token] for token in out["tokens"][0].tolist()) in "cba " * 4
    with refused("evaluation.sets.odd odd.txt z"):
        make_task(make_recipe(values, [f"evaluation.sets.odd.path={tmp_path / 'odd.txt'}"]))


def test_a_set_that_decides_must_be_there(data: Path) -> None:
    values = recipe(data).model_dump(mode="json", exclude_none=True)
    with refused("decides=tset test"):
        make_recipe(values, ["evaluation.decides=tset"])


def test_detection_and_audio_have_more_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("boxes", "dtmf"):
        monkeypatch.setattr(f"trainer.data.builtin.{module}.TRAIN", 20)
        monkeypatch.setattr(f"trainer.data.builtin.{module}.TEST", 10)
    for name in ("digits-detection", "dtmf"):
        found = load_recipe(name, [])
        other = make_recipe(
            found.model_dump(mode="json", exclude_none=True), [f"evaluation.sets.a.name={found.data.name}"]
        )
        task = make_task(other)
        assert len(more_sets(task)["a"]) == len(task.evaluation_data)
