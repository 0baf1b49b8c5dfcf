"""Lightning Fabric: a hand-written loop around a wrapped model and optimizer."""

import time

from benchmarks.against import quiet
from benchmarks.overhead import TinySteps


def train_tiny(tiny: TinySteps) -> float:
    """Model and optimizer set up, its own backward and clipping; returns seconds."""
    from lightning.fabric import Fabric

    with quiet("lightning.fabric"):
        fabric = Fabric(accelerator="cpu", devices=1)
        model, optimizer = fabric.setup(tiny.model, tiny.optimizer)
        start = time.perf_counter()
        for step, (x, y) in enumerate(tiny.batches()):
            loss = tiny.loss(model, x, y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=tiny.clip)
            tiny.before(step)
            optimizer.step()
            optimizer.zero_grad()
            tiny.after(step)
        return time.perf_counter() - start
