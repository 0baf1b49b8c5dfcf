"""Promise: whatever observes a training changes no bit of it, and none of a model's own compiled code."""

import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.test_detection import LITTLE
from tests.toys import TokenTask, assemble_alone, make_recipe
from tests.windows import assert_same_bits
from trainer.config import override, read_recipe
from trainer.explain import explain, profiled
from trainer.loop import train
from trainer.observe.log import Meter
from trainer.observe.memory import memory_tracker
from trainer.observe.trace import Trace
from trainer.operations import count_operations
from trainer.parallel import World
from trainer.pulse import PULSE
from trainer.recipe import Recipe
from trainer.run import make_task
from trainer.state import tensors_of
from trainer.step import take_figures

CPU = torch.device("cpu")
ALONE = World(0, 1, 0, CPU, None)
KINDS: list[Any] = [None, "torch", "nvtx"]

_FEW = ["data.name=synthetic", "data.samples=8", "data.global_batch=2", "data.micro_batch=1"]
_LESS = ["language.layers=1", "language.width=48", "language.heads=3", "language.sequence_length=32"]
_SMALL = ["data.global_batch=4", "data.micro_batch=2"]
# Of each recipe; compiled code is the subject of others.
SMALLEST: dict[str, list[str]] = {
    "coco-fasterrcnn": [*LITTLE, "data.samples=4"],
    "digits": [*_SMALL, "model.width=4"],
    "digits-detection": [*_SMALL, "model.width=8"],
    "dtmf": [*_SMALL, "model.width=4"],
    "gpt-char": [*_FEW, *_LESS],
    "gpt-char-gpu": [*_FEW, *_LESS],
    "gpt-stdlib": [*_FEW, *_LESS],
    "gpt-stdlib-gpu": [*_FEW, *_LESS, "language.stride=32"],
    "gpt2-124m": [*_FEW, *_LESS, "language.vocabulary=256"],
    "resnet18-cifar10": [*_FEW, "model.width=4"],
    "resnet50-imagenet": [*_FEW, "data.image_size=32", "data.classes=3", "data.micro_batch=2"],
    "resnet50-synthetic": [*_FEW, "data.image_size=32", "data.classes=3", "data.micro_batch=2"],
    "speech-commands": [*_FEW, "data.classes=3", "model.width=4"],
    "vit-small": [*_FEW, "data.image_size=32", "data.classes=3"],
}


@pytest.fixture(autouse=True)
def few_canvases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.digits_canvas.TRAIN", 8)
    monkeypatch.setattr("trainer.data.digits_canvas.TEST", 2)


def trained(recipe: Recipe, task: Any, folder: Path, kind: Any = None, observed: bool = False) -> Any:
    """The state after two windows, with all that observes them or with nothing, and what the loss drew from."""
    recipe = recipe.model_copy(
        update={
            "precision": recipe.precision.model_copy(update={"debug": observed}),
            "log": recipe.log.model_copy(update={"tracemalloc": observed}),
        }
    )
    PULSE.reset()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    parts = assemble_alone(recipe, task)
    t = parts.training
    windows = range(2)
    with ExitStack() as stack:
        stack.callback(parts.loader.close)
        stack.callback(parts.evaluation_loader.close)
        trace = stack.enter_context(_trace(folder, t.model)) if observed else None
        meter = Meter(t.share.plan, CPU, [lambda _: None], lambda: take_figures(t), trace)
        profile = None
        if observed:
            explain(stack, recipe, parts, ALONE, 1, meter)
            profile = profiled(stack, kind, folder, recipe, parts, CPU)
            if profile is not None:
                profile._begin, profile._end, profile._warm_up, profile._active = 0, 1, 0, 1
                profile._start()
            stack.enter_context(memory_tracker("windows", say=None))
        drawn = (torch.rand(2), random.random(), np.random.rand())

        def done(_: int) -> None:
            if profile is not None:
                profile.window_done(0)

        train(t, parts.loader(t.share.batches()), windows, meter, 1, lambda _: False, lambda _: None, done)
        return drawn, tensors_of(t), meter.count
