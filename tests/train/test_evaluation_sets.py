"""Promise: more sets to measure on have rows of their own, one may decide, and training keeps its bits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.helpers import toys
from tests.helpers.forked import attempt
from tests.helpers.refusals import named, refused
from tests.helpers.rows import read_rows
from tests.helpers.run_folders import same
from tests.helpers.toys import build_alone
from tests.helpers.world import Ranks
from trainer.cli import main
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import load_recipe, make_recipe
from trainer.distributed.parallel import World
from trainer.train import evaluate as evaluating
from trainer.train.components.run import build
from trainer.train.components.task import check_files, data_of, make_task, more_sets
from trainer.train.evaluate import evaluate_run


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
    for seed, (place, count) in enumerate(
        {"near/train": 16, "near/val": 6, "near/test": 11, "far/val": 3}.items()
    ):
        pictures(root / place, count, seed)
    return root


def recipe(data: Path, sets: dict[str, Any] | None = None, **evaluation: Any) -> Recipe:
    far = {"test": {"split": "test"}, "far": {"path": str(data / "far")}}
    evaluation |= {"every": "3 steps", "sets": far if sets is None else sets}
    sizes = {"image_size": 16, "global_batch_size": 4, "micro_batch_size": 2, "eval_batch_size": 4}
    sections: dict[str, Any] = {"model": {"width": 4, "norm": "group"}, "optim": {"lr": 0.01}}
    sections |= {"data": {"name": "folder", "path": str(data / "near"), **sizes, "workers": 0}}
    sections |= {"parallel": {"threads": 1, "reduction": "tree"}, "ema": {"decay": 0.9}}
    return toys.make_recipe(epochs=3, evaluation=evaluation, log={"every": 2}, **sections)


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    attempt(folder, recipe(data), code=0)
    return folder


def learned(folder: Path, kind: str) -> list[dict[str, Any]]:
    left_out = ("seconds", "per_s", "time/", "memory", "cpu/", "disk/", "network/", "loader/", "gc/")
    return [
        {name: value for name, value in row.items() if not any(part in name for part in left_out)}
        for row in read_rows(folder, (kind,))
    ]


def test_training_and_the_main_set_keep_their_bits(data: Path, run: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    attempt(alone, recipe(data, sets={}), code=0)
    assert same(alone, run)
    assert learned(alone, "train") == learned(run, "train")
    main_set = [{n: v for n, v in row.items() if not n.startswith("eval/")} for row in learned(run, "eval")]
    assert learned(alone, "eval") == main_set
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
    assert named(capsys.readouterr().err, "--on test")


def test_another_content_of_a_set_is_another_run(data: Path, tmp_path: Path) -> None:
    sets = {"test": {"split": "test"}, "far": {"path": str(tmp_path)}}
    pictures(tmp_path / "val", 3, 9)
    one, other = (data_of(values, make_task(values)) for values in (recipe(data), recipe(data, sets)))
    assert {name for name in one if one[name] != other[name]} == {"evaluation data far"}


def measured(world: World, values: Recipe) -> dict[str, float]:
    metrics, _ = evaluate_run(build(values, make_task(values), world, 0))
    return metrics


def test_two_ranks_measure_the_same(ranks: Ranks, data: Path) -> None:
    (alone,) = ranks.run(1, measured, recipe(data))
    assert alone.keys() >= {"loss", "eval/test/loss", "eval/far/accuracy"}
    assert ranks.run(2, measured, recipe(data)) == [alone, alone]


@pytest.mark.parametrize(("decides", "best"), [("far", 6), ("test", 3)])
def test_one_set_decides(data: Path, monkeypatch: pytest.MonkeyPatch, decides: str, best: int) -> None:
    values = recipe(data, decides=decides)
    run = build_alone(values, make_task(values))
    for step, of_data, far in ((3, 0.1, 0.5), (6, 0.2, 0.9), (9, 0.3, 0.6)):
        scores = iter((of_data, 0.0, far))  # of the main set, test and far
        monkeypatch.setattr(evaluating, "evaluate", lambda *_, it=scores: {"accuracy": next(it)})
        run.state.step = step
        evaluate_run(run)
    assert run.state.best is not None and run.state.best[1] == best


@pytest.mark.parametrize(("far", "line"), [({"path": "odd"}, "far 2 owl"), ({"split": "tset"}, "near/tset")])
def test_bad_sets_are_refused(data: Path, tmp_path: Path, far: dict[str, str], line: str) -> None:
    pictures(tmp_path / "odd" / "val", 2, 0, ("cat", "owl"))
    far = {name: value.replace("odd", f"{tmp_path}/odd") for name, value in far.items()}
    with refused(line):
        make_task(recipe(data, {"far": far}))


def test_missing_files_of_a_set_are_looked_up(data: Path, tmp_path: Path) -> None:
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
    values = {"epochs": 1, "task": "language", "language": {"sequence_length": 8}}
    values |= {"data": {"name": "text", "path": str(tmp_path / "main.txt")}}
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
        values = found.model_dump(mode="json", exclude_none=True)
        task = make_task(make_recipe(values, [f"evaluation.sets.a.name={found.data.name}"]))
        assert len(more_sets(task)["a"]) == len(task.evaluation_data)
