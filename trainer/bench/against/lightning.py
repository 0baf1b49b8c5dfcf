"""Lightning's Trainer."""

import time
from typing import Any

import torch

from trainer.bench.accumulation import Case, Recorded, Recorder
from trainer.bench.against import quiet
from trainer.bench.overhead import TinySteps

_LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero")


def accumulate(case: Case) -> Recorded:
    """`accumulate_grad_batches`, automatic optimisation."""
    from lightning import pytorch as pl

    recorded = Recorded(
        "Trainer(accumulate_grad_batches), automatic optimisation; logger, bar, checkpoints and summary off"
    )

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = recorded.model

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            x, y = batch
            return recorded.loss(self.model, x, y)

        def configure_optimizers(self) -> Recorder:
            return Recorder(recorded)

    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    with quiet(*_LOGGERS):
        pl.Trainer(accumulate_grad_batches=case.accumulation, **settings).fit(Module(), case.loader())
    return recorded


def train_tiny(tiny: TinySteps) -> float:
    """`Trainer(barebones=True)` with its own clipping; returns seconds, without those of its set-up."""
    from lightning import pytorch as pl

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny.model
            self.start = self.stop = 0.0

        def on_train_start(self) -> None:
            self.start = time.perf_counter()

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], step: int) -> torch.Tensor:
            tiny.before(step)
            return tiny.loss(self.model, *batch)

        def on_train_batch_end(self, _: Any, __: Any, step: int) -> None:
            tiny.after(step)

        def on_train_end(self) -> None:
            self.stop = time.perf_counter()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return tiny.optimizer

    with quiet(*_LOGGERS):
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, barebones=True, gradient_clip_val=tiny.clip
        )
        module = Module()
        trainer.fit(module, tiny.batches())
    return module.stop - module.start
