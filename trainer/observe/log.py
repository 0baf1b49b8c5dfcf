"""Metrics of a run: kept on the device, read late, handed to sinks.

A sink is a function that takes a row: a flat mapping with `kind` ("train", "evaluation", "memory", "verdict",
"end"), `step` (steps done) and metrics. To add a sink is to write such a function.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from trainer.config.redact import redact
from trainer.observe.checksums import Checksums
from trainer.observe.flops import Count
from trainer.observe.memory import PhasePeaks, used_memory
from trainer.observe.phases import PHASE_TIMER, PHASES
from trainer.observe.timeline import DeviceTimeline, reading, split_between, straggler

Row = Mapping[str, float | int | str]
Sink = Callable[[Row], None]


@dataclass(frozen=True)
class _Moment:
    """A point in a run: steps done, and when, for the host and (in its stream) for the device."""

    step: int
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
    steps: int
    names: tuple[str, ...]
    values: torch.Tensor
    prints: torch.Tensor | None
    split: dict[str, float]
    table: torch.Tensor | None
    metrics: dict[str, float | str]


class Order(Protocol):
    """What a row says of the order of a run's samples."""

    def epoch_at(self, steps: int) -> float:
        """Epochs that so many steps are, with the part of the one under way."""
        ...

    def samples_seen(self, steps: int) -> int:
        """Samples of weight 1 in so many steps from the start."""
        ...


class MetricLogger:
    """Turns what the device accumulates into rows, without stopping it.

    The metrics of a logging step are copied to page-locked memory and read when the next row is due.

    Attributes:
        busy_seconds: Time of the steps that were timed.
        left_out: Numbers of the steps that aren't trained.
        timed_samples: Samples in them.
        sinks: Where the rows go.
        gather: Makes of each rank's float64 (n,) a table (ranks, n) on the device; None: there is one rank.
        pause_s: Seconds for which a row explains nothing after one that did, where they come so often; the
            next that does tells of all the time between.
        num_items: Items (tokens) of a sample.
        count: Counts the FLOPs of a sample, or None.
        peak: Peak FLOP/s of all GPUs of the run, or None where it isn't known.
        sources: Give metrics of their own for each row, such as what the machine does.
    """

    def __init__(
        self,
        plan: Order,
        device: torch.device,
        sinks: list[Sink],
        take_metrics: Callable[[], Mapping[str, torch.Tensor]],
        checksums: Checksums | None = None,
    ) -> None:
        """Starts at step 0.

        Args:
            plan: For epochs and samples.
            device: Where the metrics are.
            sinks: Where the rows go.
            take_metrics: Returns tensors () and starts them anew; "loss" is a sum over the steps
                since the last call, all others are shown as they are.
            checksums: Records what proves the run, or None.
        """
        self._plan = plan
        self._device = device
        self.sinks = sinks
        self._take_metrics = take_metrics
        self._checksums = checksums
        self._staged: _Staged | None = None
        self._step = 0
        self.busy_seconds = 0.0
        self.timed_samples = 0
        self.left_out: Collection[int] = ()
        self.num_items = 1
        self.pause_s = 0.0
        self.gather: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.count: Count | None = None
        self.peak: float | None = None
        self.sources: list[Callable[[], Mapping[str, float | str]]] = []
        self._timeline = None
        if device.type == "cuda":
            peaks = PhasePeaks(device)
            self._timeline = DeviceTimeline(peaks=peaks)
            self.sources.append(peaks.take)
        PHASE_TIMER.on_device = self._timeline
        self._reading = reading(0)
        self.start_clock(0)

    def go_on(self, step: int, busy_seconds: float, timed_samples: int) -> None:
        """Starts where an earlier attempt stopped: at its last row of metrics, with its time and samples."""
        self._step = step
        self.busy_seconds, self.timed_samples = busy_seconds, timed_samples
        self._reading = reading(step)
        self.start_clock(step)

    @property
    def step(self) -> int:
        """Steps at the last row of metrics."""
        return self._step

    def start_clock(self, step: int) -> None:
        """Times from here on: after the first step, which compiles and warms up, and evaluations."""
        self._start = self._now(step)

    def _now(self, step: int) -> _Moment:
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return _Moment(step, time.perf_counter(), event)

    def stage(self, step: int) -> None:
        """Takes the metrics of the steps since the last call; all ranks call it together."""
        self.deliver()
        if step == self._step:
            return
        metrics = self._take_metrics()
        values = torch.stack([metric.detach().to(torch.float64) for metric in metrics.values()])
        values = self._on_its_way(values)
        prints = None if self._checksums is None else self._on_its_way(self._checksums.take())
        split, table, more = self._explanation(step)
        now = self._now(step)  # last: its event says that all the copies above have arrived
        steps = step - self._step - sum(self._step <= one < step for one in self.left_out)
        self._staged = _Staged(
            self._start, now, max(1, steps), tuple(metrics), values, prints, split, table, more
        )
        self._start, self._step = now, step

    def _explanation(self, step: int) -> tuple[dict[str, float], torch.Tensor | None, dict[str, float | str]]:
        """Where the time went since it was last told, of this rank and of all, and what the sources say."""
        # Ranks must not part here: what they do together doesn't go by the clock.
        if self.gather is None and time.perf_counter() - self._reading.wall < self.pause_s:
            return {}, None, {}
        split, table = self._where_the_time_went(step)
        return split, table, {name: value for source in self.sources for name, value in source().items()}

    def _where_the_time_went(self, step: int) -> tuple[dict[str, float], torch.Tensor | None]:
        """Of this rank, and of all of them: a table (ranks, phases) on its way."""
        earlier, self._reading = self._reading, reading(step)
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
            "step": staged.end.step,
            "epoch": round(self._plan.epoch_at(staged.end.step), 4),
            **dict(zip(staged.names, staged.values.tolist(), strict=True)),
            "memory_bytes": used_memory(self._device),
        }
        row["loss"] = float(row["loss"]) / staged.steps
        if self._checksums is not None and staged.prints is not None:
            exact = {name: row[name] for name in ("kind", "step", "epoch", *staged.names)}
            self._checksums.write(exact, staged.prints.tolist())
        seen = self._plan.samples_seen
        samples = seen(staged.end.step) - seen(staged.start.step)
        seconds = staged.end.seconds_since(staged.start)
        if samples and seconds > 0:  # a clock may stand still between two rows: then there is no speed
            self.busy_seconds += seconds
            self.timed_samples += samples
            row |= self._speed(samples / seconds)
        row |= staged.split
        if staged.table is not None:
            row |= straggler(staged.table.tolist(), staged.split["time/wall"])
        self.emit(row | staged.metrics)

    def rest(self) -> dict[str, float]:
        """Where the host's time went since the last row, `time/*`: the last evaluation, mostly."""
        return split_between(self._reading, reading(self._step))

    def _speed(self, samples_per_s: float) -> dict[str, float]:
        speed = {"samples_per_s": samples_per_s}
        if self.num_items > 1:
            speed["tokens_per_s"] = samples_per_s * self.num_items
        if self.count is not None and self.count.per_sample:
            speed["flops_per_s"] = samples_per_s * self.count.per_sample
            if self.peak:
                speed["mfu"] = speed["flops_per_s"] / self.peak
        return speed

    def emit(self, row: Row) -> None:
        """Hands a row to the sinks, without secrets in what of it is text."""
        if self._checksums is not None and row["kind"] == "evaluation":
            self._checksums.write(row, ())
        # Numbers hide nothing, and a row has many.
        row = {
            **row,
            **redact(
                {name: value for name, value in row.items() if isinstance(value, str) and name != "kind"}
            ),
        }
        for sink in self.sinks:
            sink(row)
