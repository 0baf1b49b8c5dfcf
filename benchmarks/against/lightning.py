"""Lightning's Trainer."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import default_collate

from benchmarks.accumulation import Case, Recorded, Recorder
from benchmarks.against import quiet
from benchmarks.cut_run import (
    BATCH,
    BATCHES,
    EPOCHS,
    Augmented,
    Resumed,
    Steps,
    optimized,
    shuffled,
    small_model,
)
from benchmarks.overhead import TinySteps

_BARE: dict[str, Any] = {
    **{"accelerator": "cpu", "devices": 1, "logger": False},
    **{"enable_progress_bar": False, "enable_model_summary": False},
}
_LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero")


def accumulate(case: Case) -> list[Recorded]:
    """`accumulate_grad_batches`, automatic optimization."""
    from lightning import pytorch as pl

    recorded = Recorded(
        "Trainer(accumulate_grad_batches), automatic optimization; logger, bar, checkpoints and summary off"
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

    settings = {**_BARE, "accumulate_grad_batches": case.accumulation, "enable_checkpointing": False}
    with quiet(*_LOGGERS):
        pl.Trainer(max_epochs=1, **settings).fit(Module(), case.loader())
    return [recorded]


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


def resume(cut: int) -> list[Resumed]:
    """`ModelCheckpoint(every_n_train_steps)` and `fit(ckpt_path)`, with an ordinary and a stateful loader."""
    way = "the same seed_everything() in both runs, ModelCheckpoint(every_n_train_steps), fit(ckpt_path); {}"
    return [
        _resumed(cut, False, "plain loader", way.format("DataLoader(shuffle=True)")),
        _resumed(
            cut,
            True,
            "stateful loader",
            way.format(
                "a loader of ours with state_dict() and load_state_dict(), whose order is keyed by the epoch"
            ),
        ),
    ]


def _resumed(cut: int, stateful: bool, variant: str, way: str) -> Resumed:
    with tempfile.TemporaryDirectory() as name, quiet(*_LOGGERS):
        folder = Path(name)
        return Resumed(_fit(folder, cut, stateful, False), _fit(folder, cut, stateful, True), way, variant)


def _fit(folder: Path, cut: int, stateful: bool, go_on: bool) -> Steps:
    """Trains to the end, from the checkpoint of update `cut`, or from the beginning, writing that one."""
    from lightning import pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    steps = Steps()

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = small_model()

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            index, x, y = batch
            loss = F.cross_entropy(self.model(x), y)
            steps.add(index, loss)
            return loss

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer, scheduler = optimized(self)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    pl.seed_everything(0, workers=True, verbose=False)
    module = Module()
    # Every checkpoint is kept: that of the cut is then the one whose name says so.
    keeper = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=cut, save_top_k=-1)
    kept = {"enable_checkpointing": not go_on, "callbacks": [] if go_on else [keeper]}
    trainer = pl.Trainer(max_epochs=EPOCHS, **_BARE, **kept)
    loader = _StatefulLoader() if stateful else shuffled()
    trainer.fit(module, loader, ckpt_path=folder / f"step={cut}.ckpt" if go_on else None)
    steps.end(module.model)
    return steps


class _StatefulLoader:
    """A loader that can be resumed, as Lightning requires: Lightning saves and loads its state."""

    def __init__(self) -> None:
        self._data = Augmented()
        self._epoch = self._done = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        random = torch.Generator().manual_seed(self._epoch)
        order = torch.randperm(len(self._data), generator=random).split(BATCH)
        for samples in order[self._done :]:
            self._done += 1
            if self._done == BATCHES:
                self._epoch, self._done = self._epoch + 1, 0
            yield default_collate([self._data[int(sample)] for sample in samples])

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "done": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._done = state["epoch"], state["done"]
