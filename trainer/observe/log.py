"""Metrics of a run: kept on the device, read late, handed to sinks.

A sink is a function that takes a metrics record: a flat mapping with `kind` ("train", "eval", "memory",
"hook", "verdict", "end"), `step` (steps done) and metrics.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from trainer.config.redact import redact_text
from trainer.observe.checksums import Checksums
from trainer.observe.flops import Count
from trainer.observe.memory import used_memory
from trainer.observe.phases import PHASE_TIMER, PHASES
from trainer.observe.timeline import DeviceTimeline, clock_reading, split_between, straggler

Row = Mapping[str, float | int | str]
Sink = Callable[[Row], None]

_MOST_LATER = 64  # rows that wait for their device


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


@dataclass(frozen=True)
class _Later:
    """Metrics of a step that are being copied to the host, for a record of their own."""

    at: _Moment
    kind: str
    values: torch.Tensor
    metrics: Callable[[list[float]], Mapping[str, float]]


@dataclass
class Logged:
    """Extent of a run that records have covered; kept in checkpoints.

    Attributes:
        step: Steps done at the last metrics record.
        seconds: Time of the steps that were timed.
        samples: Samples in them.
        rows: Records with timings, for the `Advisor` on rank 0; those of earlier attempts merged into one.
        tokens: Tokens of all steps; None: not counted yet, as in checkpoints from before there was a count.
    """

    step: int = 0
    seconds: float = 0.0
    samples: int = 0
    rows: list[Row] = field(default_factory=list)
    tokens: int | None = None


@dataclass(frozen=True)
class Sources:
    """Further sources of figures for metrics records.

    Attributes:
        tokens: Counts the tokens of some steps, without padding; None where samples have no tokens.
        take: Functions that return further metrics for each record, such as the machine's.
        gather: Gathers each rank's float64 (n,) to a table (ranks, n) on the device; None: a single rank.
        count: Counts the FLOPs of a sample, or None.
        peak: Peak FLOP/s of all GPUs of the run, or None where it isn't known.
        pause_s: Minimum seconds between records with timings, where records come more often; the
            next one covers all the time between.
    """

    tokens: Callable[[range], int] | None = None
    take: tuple[Callable[[], Mapping[str, float | str]], ...] = ()
    gather: Callable[[torch.Tensor], torch.Tensor] | None = None
    count: Count | None = None
    peak: float | None = None
    pause_s: float = 0.0


class Order(Protocol):
    """Fields of a record on the order of a run's samples."""

    def epoch_at(self, steps: int) -> float:
        """Returns the number of epochs in so many steps, with the fraction of the current one."""
        ...

    def samples_seen(self, steps: int) -> int:
        """Returns the samples of weight 1 in so many steps from the start."""
        ...


class MetricLogger:
    """Turns what the device accumulates into metrics records, without synchronization.

    The metrics of a logging step are copied to page-locked memory and read when the next record is due.

    Attributes:
        sinks: Functions that take the records.
        logged: Extent of the run that records cover.
    """

    def __init__(
        self,
        plan: Order,
        device: torch.device,
        sinks: list[Sink],
        take_metrics: Callable[[], Mapping[str, torch.Tensor]],
        checksums: Checksums | None = None,
        logged: Logged | None = None,
        sources: Sources | None = None,
        refuse: Callable[[int], None] | None = None,
    ) -> None:
        """Starts where an earlier attempt stopped.

        Args:
            take_metrics: Returns tensors () and resets them; "loss", "loss/…" and "watched/…" are sums
                over the steps since the last call but for as many as "left_out" says, all others are values
                of the last step.
            logged: The last metrics record so far; updated in place.
            refuse: Takes "moved" where it isn't 0, and ends the run.
        """
        self._plan = plan
        self._device = device
        self.sinks = sinks
        self._take_metrics = take_metrics
        self._checksums = checksums
        self._staged: _Staged | None = None
        self._later = deque[_Later]()
        self.logged = logged or Logged()
        self._sources = sources or Sources()
        self._refuse = refuse
        self._timeline = DeviceTimeline() if device.type == "cuda" else None
        PHASE_TIMER.on_device = self._timeline
        self._reading = clock_reading(self.logged.step)
        self.start_clock(self.logged.step)

    def start_clock(self, step: int) -> None:
        """Restarts the clock: after the first step, which compiles and warms up, and after evaluations."""
        self._start = self._now(step)

    def _now(self, step: int) -> _Moment:
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return _Moment(step, time.perf_counter(), event)

    def stage(self, step: int) -> None:
        """Takes the metrics of the steps since the last call; all ranks call it together."""
        self._deliver_staged()
        if step == self.logged.step:
            return
        metrics = self._take_metrics()
        if (count := self._sources.tokens) is not None:
            known = self.logged.tokens
            before = count(range(self.logged.step)) if known is None else known
            self.logged.tokens = before + count(range(self.logged.step, step))
        values = torch.stack([metric.detach().to(torch.float64) for metric in metrics.values()])
        values = self._on_its_way(values)
        prints = None if self._checksums is None else self._on_its_way(self._checksums.take())
        split, table, more = self._explanation(step)
        if self.logged.tokens is not None:
            more["tokens_seen"] = self.logged.tokens
        now = self._now(step)  # last: its event says that all the copies above have arrived
        self._staged = _Staged(
            self._start, now, step - self.logged.step, tuple(metrics), values, prints, split, table, more
        )
        self._start, self.logged.step = now, step

    def _explanation(self, step: int) -> tuple[dict[str, float], torch.Tensor | None, dict[str, float | str]]:
        """Returns this rank's phases, those of all (ranks, phases), and the figures of the sources."""
        gather = self._sources.gather
        # All ranks must decide alike here: collectives must not depend on a clock.
        if gather is None and time.perf_counter() - self._reading.wall < self._sources.pause_s:
            return {}, None, {}
        earlier, self._reading = self._reading, clock_reading(step)
        split = split_between(earlier, self._reading, self._timeline.read() if self._timeline else None)
        table = None
        if gather is not None:
            mine = torch.tensor([split[f"time/{phase}"] for phase in PHASES], dtype=torch.float64)
            table = self._on_its_way(gather(mine))
        return split, table, {name: value for take in self._sources.take for name, value in take().items()}

    def _on_its_way(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the values on the host, once the device has computed them."""
        if self._device.type != "cuda":
            return values
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return pinned.copy_(values, non_blocking=True)

    def stage_later(
        self,
        step: int,
        kind: str,
        values: torch.Tensor,
        metrics: Callable[[list[float]], Mapping[str, float]],
    ) -> None:
        """Takes a record of another kind, written once the device has come so far; on one rank only.

        Args:
            values: Float (n,), on the device.
            metrics: Converts them to metrics, on the host.
        """
        values = self._on_its_way(values)
        self._later.append(_Later(self._now(step), kind, values, metrics))
        if len(self._later) > _MOST_LATER:  # the first of them came long ago
            self._tell_first()

    def _tell_first(self) -> None:
        later = self._later.popleft()
        if later.at.event is not None:
            later.at.event.synchronize()
        step, metrics = later.at.step, later.metrics(later.values.tolist())
        self.emit({"kind": later.kind, "step": step, "epoch": round(self._plan.epoch_at(step), 4), **metrics})

    def deliver(self) -> None:
        """Hands all records of the steps so far to the sinks."""
        self._deliver_staged()
        while self._later:
            self._tell_first()

    def _deliver_staged(self) -> None:
        """Hands the pending record to the sinks, if there is one, after earlier ones."""
        staged, self._staged = self._staged, None
        if staged is None:
            return
        if staged.end.event is not None:
            staged.end.event.synchronize()
        while self._later and self._later[0].at.step < staged.end.step:
            self._tell_first()
        metrics = dict(zip(staged.names, staged.values.tolist(), strict=True))
        if (moved := metrics.pop("moved", 0)) and self._refuse is not None:
            self._refuse(int(moved))
        made = staged.steps - metrics.pop("left_out", 0)
        for name, value in metrics.items():
            if name == "loss" or name.startswith(("loss/", "watched/")):
                metrics[name] = value / made if made else math.nan
        row: dict[str, float | int | str] = {
            "kind": "train",
            "step": staged.end.step,
            "epoch": round(self._plan.epoch_at(staged.end.step), 4),
            **metrics,
            "memory_bytes": used_memory(self._device),
        }
        if self._checksums is not None and staged.prints is not None:
            exact = {name: row[name] for name in ("kind", "step", "epoch", *metrics)}
            prints, *differ = staged.prints.view(-1, staged.prints.shape[-1]).tolist()
            self._checksums.write(exact, prints)
            for flags in differ:
                self._checksums.drifted(staged.end.step, flags)
        seen = self._plan.samples_seen
        samples = seen(staged.end.step) - seen(staged.start.step)
        seconds = staged.end.seconds_since(staged.start)
        if samples and seconds > 0:  # a clock may stand still between two rows: then there is no speed
            self.logged.seconds += seconds
            self.logged.samples += samples
            row |= {"seconds": seconds, **self._speed(samples / seconds)}
            if self._sources.tokens is not None:
                row["tokens_per_s"] = (
                    self._sources.tokens(range(staged.start.step, staged.end.step)) / seconds
                )
        row |= staged.split
        if staged.table is not None:
            row |= straggler(staged.table.tolist(), staged.split["time/wall"])
        self.emit(row | staged.metrics)

    def rest(self) -> dict[str, float]:
        """Returns `time/*` of the host since the last record: the last evaluation, mostly."""
        return split_between(self._reading, clock_reading(self.logged.step))

    def _speed(self, samples_per_s: float) -> dict[str, float]:
        speed = {"samples_per_s": samples_per_s}
        sources = self._sources
        if sources.count is not None and sources.count.per_sample:
            speed["flops_per_s"] = samples_per_s * sources.count.per_sample
            if sources.peak:
                speed["mfu"] = speed["flops_per_s"] / sources.peak
        return speed

    def emit(self, row: Row, derived: Mapping[str, float] | None = None) -> None:
        """Hands a record to the sinks, with secrets removed from its text.

        Args:
            row: The record; the checksums hold it as it is.
            derived: Further figures for the sinks, which follow from the record's.
        """
        if self._checksums is not None and row["kind"] == "eval":
            self._checksums.write(row, ())
        shown = {**row, **(derived or {})}
        row = {name: redact_text(value) if isinstance(value, str) else value for name, value in shown.items()}
        for sink in self.sinks:
            sink(row)
