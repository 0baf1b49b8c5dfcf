"""Promise: a choice that the schema gains and its reader doesn't know is an error, never another choice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.toys import make_recipe
from trainer.data.audio_sets import load_audio
from trainer.data.batch import Batch
from trainer.data.sources import load_images, open_records
from trainer.models.gpt import GPT
from trainer.tasks.classification import Classification
from trainer.tasks.detection import Detection
from trainer.tasks.language import Language

RECIPE = make_recipe()
LANGUAGE = make_recipe(task="language", data={"name": "stdlib"})


def other(section: Any, key: str) -> Any:
    """A section with a value that the schema doesn't have yet."""
    return section.model_copy(update={key: "another"})


def augmented(augment: str) -> None:
    data = RECIPE.data.model_copy(update={"augment": augment})
    task = Classification(data, RECIPE.model, RECIPE.regularization, 0)
    fields = {"image": torch.zeros(2, 8, 8, 1, dtype=torch.uint8), "label": torch.zeros(2, dtype=torch.int64)}
    task.loss(task.model().train(), Batch(fields, None, torch.zeros(2, 8), 2))


CASES: dict[str, Callable[[], Any]] = {
    "language.positions": lambda: GPT(other(LANGUAGE.language, "positions"), 8),
    "language.norm": lambda: GPT(other(LANGUAGE.language, "norm"), 8),
    "language.mlp": lambda: GPT(other(LANGUAGE.language, "mlp"), 8),
    "language.text": lambda: Language(LANGUAGE.data, LANGUAGE.model, other(LANGUAGE.language, "text"), 0),
    "data.augment": lambda: augmented("another"),
    "data.name of text": lambda: Language(
        other(LANGUAGE.data, "name").model_copy(update={"path": Path(__file__)}),
        LANGUAGE.model,
        LANGUAGE.language,
        0,
    ),
    "data.name of images": lambda: load_images(
        other(RECIPE.data, "name").model_copy(update={"path": Path(__file__).parent}), 0
    ),
    "data.name of records": lambda: open_records(other(RECIPE.data, "name"), Path(), "train"),
    "data.name of sound": lambda: load_audio(other(RECIPE.data, "name"), 1.0, 8000, "validation", 0),
    "data.name of boxes": lambda: Detection(
        other(RECIPE.data, "name").model_copy(update={"path": Path(__file__).parent}),
        RECIPE.model,
        RECIPE.detection,
        0,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_unknown_choice_is_no_known_one(case: str) -> None:
    with pytest.raises((AssertionError, KeyError), match="another"):
        CASES[case]()


@pytest.mark.parametrize("augment", ["none", "flip", "crop", "affine"])
def test_known_augmentations_are_known(augment: str) -> None:
    augmented(augment)
