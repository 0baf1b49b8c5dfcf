"""Figures of a run: kept on the device, read late, handed to sinks.

A sink is a function that takes a row: a flat mapping with `kind` ("train", "evaluation" or "end") and
`window` (windows done), and figures. To add a sink is to write such a function.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from pydantic import BaseModel, ConfigDict, Field

from trainer.memory import used_memory
from trainer.plan import Plan

Row = Mapping[str, float | int | str]
Sink = Callable[[Row], None]


class LogConfig(BaseModel):
    """What is logged."""

    model_config = ConfigDict(extra="forbid")

    every: int = Field(50, ge=1, description="windows between two rows of figures")


@dataclass
class _Staged:
    window: int
    seconds: float
    windows: int
    names: tuple[str, ...]
    values: torch.Tensor
    copied: torch.cuda.Event | None


class Meter:
    """Turns what the device accumulates into rows, without stopping it.

    The figures of a logging step are copied to page-locked memory and read when the next row is due.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        sinks: list[Sink],
        take_figures: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        """Starts the clock.

        Args:
            plan: For epochs and samples.
            device: Where the figures are.
            sinks: Where the rows go.
            take_figures: Returns tensors () and starts them anew; "loss" is a sum over the windows
                since the last call, all others are shown as they are.
        """
        self._plan = plan
        self._device = device
        self._sinks = sinks
        self._take_figures = take_figures
        self._staged: _Staged | None = None
        self.busy_seconds = 0.0
        self.resume(0)

    def resume(self, window: int) -> None:
        """Starts the clock again, after an evaluation."""
        self._since = time.perf_counter()
        self._window = window

    def stage(self, window: int) -> None:
        """Takes the figures of the windows since the last call; all ranks call it together."""
        self.deliver()
        if window == self._window:
            return
        figures = self._take_figures()
        values = torch.stack([figure.detach().to(torch.float64) for figure in figures.values()])
        copied = None
        if self._device.type == "cuda":
            values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(
                values, non_blocking=True
            )
            copied = torch.cuda.Event()
            copied.record()
        now = time.perf_counter()
        windows = window - self._window
        self._staged = _Staged(window, now - self._since, windows, tuple(figures), values, copied)
        self.busy_seconds += now - self._since
        self.resume(window)

    def deliver(self) -> None:
        """Hands the row that was staged last to the sinks, if there is one."""
        staged, self._staged = self._staged, None
        if staged is None:
            return
        if staged.copied is not None:
            staged.copied.synchronize()
        figures = dict(zip(staged.names, staged.values.tolist(), strict=True))
        figures["loss"] /= staged.windows
        samples = self._plan.global_batch
        self.emit(
            {
                "kind": "train",
                "window": staged.window,
                "epoch": round(staged.window * samples / self._plan.samples, 4),
                **figures,
                "samples_per_s": staged.windows * samples / staged.seconds,
                "memory_bytes": used_memory(self._device),
            }
        )

    def emit(self, row: Row) -> None:
        """Hands a row to the sinks."""
        for sink in self._sinks:
            sink(row)


def jsonl_sink(file: TextIO) -> Sink:
    """One JSON object per line; a figure that isn't finite becomes null, since JSON has none such."""

    def write(row: Row) -> None:
        finite = {
            k: None if isinstance(v, float) and not abs(v) < float("inf") else v for k, v in row.items()
        }
        file.write(json.dumps(finite) + "\n")
        file.flush()

    return write


def tensorboard_sink(folder: Path) -> tuple[Sink, Callable[[], None]]:
    """TensorBoard scalars, one event per row: an event per scalar, as add_scalar does, costs 71 us each.

    Returns:
        The sink and the function that closes it.
    """
    from tensorboard.compat.proto.event_pb2 import Event  # here: the import takes half a second
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))

    def write(row: Row) -> None:
        values = [
            Summary.Value(tag=f"{row['kind']}/{name}", simple_value=value)
            for name, value in row.items()
            if name != "window" and isinstance(value, float | int)
        ]
        writer.add_event(Event(wall_time=time.time(), step=row["window"], summary=Summary(value=values)))

    return write, writer.close
