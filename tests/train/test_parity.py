"""Promise: the trainer computes what the loop that one would write by hand computes, part by part.

The loop here is plain PyTorch and shares nothing with the trainer but the model's class, its initial weights
and the order of the samples.
"""

import copy
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F

from tests.helpers.steps import go
from tests.helpers.toys import build_alone, make_recipe
from trainer.config.recipe import Recipe
from trainer.data.batch import Batch
from trainer.data.sources import load_images
from trainer.rng import permuted
from trainer.tasks.classification import Classification
from trainer.train.components.task import make_task

# 24 steps come to the tenth pass over the few synthetic images.
STEPS, BATCH = 24, 32
DATA: dict[str, dict[str, Any]] = {
    "digits": {"name": "digits"},
    "small": {"name": "synthetic", "image_size": 8, "classes": 10, "samples": 80},
}
SCALE = {"initial_scale": 2.0**24, "growth_interval": 20}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Largest relative difference of a step's loss from that of the loop: rounding grows (a ReLU that is on in one
# of them is off in the other), so the mathematics is compared in float64, where it doesn't come far enough to
# be seen.
TOLERANCE = {"fp64": 1e-10, "bf16": 2e-3, "fp16": 2e-3}


def recipe_of(images: str, mode: str, **sections: Any) -> Recipe:
    values: dict[str, Any] = {
        "epochs": 100,
        "max_steps": STEPS,
        "data": {**DATA[images], "global_batch_size": BATCH, "micro_batch_size": BATCH},
        "model": {"width": 8},
        "precision": {**SCALE, "mode": "fp32" if mode == "fp64" else mode},
        "optim": {"name": "sgd", "lr": 0.02, "weight_decay": 1e-4, "max_grad_norm": 2.0, "warmup_steps": 0.1},
        "regularization": {"label_smoothing": 0.1},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return make_recipe(**values)


class Doubled(Classification):
    """The same task in float64."""

    def model(self) -> nn.Module:
        return super().model().double()

    def _pixels(self, batch: Batch, train: bool) -> torch.Tensor:
        return super()._pixels(batch, train).double()


class ByHand(NamedTuple):
    """The loss of each step, the average of the weights, and how many steps overflowed."""

    losses: list[float]
    average: nn.Module
    skipped: int


def by_hand(recipe: Recipe, initial: nn.Module) -> ByHand:
    optim, mode, steps, skipped = recipe.optim, recipe.precision.mode, recipe.max_steps or 0, 0
    model = copy.deepcopy(initial).requires_grad_(True).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1
    average = copy.deepcopy(model)
    images = load_images(recipe.data, recipe.seed)
    arrays = images.train.arrays
    assert arrays is not None
    image, label = (torch.from_numpy(arrays[name]) for name in ("image", "label"))
    image = image.permute(0, 3, 1, 2).contiguous()
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (images.mean, images.std))
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": optim.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2]},
    ]
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(groups, lr=1.0, momentum=0.9, nesterov=True)
        if optim.name == "sgd"
        else torch.optim.AdamW(groups, lr=1.0, weight_decay=0.0)
    )
    warmup = round(optim.warmup_steps * steps)

    def learning_rate(update: int) -> float:
        """Linear rise, then half a cosine; in float32, as the trainer's table is."""
        if update < warmup:
            return float(np.float32(optim.lr * (update + 1) / warmup))
        return float(
            np.float32(optim.lr * (1 + math.cos(math.pi * (update - warmup) / (steps - warmup))) / 2)
        )

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    scaler = GradScaler("cpu", 2.0**24, growth_interval=20, enabled=mode == "fp16")
    micro_batch_size, losses = recipe.data.micro_batch_size, [0.0] * steps
    for step in range(steps):
        for part in order(len(label), step).split(micro_batch_size):
            pixels = torch.addcmul(-mean / std, image[part].float(), 1 / (255 * std)).to(decayed[0].dtype)
            with torch.autocast("cpu", DTYPES.get(mode), enabled=mode in DTYPES):
                logits = model(pixels)
                loss = F.cross_entropy(logits, label[part], label_smoothing=0.1, reduction="sum") / BATCH
            scaler.scale(loss).backward()
            losses[step] += loss.item()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() < before:
            skipped += 1
            continue
        share = max(1 - recipe.ema.decay, 9 / (10 + step - skipped))
        for target, source in zip(average.parameters(), model.parameters(), strict=True):
            target.data.lerp_(source.data, share)
        schedule.step()
    return ByHand(losses, average, skipped)


def order(samples: int, step: int) -> torch.Tensor:
    """The samples of a step, epoch after epoch without a gap."""
    epoch, position = np.divmod(np.arange(step * BATCH, (step + 1) * BATCH), samples)
    return torch.from_numpy(permuted(0, epoch, position, samples))


PARTS: dict[str, Any] = {"data": {"micro_batch_size": 8}}
EVERYTHING = {**PARTS, "memory": {"checkpointing": "blocks", "every": 2}, "ema": {"decay": 0.98}}
EVERYTHING |= {"model": {"channels_last": True}}


@pytest.mark.parametrize(
    ("data", "mode", "sections"),
    [
        ("digits", "fp64", {}),
        ("digits", "fp64", {"optim": {"name": "adamw", "lr": 0.002}}),
        ("small", "fp64", EVERYTHING),  # where images repeat within a step
        ("digits", "bf16", PARTS),
        ("digits", "fp16", PARTS),
    ],
    ids=["plain", "adamw", "everything", "bf16", "fp16"],
)
def test_losses_are_those_of_the_loop_by_hand(data: str, mode: str, sections: Any) -> None:
    recipe, close = recipe_of(data, mode, **sections), TOLERANCE[mode]
    doubled = Doubled(recipe.data, recipe.model, recipe.regularization, recipe.seed)
    run = build_alone(recipe, doubled if mode == "fp64" else make_task(recipe))
    hand = by_hand(recipe, run.state.model)
    losses = go(run, range(run.plan.steps))
    assert len(losses) == STEPS
    assert losses == pytest.approx(hand.losses, rel=close)
    assert np.mean(losses[-5:]) < 0.99 * np.mean(losses[:5]), "nothing was learned"
    assert int(run.state.lr.updates) == STEPS - hand.skipped
    assert bool(hand.skipped) == (mode == "fp16"), "fp16 starts with a scale that overflows"
    if run.state.average is not None:
        for ours, theirs in zip(run.state.average.tensors.values(), hand.average.parameters(), strict=True):
            assert torch.allclose(ours, theirs, rtol=close, atol=10 * close)
