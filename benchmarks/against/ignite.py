"""Ignite: an Engine around a hand-written update."""

import time

import torch
from torch import nn

from benchmarks.overhead import TinySteps


def train_tiny(tiny: TinySteps) -> float:
    """An Engine without handlers, torch's clipping in the update; returns seconds."""
    from ignite.engine import Engine

    parameters = list(tiny.model.parameters())

    def update(engine: Engine, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        step = engine.state.iteration - 1
        tiny.optimizer.zero_grad()
        tiny.loss(tiny.model, *batch).backward()
        nn.utils.clip_grad_norm_(parameters, tiny.clip, foreach=True)
        tiny.before(step)
        tiny.optimizer.step()
        tiny.after(step)

    engine = Engine(update)
    start = time.perf_counter()
    engine.run(tiny.batches(), max_epochs=1, epoch_length=tiny.steps)
    return time.perf_counter() - start
