"""Slow user code: each function puts one slow thing into every forward pass, or read."""

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_KEPT: list[Any] = []


def _at_each_forward(do: Callable[[torch.Tensor], object]) -> None:
    """Once per forward pass in training: after the last linear layer."""

    def hook(module: nn.Module, _: Any, output: torch.Tensor) -> None:
        if isinstance(module, nn.Linear) and module.training:
            do(output)

    nn.modules.module.register_module_forward_hook(hook)


def item() -> None:
    """A statistic of the activations, as a Python number."""

    def statistic(output: torch.Tensor) -> None:
        _KEPT[:] = [output.detach().abs().mean().item()]

    _at_each_forward(statistic)


def to_list() -> None:
    """Looks at each answer in Python."""

    def look(output: torch.Tensor) -> None:
        _KEPT[:] = [sum(output.detach().argmax(1).tolist())]

    _at_each_forward(look)


def nonzero() -> None:
    """Finds the large outputs."""

    def look(output: torch.Tensor) -> None:
        _KEPT[:] = [torch.nonzero(output.detach() > 0)]

    _at_each_forward(look)


def collect(objects: int) -> None:
    """`gc.collect()` in the step, with so many objects alive: as one does against a leak."""
    _KEPT.extend([] for _ in range(objects))
    _at_each_forward(lambda _: gc.collect())


def storm(objects: int, live: int) -> None:
    """Makes many small containers in cycles each step, beside many that stay; collected eagerly."""
    _KEPT.extend([] for _ in range(live))
    gc.set_threshold(700, 1, 1)

    def step(_: torch.Tensor) -> None:
        for _number in range(objects):
            cycle: list[Any] = []
            cycle.append(cycle)
        _KEPT.extend([] for _ in range(objects // 8))

    _at_each_forward(step)


def wait(seconds: float, rank: int) -> None:
    """One rank's forward pass takes longer."""
    if os.environ.get("RANK") == str(rank):
        _at_each_forward(lambda _: time.sleep(seconds))


def costly_samples(seconds: float) -> None:
    """A transform in Python: each sample costs so many CPU seconds more."""
    from trainer.data.formats.images import ImageDataset

    original = ImageDataset._cut

    def image(self: ImageDataset, *arguments: Any, **named: Any) -> torch.Tensor:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass
        return original(self, *arguments, **named)

    ImageDataset._cut = image  # type: ignore[method-assign]
