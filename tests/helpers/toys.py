"""Small tasks whose right answer can be computed another way."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from trainer.config.recipe import Recipe
from trainer.data.batch import Batch
from trainer.data.dataset import NUM_ITEMS, ArrayDataset, Dataset
from trainer.distributed.parallel import World
from trainer.observe.checksums import Checksums
from trainer.observe.log import MetricLogger, Sink, Sources
from trainer.train import loop
from trainer.train.anomaly import AnomalyLog
from trainer.train.components.run import build
from trainer.train.outputs import Outputs
from trainer.train.saving import Checkpoints
from trainer.train.state import Run
from trainer.train.step import take_metrics, train_step

# Sections of a recipe for the digits that drops out and clips.
SMALL: dict[str, Any] = {
    "max_steps": 5,
    "data": {"global_batch_size": 32, "micro_batch_size": 16, "augment": "flip"},
    "model": {"width": 8, "dropout": 0.5},
    "optim": {"lr": 0.01, "max_grad_norm": 1.0},
}
LENGTH, FEATURES, CLASSES = 5, 3, 4


class Block(nn.Module):
    """A residual block."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.inner(x)
        return result


class TokenTask:
    """Sequences with a class for each token, in float64; with `ragged`, only the first few are valid.

    `make` makes another model than its own.
    """

    uniforms = 0
    metric = "loss"
    lower_is_better = True

    def __init__(
        self,
        samples: int,
        ragged: bool = True,
        dtype: torch.dtype = torch.float64,
        blocks: int = 0,
        dropout: float = 0.0,
        make: Callable[[], nn.Module] | None = None,
    ) -> None:
        random = np.random.default_rng(samples)
        lengths = random.integers(1, LENGTH + 1, samples) if ragged else np.full(samples, LENGTH)
        label = random.integers(0, CLASSES, (samples, LENGTH))
        label[np.arange(LENGTH) >= lengths[:, None]] = -100
        arrays: dict[str, Any] = {"x": random.standard_normal((samples, LENGTH, FEATURES)), "y": label}
        if ragged:
            arrays[NUM_ITEMS] = lengths
        self.dtype = dtype
        self.blocks, self.dropout, self.make = blocks, dropout, make
        self.arrays = {name: torch.from_numpy(array) for name, array in arrays.items()}
        data = ArrayDataset(arrays)
        if not ragged:
            data.num_items = LENGTH
        self.train_data: Dataset = data
        self.evaluation_data: Dataset = data

    def describe(self) -> Mapping[str, Any]:
        return {}

    def model(self) -> nn.Module:
        if self.make is not None:
            return self.make()
        inner = [
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(self.dropout)) for _ in range(self.blocks)
        ]
        parts = (nn.Linear(FEATURES, 6), nn.Tanh(), nn.Sequential(*map(Block, inner)), nn.Linear(6, CLASSES))
        return nn.Sequential(*parts).to(self.dtype)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        logits = model(batch.fields["x"].to(self.dtype))
        each = F.cross_entropy(logits.flatten(0, 1), batch.fields["y"].flatten(), reduction="none")
        each = each.view(-1, LENGTH).sum(1)
        return each.sum() if batch.weight is None else (each * batch.weight).sum()

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        return {"loss": self.loss(model, batch)}


def make_recipe(**sections: Any) -> Recipe:
    """A recipe from its sections; one epoch unless it says otherwise."""
    sections.setdefault("epochs", 1)
    sections.setdefault("parallel", {"threads": 1})
    return Recipe.model_validate(sections)


def build_alone(recipe: Recipe, task: Any, workers: int = 0) -> Run:
    """Builds a run of one rank on the CPU."""
    return build(recipe, task, World(0, 1, 0, torch.device("cpu"), None), workers)


def run_steps(run: Run, steps: int | None = None) -> list[float]:
    """Trains the first steps of a run, by default all; the sum of all losses after each."""
    run.replica.train()
    batches, losses = run.loader(run.share.batches()), list[float]()
    for step in range(run.plan.steps if steps is None else steps):
        train_step(run, batches, step)
        losses.append(float(run.state.loss.sum()))
    return losses


def rows_to(
    run: Run,
    *sinks: Sink,
    checksums: Checksums | None = None,
    sources: Sources | None = None,
    each_step: Sequence[Callable[[int], None]] = (),
) -> Outputs:
    """Makes outputs that hand records to some sinks, and write nothing."""
    logger = MetricLogger(
        run.plan,
        run.world.device,
        list(sinks),
        lambda: take_metrics(run),
        checksums,
        run.state.logged,
        sources,
        None if run.still is None else run.still.refuse,
    )
    return Outputs(logger, Checkpoints(run), AnomalyLog(None, run.plan), tuple(each_step))


def before_each_step_ends(call: Callable[[int], None]) -> None:
    """Lets this process's loops call something after each training step, before anything else is decided."""
    original = vars(loop)["train_step"]

    def after(run: Run, batches: Any, step: int) -> None:
        original(run, batches, step)
        call(step + 1)

    setattr(loop, "train_step", after)  # noqa: B010


def step_under_way() -> Callable[[], int]:
    """The step that this process's loops are in, from 1; known from the loop itself, 0 before it begins."""
    at, original = [0], vars(loop)["train_step"]

    def tracked(run: Run, batches: Any, step: int) -> None:
        at[0] = step + 1
        original(run, batches, step)

    setattr(loop, "train_step", tracked)  # noqa: B010
    return lambda: at[0]
