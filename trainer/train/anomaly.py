"""Anomaly detection: losses and gradients that aren't finite, losses that leap; found without stopping.

The device keeps loss and gradient norm of the last steps; they are read late, together, and always before a
checkpoint: so that no checkpoint lies behind an anomaly that nobody knows of yet. Every rank reads the
same numbers after the same step, and so does the same.
"""

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import distributed as dist

from trainer.config.training import AnomalyConfig
from trainer.distributed.parallel import sum_over_ranks

_MOST_STEPS = 100  # that are looked at together
_NORMAL = 1.4826  # a normal distribution's standard deviation over its median absolute deviation
_LEAST_DEVIATION = 0.01  # of the median: a loss that hardly varies has no spikes of a hundredth


@dataclass(frozen=True)
class Finding:
    """What was found in a step.

    Attributes:
        step: Its number, from 0.
        kind: nonfinite or spike.
        policy: What is to be done.
        loss: Its loss, over all ranks.
        grad_norm: Before clipping; 0 where fp16's scaler takes care of it.
        median: Of the losses before it; None if it isn't a spike.
        deviation: Robust standard deviation of these; None if it isn't a spike.
        one_too_many: Whether the run stops for it because there were too many.
    """

    step: int
    kind: Literal["nonfinite", "spike"]
    policy: Literal["stop", "skip", "rollback"]
    loss: float
    grad_norm: float
    median: float | None = None
    deviation: float | None = None
    one_too_many: bool = False

    @property
    def ends(self) -> bool:
        """Whether it ends the attempt."""
        return self.policy != "skip"

    def __str__(self) -> str:
        step = f"step {self.step + 1}"
        if self.median is not None and self.deviation is not None:
            leap = (self.loss - self.median) / self.deviation
            return f"{step}: the loss leapt to {self.loss:.4g}, {leap:.0f} deviations above {self.median:.4g}"
        return f"{step}: the {'gradient' if math.isfinite(self.loss) else 'loss'} isn't finite"


class RecentLosses:
    """Loss and gradient norm of the last steps, on the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Has room for so many steps."""
        self.size = size
        self.values = torch.zeros(2, size, dtype=torch.float64, device=device)
        self._losses, self._norms = self.values[0].unbind(), self.values[1].unbind()

    def record(self, step: int, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Keeps this rank's part of a step's loss, and its gradient norm, each float ()."""
        self._losses[step % self.size].copy_(loss)
        self._norms[step % self.size].copy_(norm)


def make_recent_losses(config: AnomalyConfig, log_every: int, device: torch.device) -> RecentLosses | None:
    """What a training with this anomaly detection fills; None if there are none."""
    if config.nonfinite == "off" and config.spike == "off":
        return None
    return RecentLosses(min(log_every, _MOST_STEPS), device)


class AnomalyDetector:
    """Reads the ring, late, and tells what is to be done; on every rank."""

    def __init__(
        self,
        config: AnomalyConfig,
        ring: RecentLosses,
        group: dist.ProcessGroup | None,
        start: int,
        history: list[float],
        left_out: Collection[int] = (),
        anomalies: int = 0,
    ) -> None:
        """Begins at a step.

        Args:
            ring: What the training fills.
            group: Sums the losses; None where each rank has the whole loss.
            history: Losses before it, for spikes; updated in place.
        """
        self._config, self._ring, self._group, self._left_out = config, ring, group, left_out
        self._from = self._staged_from = start
        self._history = history
        self._anomalies = anomalies
        self._staged: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def look(self, done: int, now: bool = False) -> list[Finding]:
        """To be called after each step; collective.

        Args:
            done: Steps done.
            now: Whether to wait for the numbers of all of them: before what must not be behind an anomaly.

        Returns:
            The steps whose update was skipped; and last the one that ends this attempt, if there is one.
        """
        if not now and done % self._ring.size:
            return []
        found = self._read()
        if not (found and found[-1].ends) and done > self._from:
            self._stage(done)
            found += self._read() if now else []
        return found

    def _stage(self, done: int) -> None:
        """Copies the ring to the host, where it will be read later."""
        values = self._ring.values.clone()
        values[0] = sum_over_ranks(values[0].clone(), self._group)
        if values.device.type == "cuda":
            values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(
                values, non_blocking=True
            )
            self._event = torch.cuda.Event()
            self._event.record()
        self._staged, self._staged_from, self._from = values, self._from, done

    def _read(self) -> list[Finding]:
        staged, self._staged = self._staged, None
        found: list[Finding] = []
        if staged is None:
            return found
        if self._event is not None:
            self._event.synchronize()
        losses, norms = staged.tolist()
        for step in range(self._staged_from, self._from):
            slot = step % self._ring.size
            if step in self._left_out:
                continue
            if one := judge(self._config, step, losses[slot], norms[slot], self._history):
                self._anomalies += 1
                if one.policy != "stop" and self._anomalies >= self._config.most:
                    one = replace(one, policy="stop", one_too_many=True)
                found.append(one)
                if one.ends:
                    break
        return found


def judge(config: AnomalyConfig, step: int, loss: float, norm: float, history: list[float]) -> Finding | None:
    """Judges a step by its numbers and the losses before it, to which its own is added if it is sound."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        if config.nonfinite == "off":
            return None
        return Finding(step, "nonfinite", config.nonfinite, loss, norm)
    if config.spike == "off" or loss == 0:  # 0: no valid unit in it, so nothing to compare with
        return None
    if len(history) >= config.spike_history:
        median, deviation = median_and_deviation(history)
        if loss > median + config.spike_deviations * deviation:
            return Finding(step, "spike", config.spike, loss, norm, median, deviation)
    history.append(loss)
    del history[: -config.spike_history]
    return None


def median_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Median, and 1.4826 x the median absolute deviation (Hampel, 1974), at least 1 % of the median."""
    median = statistics.median(values)
    deviation = _NORMAL * statistics.median(abs(value - median) for value in values)
    return median, max(deviation, _LEAST_DEVIATION * abs(median))
