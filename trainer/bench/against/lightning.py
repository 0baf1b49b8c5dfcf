"""Lightning's Trainer."""

from typing import Any

import torch

from trainer.bench.accumulation import Case, Recorded, Recorder
from trainer.bench.against import quiet

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
            return recorded.loss(self.model, *batch)

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
