"""Promise: `trainer predict` shows what every kind of model makes of what it is given."""

import json
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from tests.data.test_coco import told, written
from tests.helpers.commands import command, refuse
from tests.helpers.forked import attempt
from tests.helpers.refusals import named
from trainer.commands.predict import boxes
from trainer.config.recipe_file import load_recipe
from trainer.models.detection import Detections
from trainer.train.model_of_run import open_run, read_samples


def train(folder: Path, recipe: str, *settings: str) -> Path:
    few = ["epochs=1", "evaluation.every=end", "parallel.threads=1", "log.to=[]", "data.workers=0"]
    few += ["checkpoint.every=0", "checkpoint.minutes=0", "checkpoint.best=false"]
    attempt(folder, load_recipe(recipe, [*few, *settings]), code=0)
    return folder


def detector(folder: Path, *data: str) -> Path:
    small = ["max_steps=1", "data.image_size=32", "model.width=4", "detection.max_boxes=100"]
    return train(folder, "digits-detection", *small, *data)


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = ["data.name=synthetic", "data.samples=16", "data.classes=3"]
    sizes = ["data.global_batch_size=8", "data.micro_batch_size=8"]
    return detector(tmp_path_factory.mktemp("runs") / "squares", *data, *sizes)


def coco(data: Path) -> Path:
    what = told()
    for box in what["annotations"]:
        box["area"] = box["bbox"][2] * box["bbox"][3]
    written(data, what)
    what["categories"][0]["id"] = what["annotations"][0]["category_id"] = 4
    written(data, what, "val")
    sizes = ["data.global_batch_size=2", "data.micro_batch_size=2"]
    return detector(data / "run", "data.name=coco", f"data.path={data}", *sizes)


def test_boxes_are_written_as_cocos_results(squares: Path, tmp_path: Path) -> None:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    data, file, some = tmp_path / "data", tmp_path / "all.json", tmp_path / "some.json"
    data.mkdir()
    run = coco(data)
    figures = json.loads(command("evaluate", run, "--json", "--coco", file).out)
    truth = COCO(f"{data}/annotations/instances_val.json")
    oracle = COCOeval(truth, truth.loadRes(str(file)), "bbox")
    oracle.evaluate()
    oracle.accumulate()
    oracle.summarize()
    wanted = [None if value < 0 else pytest.approx(value, abs=1e-6) for value in oracle.stats]
    assert list(figures["coco"].values()) == wanted
    assert "results" not in figures
    entries = json.loads(file.read_text())
    assert {each["category_id"] for each in entries} <= {3, 4, 18}
    words = ["--score", 0, "--coco", some]
    command("predict", run, *words)
    key = operator.itemgetter("image_id", "score", "category_id")
    shown = sorted(json.loads(some.read_text()), key=key)
    for ours, theirs in zip(shown, sorted(entries, key=key), strict=True):
        assert ours == {**theirs, "bbox": pytest.approx(theirs["bbox"], abs=1e-3)}
    command("predict", run, f"{data}/val/7.png", *words)
    assert {each["image_id"] for each in json.loads(some.read_text())} == {7}
    for name in ("predict", "evaluate"):
        refuse([name, squares, "--coco", file], "--coco data.name=coco")


def test_tones_are_named_and_what_is_none_is_told(tmp_path: Path) -> None:
    tones = train(tmp_path / "run", "dtmf", "max_steps=50", "model.width=8", "audio.time_masks=0")
    task = open_run(tones).task
    classes = task.describe()["classes"]
    fields = read_samples(task.evaluation_data, np.arange(24)).fields
    files = [tmp_path / f"{number}.wav" for number in range(24)]
    for file, sound in zip(files, fields["audio"], strict=True):
        soundfile.write(file, sound.numpy(), 8000)
    soundfile.write(tmp_path / "slow.wav", fields["audio"][0].numpy(), 4000)
    (tmp_path / "torn.wav").write_bytes(files[0].read_bytes()[:99])
    odd = [tmp_path / name for name in ("slow.wav", "torn.wav", "gone.wav")]
    shown = command("predict", tones, *files, *odd, code=1)
    rows = [line.split() for line in shown.out.splitlines()[1:]]
    assert [row[0] for row in rows] == [str(file) for file in files]
    right = [row[1] == classes[int(label)] for row, label in zip(rows, fields["label"], strict=True)]
    assert np.mean(right) > 0.9
    assert all(line.count(path.name) == 1 for line, path in zip(shown.err.splitlines(), odd, strict=True))
    assert named(command("predict", tones, "--samples", 3).out, "samples")
    for words in (odd, ["--prompt", "beep"], ["--out", "a.png"]):
        command("predict", tones, *words, code=2)


def test_text_goes_on_and_moves_no_cursor(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abc\x1b\n" * 400)
    small = ["language.layers=1", "language.heads=2", "language.width=32", "language.sequence_length=16"]
    small += [f"data.path={tmp_path / 'text.txt'}", "max_steps=80", "optim.lr=0.01"]
    letters = train(tmp_path / "letters", "gpt-char", *small)

    def said(*words: object) -> str:
        return command("predict", letters, *words).out.removesuffix("\n")

    # Escape is a letter of the text, and must not reach a terminal.
    twelve = ("--prompt", "abc", "--tokens", "12", "--temperature", "0")
    assert said(*twelve) == "abc" + "\ufffd\nabc" * 2 + "\ufffd\n"
    assert said("--tokens", "3", "--temperature", "0") == "abc"
    drawn = {said("--tokens", 40, "--temperature", 5, "--seed", seed) for seed in (1, 1, 2)}
    assert len(drawn) == 2
    for words in (["--prompt", "xyz"], ["picture.png"], ["--tokens", "0"], ["--tokenizer", "bytes"]):
        refuse(["predict", letters, *words])


def test_boxes_are_told_in_the_files_pixels_and_drawn(
    squares: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one(_model: Any, images: torch.Tensor, least: float) -> list[Detections]:
        assert images.shape[1:] == (3, 32, 32)
        assert least == 0.25
        found = torch.tensor([[4.0, 8, 16, 12]]), torch.tensor([0.75]), torch.tensor([2])
        return [Detections(*found)] * len(images)

    monkeypatch.setattr(boxes, "detections", one)
    wide = tmp_path / "wide.png"
    Image.new("RGB", (64, 16), (90, 90, 90)).save(wide)
    (tmp_path / "no.png").write_text("no")
    out = tmp_path / "pictures"
    words = [wide, tmp_path / "no.png", "--score", 0.25, "--out", out]
    shown = command("predict", squares, *words, code=1)
    assert named(shown.out, "2 75% (8, 16, 32, 24)")  # 64 pixels became 32
    assert shown.err.count("no.png") == 1
    orange = np.argwhere((np.asarray(Image.open(out / "000-wide.png")) == (230, 80, 0)).all(-1))
    # 32 pixels are drawn as 256.
    assert np.abs([*orange.min(0) - (64, 32), *orange.max(0) - (96, 128)]).max() <= 1
    assert command("predict", squares, "--samples", 3, *words[2:]).out.count("1 of ") == 2
    assert len(list(out.iterdir())) == 3
    (tmp_path / "file").touch()
    refuse(["predict", squares, "--out", tmp_path / "file"], tmp_path / "file")
