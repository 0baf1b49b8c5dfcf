"""Promise: one command says what a model makes of files, and names those that it can't read."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.helpers.commands import command
from tests.helpers.refusals import named
from trainer.commands.predict import predict as module
from trainer.commands.predict.images import as_evaluated
from trainer.data.formats.records import LABEL
from trainer.data.sources import IMAGE
from trainer.train.model_of_run import open_run

Pair = tuple[Any, Any]


@pytest.fixture(scope="module")
def digits(digits_run: Path) -> Pair:
    """The evaluation data: uint8 (360, 8, 8, 1), and its labels."""
    arrays = open_run(digits_run).task.evaluation_data.arrays
    assert arrays is not None
    return arrays[IMAGE], arrays[LABEL]


def save(pixels: Any, file: Path, factor: int = 10) -> Path:
    """One pixel becomes factor x factor."""
    Image.fromarray(np.kron(pixels[:, :, 0], np.ones((factor, factor), np.uint8))).save(file)
    return file


def test_known_digits_are_named(digits_run: Path, digits: Pair, tmp_path: Path) -> None:
    image, label = digits
    files = [save(image[n], tmp_path / f"{n}[red]\n.png") for n in range(40)]
    told = command("predict", digits_run, *files)
    assert told.err == ""
    said = {line.split()[0]: line.split() for line in told.out.splitlines() if line.strip()}
    shown = [said[str(file).replace("\n", "\\n")] for file in files]
    right = [one[1] == str(label[n]) for n, one in enumerate(shown)]
    assert np.mean(right) > 0.9
    assert all(0 < float(one[2].rstrip("%")) <= 100 for one in shown)


def test_a_file_becomes_what_was_learned_from(digits_run: Path, digits: Pair, tmp_path: Path) -> None:
    opened, (image, _) = open_run(digits_run), digits
    for number in np.flatnonzero(image.max((1, 2, 3)) == 240)[:5].tolist():
        file = save(image[number], tmp_path / "digit.png", factor=10 + number % 5)
        assert (as_evaluated(file, opened) == image[number]).all()
        pencil_on_paper = save(230 - image[number] // 2, tmp_path / "paper.png")
        assert np.abs(as_evaluated(pencil_on_paper, opened).astype(int) - image[number]).max() <= 15


def test_what_is_no_image_is_named_and_the_others_are_shown(
    digits_run: Path, digits: Pair, tmp_path: Path
) -> None:
    good = save(digits[0][0], tmp_path / "good.png")
    torn, text, gone = tmp_path / "torn.png", tmp_path / "a\nb.txt", tmp_path / "gone.png"
    torn.write_bytes(good.read_bytes()[:-40])
    text.write_text("not an image")
    told = command("predict", digits_run, torn, good, text, gone, code=1)
    assert str(good) in told.out
    assert told.err.count("\n") == 3 and named(told.err, "torn.png gone.png")
    told = command("predict", digits_run, torn, tmp_path, code=2)
    assert (told.out, told.err.count("\n")) == ("", 2)


def test_a_task_of_ones_own_may_say_how_it_is_shown(
    digits_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_run(digits_run)

    class Own:
        def predict(self, model: Any, options: argparse.Namespace) -> int:
            assert not model.training
            return len(options.files)

    recipe = opened.recipe.model_copy(update={"task": "mine.py"})
    task: Any = Own()
    monkeypatch.setattr(module, "open_run", lambda *_, **__: opened._replace(task=task, recipe=recipe))
    command("predict", digits_run, "a", "b", "c", code=3)
    monkeypatch.setattr(module, "open_run", lambda *_, **__: opened._replace(recipe=recipe))
    command("predict", digits_run, code=2)
