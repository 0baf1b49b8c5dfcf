"""A run that has learned the digits a little, in a few seconds."""

from pathlib import Path

from tests.helpers.forked import attempt
from trainer.config.recipe import Recipe

_RECIPE = {
    **{"epochs": 4, "evaluation": {"every": "end"}, "ema": {"decay": 0.95}, "optim": {"lr": 0.006}},
    "data": {"name": "digits", "global_batch_size": 64, "micro_batch_size": 64, "workers": 0},
    "model": {"name": "small_resnet", "width": 16, "blocks": [1, 1]},
    **{"parallel": {"threads": 1}, "log": {"to": ["jsonl"]}},
    "checkpoint": {"every": 0, "minutes": 0, "best": False},
}


def train_digits(folder: Path, stop_after: int | None = None) -> Path:
    """Trains into a folder; with `stop_after` it stops there, with a checkpoint. Returns the folder."""
    done = attempt(folder, Recipe.model_validate(_RECIPE), stop_after=stop_after)
    assert done.code == (75 if stop_after else 0), done.said
    return folder
