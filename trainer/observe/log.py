"""Figures of a run: kept on the device, read late, handed to sinks.

A sink is a function that takes a row: a flat mapping with `kind` ("train", "evaluation", "verdict" or "end"),
`window` (windows done) and figures. To add a sink is to write such a function.
"""

import csv
import json
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TextIO

import torch
from pydantic import Field

from trainer.checkpoint import strict_json
from trainer.config import Section
from trainer.memory import used_memory
from trainer.observe.flops import Count
from trainer.observe.timeline import DeviceTimeline, reading, split_between, straggler
from trainer.observe.trace import Trace
from trainer.plan import Plan
from trainer.pulse import PHASES, PULSE
from trainer.redact import redact

_WRITERS = ("tensorboard.summary.writer.event_file_writer",)

Row = Mapping[str, float | int | str]
Sink = Callable[[Row], None]


class LogConfig(Section):
    """What is logged."""

    every: int = Field(50, ge=1, description="windows between two rows of figures")
    sinks: tuple[Literal["jsonl", "csv", "tensorboard"], ...] = Field(
        ("jsonl", "tensorboard"), description="what the run folder holds of them, besides the console"
    )
    price_per_hour: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="of the run's machines, in any currency: the summary says its cost",
    )
    fingerprints: bool = Field(
        True, description="trace.jsonl: a fingerprint of every tensor with each row, for trainer verify"
    )


@dataclass(frozen=True)
class _Moment:
    """A point in a run: windows done, and when, for the host and (in its stream) for the device."""

    window: int
    host: float
    event: torch.cuda.Event | None

    def seconds_since(self, earlier: "_Moment") -> float:
        """Seconds of the device's time on a GPU, of the host's elsewhere."""
        if self.event is None or earlier.event is None:
            return self.host - earlier.host
        return float(earlier.event.elapsed_time(self.event)) / 1e3


@dataclass(frozen=True)
class _Staged:
    start: _Moment
    end: _Moment
    windows: int
    names: tuple[str, ...]
    values: torch.Tensor
    prints: torch.Tensor | None
    split: dict[str, float]
    table: torch.Tensor | None
    figures: dict[str, float | str]


class Meter:
    """Turns what the device accumulates into rows, without stopping it.

    The figures of a logging step are copied to page-locked memory and read when the next row is due.

    Attributes:
        busy_seconds: Time of the windows that were timed.
        left_out: Numbers of the windows that aren't trained.
        timed_samples: Samples in them.
        sinks: Where the rows go.
        gather: Makes of each rank's float64 (n,) a table (ranks, n) on the device; None: there is one rank.
        units: Units (tokens) of a sample.
        count: Counts the FLOPs of a sample, or None.
        peak: Peak FLOP/s of all GPUs of the run, or None where it isn't known.
        sources: Give figures of their own for each row, such as what the machine does.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        sinks: list[Sink],
        take_figures: Callable[[], Mapping[str, torch.Tensor]],
        trace: Trace | None = None,
    ) -> None:
        """Starts at window 0.

        Args:
            plan: For epochs and samples.
            device: Where the figures are.
            sinks: Where the rows go.
            take_figures: Returns tensors () and starts them anew; "loss" is a sum over the windows
                since the last call, all others are shown as they are.
            trace: Records what proves the run, or None.
        """
        self._plan = plan
        self._device = device
        self.sinks = sinks
        self._take_figures = take_figures
        self._trace = trace
        self._staged: _Staged | None = None
        self._window = 0
        self.busy_seconds = 0.0
        self.timed_samples = 0
        self.left_out: Collection[int] = ()
        self.units = 1
        self.gather: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.count: Count | None = None
        self.peak: float | None = None
        self.sources: list[Callable[[], Mapping[str, float | str]]] = []
        self._timeline = DeviceTimeline() if device.type == "cuda" else None
        PULSE.on_device = self._timeline
        self._reading = reading(0)
        self.start_clock(0)

    def go_on(self, window: int, busy_seconds: float, timed_samples: int) -> None:
        """Starts where an earlier attempt stopped: at its last row of figures, with its time and samples."""
        self._window = window
        self.busy_seconds, self.timed_samples = busy_seconds, timed_samples
        self._reading = reading(window)
        self.start_clock(window)

    @property
    def window(self) -> int:
        """Windows at the last row of figures."""
        return self._window

    def start_clock(self, window: int) -> None:
        """Times from here on: after the first window, which compiles and warms up, and evaluations."""
        self._start = self._now(window)

    def _now(self, window: int) -> _Moment:
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return _Moment(window, time.perf_counter(), event)

    def stage(self, window: int) -> None:
        """Takes the figures of the windows since the last call; all ranks call it together."""
        self.deliver()
        if window == self._window:
            return
        figures = self._take_figures()
        values = torch.stack([figure.detach().to(torch.float64) for figure in figures.values()])
        values = self._on_its_way(values)
        prints = None if self._trace is None else self._on_its_way(self._trace.take())
        now = self._now(window)
        windows = window - self._window - sum(self._window <= one < window for one in self.left_out)
        split, table = self._where_the_time_went(window)
        more = {name: value for source in self.sources for name, value in source().items()}
        self._staged = _Staged(
            self._start, now, max(1, windows), tuple(figures), values, prints, split, table, more
        )
        self._start, self._window = now, window

    def _where_the_time_went(self, window: int) -> tuple[dict[str, float], torch.Tensor | None]:
        """Of this rank, and of all of them: a table (ranks, phases) on its way."""
        earlier, self._reading = self._reading, reading(window)
        device = self._timeline.read() if self._timeline else None
        split = split_between(earlier, self._reading, device)
        if self.gather is None:
            return split, None
        mine = torch.tensor([split[f"time/{phase}"] for phase in PHASES], dtype=torch.float64)
        return split, self._on_its_way(self.gather(mine))

    def _on_its_way(self, values: torch.Tensor) -> torch.Tensor:
        """The same on the host, once the device has come so far."""
        if self._device.type != "cuda":
            return values
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return pinned.copy_(values, non_blocking=True)

    def deliver(self) -> None:
        """Hands the row that was staged last to the sinks, if there is one."""
        staged, self._staged = self._staged, None
        if staged is None:
            return
        if staged.end.event is not None:
            staged.end.event.synchronize()
        row: dict[str, float | int | str] = {
            "kind": "train",
            "window": staged.end.window,
            "epoch": round(self._plan.epoch_at(staged.end.window), 4),
            **dict(zip(staged.names, staged.values.tolist(), strict=True)),
            "memory_bytes": used_memory(self._device),
        }
        row["loss"] = float(row["loss"]) / staged.windows
        if self._trace is not None and staged.prints is not None:
            exact = {name: row[name] for name in ("kind", "window", *staged.names)}
            self._trace.write(exact, staged.prints.tolist())
        seen = self._plan.samples_seen
        samples = seen(staged.end.window) - seen(staged.start.window)
        if samples:
            seconds = staged.end.seconds_since(staged.start)
            self.busy_seconds += seconds
            self.timed_samples += samples
            row |= self._speed(samples / seconds)
        row |= staged.split
        if staged.table is not None:
            row |= straggler(staged.table.tolist(), staged.split["time/wall"])
        self.emit(row | staged.figures)

    def rest(self) -> dict[str, float]:
        """Where the host's time went since the last row, `time/*`: the last evaluation, mostly."""
        return split_between(self._reading, reading(self._window))

    def _speed(self, samples_per_s: float) -> dict[str, float]:
        speed = {"samples_per_s": samples_per_s}
        if self.units > 1:
            speed["tokens_per_s"] = samples_per_s * self.units
        if self.count is not None and self.count.per_sample:
            speed["flops_per_s"] = samples_per_s * self.count.per_sample
            if self.peak:
                speed["mfu"] = speed["flops_per_s"] / self.peak
        return speed

    def emit(self, row: Row) -> None:
        """Hands a row to the sinks, without secrets in what of it is text."""
        if self._trace is not None and row["kind"] == "evaluation":
            self._trace.write(row, ())
        row = redact(row)
        for sink in self.sinks:
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


def keep_rows(file: Path, window: int) -> int:
    """Removes the rows of later windows from a file of rows, and what can't be read; no file is fine.

    Returns:
        How many lines couldn't be read, without a last one that was cut off: that is what a kill leaves.

    Raises:
        OSError: If the file can't be read or written.
    """
    if not file.exists():
        return 0
    *lines, _ = file.read_bytes().split(b"\n")
    kept, done = list[bytes](), _window_in_json
    if file.suffix == ".csv":
        kept = [line for line in lines[:1] if b"window" in _cells(line)]
        column = _cells(kept[0]).index(b"window") if kept else -1
        lines, done = lines[1:] if kept else lines, partial(_window_in_table, column)
    windows = [done(line) for line in lines]
    kept += [line for line, at in zip(lines, windows, strict=True) if at is not None and at <= window]
    beside = file.with_suffix(".tmp")
    beside.write_bytes(b"".join(line + b"\n" for line in kept))
    beside.replace(file)
    return windows.count(None)


def _window_in_json(line: bytes) -> int | None:
    try:
        window = strict_json.parse(line)["window"]
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    return window if isinstance(window, int) else None


def _window_in_table(column: int, line: bytes) -> int | None:
    try:
        line.decode()
        return int(_cells(line)[column]) if column >= 0 else None
    except (ValueError, IndexError):
        return None


def _cells(line: bytes) -> list[bytes]:
    return line.strip().split(b",")


def csv_sink(folder: Path) -> Sink:
    """A table for each kind of row: train.csv, evaluation.csv, end.csv, for spreadsheets.

    A column that comes later is filled with nothing in the rows before it.
    """
    columns: dict[str, list[str]] = {}

    def write(row: Row) -> None:
        kind = str(row["kind"])
        path = folder / f"{kind}.csv"
        known = columns.setdefault(kind, _header(path))
        new = [name for name in row if name not in known and name != "kind"]
        if new:
            earlier = list(csv.DictReader(path.read_text().splitlines())) if known else []
            known.extend(new)
            with path.open("w", newline="") as file:
                table = csv.DictWriter(file, known)
                table.writeheader()
                table.writerows(earlier)
        with path.open("a", newline="") as file:
            csv.DictWriter(file, known, extrasaction="ignore").writerow(row)

    return write


def _header(path: Path) -> list[str]:
    lines = path.read_text().splitlines() if path.exists() else []
    return lines[0].split(",") if lines else []


def tensorboard_sink(folder: Path, window: int = 0) -> tuple[Sink, Callable[[], None]]:
    """TensorBoard scalars, one event per row: an event per scalar, as add_scalar does, costs 71 us each.

    Returns:
        The sink and the function that closes it.
    """
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # here: the import takes half a second
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.plugins.text.metadata import create_summary_metadata
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    def quiet(failed: threading.ExceptHookArgs) -> None:
        # Its thread: `write` below raises the same on the next row, where it is told in a line.
        if not (isinstance(failed.exc_value, OSError) and type(failed.thread).__module__ in _WRITERS):
            threading.__excepthook__(failed)

    threading.excepthook = quiet
    writer = EventFileWriter(str(folder))
    if window:  # what an earlier attempt wrote of later windows is not shown then
        started = SessionLog(status=SessionLog.START)
        writer.add_event(Event(wall_time=time.time(), step=window + 1, session_log=started))

    def write(row: Row) -> None:
        if row["kind"] == "verdict":
            text = TensorProto(dtype="DT_STRING", string_val=[str(row["text"]).encode()])
            told = Summary.Value(tag="verdict", metadata=create_summary_metadata("verdict", ""), tensor=text)
            writer.add_event(Event(wall_time=time.time(), step=row["window"], summary=Summary(value=[told])))
            return
        values = [
            Summary.Value(tag=f"{row['kind']}/{name}", simple_value=value)
            for name, value in row.items()
            if name not in ("window", "epoch") and isinstance(value, float | int)
        ]
        if row["kind"] == "end":  # a summary, not a curve
            return
        writer.add_event(Event(wall_time=time.time(), step=row["window"], summary=Summary(value=values)))

    return write, writer.close
