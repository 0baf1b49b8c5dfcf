"""Anomaly detection: losses and gradients that aren't finite, and loss spikes.

The device keeps loss and gradient norm of the last steps. They are read some steps late, many at once, and
always before a checkpoint, so that none is saved after an anomaly that hasn't been found yet. Every rank
reads the same numbers after the same step, and so decides alike. anomalies.jsonl in the run folder has a line
for each anomaly.
"""

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import distributed as dist

from trainer.config.training import AnomalyConfig
from trainer.data.sampling.plan import Plan
from trainer.distributed.parallel import sum_over_ranks
from trainer.errors import BadInputError, DivergedError
from trainer.host import strict_json
from trainer.host.files import lines_inside, written_whole
from trainer.observe.console import warn

_NAME = "anomalies.jsonl"
_MOST_STEPS = 100  # most steps that are read at once
_NORMAL = 1.4826  # a normal distribution's standard deviation over its median absolute deviation
_LEAST_DEVIATION = 0.01  # of the median: changes of one percent are no spikes of a loss that hardly varies


@dataclass(frozen=True)
class Finding:
    """Anomaly of a step.

    Attributes:
        step: Number of the step, from 0.
        kind: nonfinite or spike.
        policy: Reaction to it.
        loss: Loss of the step, over all ranks.
        grad_norm: Gradient norm before clipping; 0 where the loss scaler of fp16 handles overflows.
        median: Median of the losses before a spike; None for other kinds.
        deviation: Robust standard deviation of the losses before a spike; None for other kinds.
        one_too_many: True if the run stops because anomaly.most is reached.
    """

    step: int
    kind: Literal["nonfinite", "spike"]
    policy: Literal["stop", "skip"]
    loss: float
    grad_norm: float
    median: float | None = None
    deviation: float | None = None
    one_too_many: bool = False

    @property
    def ends(self) -> bool:
        """True if it ends the attempt."""
        return self.policy == "stop"

    def __str__(self) -> str:
        step = f"step {self.step + 1}"
        if self.median is not None and self.deviation is not None:
            leap = (self.loss - self.median) / self.deviation
            return f"{step}: the loss leapt to {self.loss:.4g}, {leap:.0f} deviations above {self.median:.4g}"
        return f"{step}: the {'gradient' if math.isfinite(self.loss) else 'loss'} isn't finite"


class RecentLosses:
    """Ring buffer of loss and gradient norm of the last steps, on the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocates a buffer for `size` steps, float64 (2, size)."""
        self.size = size
        self.values = torch.zeros(2, size, dtype=torch.float64, device=device)
        self._losses, self._norms = self.values[0].unbind(), self.values[1].unbind()

    def record(self, step: int, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Keeps this rank's loss of a step, and the step's gradient norm, each float ()."""
        self._losses[step % self.size].copy_(loss)
        self._norms[step % self.size].copy_(norm)


def make_recent_losses(config: AnomalyConfig, log_every: int, device: torch.device) -> RecentLosses | None:
    """Returns the ring buffer that a training fills for this detection; None if detection is off."""
    if config.nonfinite == "off" and config.spike == "off":
        return None
    return RecentLosses(min(log_every, _MOST_STEPS), device)


class AnomalyDetector:
    """Finds anomalies in the ring buffer, some steps late; decides alike on every rank."""

    def __init__(
        self,
        config: AnomalyConfig,
        ring: RecentLosses,
        group: dist.ProcessGroup | None,
        start: int,
        history: list[float],
        anomalies: int = 0,
    ) -> None:
        """Takes the state of the detection at the start of an attempt.

        Args:
            config: The section `anomaly`.
            ring: Buffer that the training fills.
            group: Process group to sum the losses over; None if each rank has the sum already.
            start: The attempt's first step, from 0.
            history: Losses of the steps before, to judge spikes by; updated in place.
            anomalies: Number of anomalies so far.
        """
        self._config, self._ring, self._group = config, ring, group
        self._from = self._staged_from = start
        self._history = history
        self._anomalies = anomalies
        self._staged: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def look(self, done: int, now: bool = False) -> list[Finding]:
        """Looks for anomalies; to be called after each step; collective.

        Args:
            done: Steps done.
            now: True to wait for the numbers of all steps done, as before a checkpoint.

        Returns:
            Anomalies whose update was skipped; the last one may be one that ends the attempt.
        """
        if not now and done % self._ring.size:
            return []
        found = self._read()
        if not (found and found[-1].ends) and done > self._from:
            self._stage(done)
            found += self._read() if now else []
        return found

    def _stage(self, done: int) -> None:
        """Starts to copy the ring buffer to the host, where it is read later."""
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
            if one := judge_step(self._config, step, losses[slot], norms[slot], self._history):
                self._anomalies += 1
                if one.policy != "stop" and self._anomalies >= self._config.most:
                    one = replace(one, policy="stop", one_too_many=True)
                found.append(one)
                if one.ends:
                    break
        return found


def judge_step(
    config: AnomalyConfig, step: int, loss: float, norm: float, history: list[float]
) -> Finding | None:
    """Judges a step by its loss, gradient norm and the losses before; adds a sound loss to `history`."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        if config.nonfinite == "off":
            return None
        return Finding(step, "nonfinite", config.nonfinite, loss, norm)
    if config.spike == "off" or loss == 0:  # 0: a step without any valid token
        return None
    if len(history) >= config.spike_history:
        median, deviation = median_and_deviation(history)
        if loss > median + config.spike_deviations * deviation:
            return Finding(step, "spike", config.spike, loss, norm, median, deviation)
    history.append(loss)
    del history[: -config.spike_history]
    return None


def median_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Returns median and 1.4826 x median absolute deviation (Hampel, 1974), at least 1 % of the median."""
    median = statistics.median(values)
    deviation = _NORMAL * statistics.median(abs(value - median) for value in values)
    return median, max(deviation, _LEAST_DEVIATION * abs(median))


def read_anomalies(folder: Path) -> list[dict[str, Any]]:
    """Reads the anomalies of a run, in their order, without a last line that a kill cut off.

    Raises:
        BadInputError: If the file can't be read, or isn't a list of anomalies.
    """
    try:
        lines = [line for line in lines_inside(folder / _NAME) if line.endswith(b"\n")]
        anomalies = [strict_json.parse(line) for line in lines]
        for anomaly in anomalies:
            if not (type(anomaly["step"]) is int and anomaly["step"] >= 1):
                raise ValueError("a step is odd")
            if not (anomaly["kind"] in ("nonfinite", "spike") and isinstance(anomaly["policy"], str)):
                raise ValueError("a kind or policy is odd")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(
            f"{folder / _NAME}: can't be read as a list of anomalies ({error}); bring "
            "it back, or give another run folder"
        ) from error
    return anomalies


def first_stop(anomalies: list[dict[str, Any]]) -> int | None:
    """Returns the index of the first anomaly that stopped the run; None if none did."""
    return next((index for index, anomaly in enumerate(anomalies) if anomaly["policy"] == "stop"), None)


def _samples(plan: Plan, step: int) -> tuple[list[int], list[int]]:
    """Returns the epochs and samples of a step."""
    epoch, sample, weight = plan.read(np.arange(step * plan.micro_batches, (step + 1) * plan.micro_batches))
    return np.unique(epoch[weight > 0]).tolist(), sample[weight > 0].tolist()


def write_anomalies(folder: Path, anomalies: list[dict[str, Any]]) -> None:
    """Writes the list of anomalies, numbered from 1, in place of the old one; durable when it returns.

    Raises:
        OSError: If the file can't be written.
    """
    path = folder / _NAME
    text = "".join(f"{json.dumps({**one, 'number': number})}\n" for number, one in enumerate(anomalies, 1))
    if text != (path.read_text() if path.exists() else ""):
        with written_whole(path) as beside:
            beside.write_text(text)


@dataclass(frozen=True)
class AnomalyLog:
    """Log of anomalies in the run folder.

    Attributes:
        folder: The run folder; None on ranks that write nothing.
        plan: Order of the samples: gives those of a step.
        means: True if a loss may be a mean of a micro-batch, which isn't finite over nothing.
    """

    folder: Path | None
    plan: Plan
    means: bool = False

    def ending(self, found: Sequence[Finding]) -> Finding | None:
        """Returns the anomaly that ends the attempt, or None; writes those whose update was skipped."""
        for finding in found:
            if finding.ends:
                return finding
            if self.folder is None:
                continue
            try:
                where = f"(anomaly {self._add(finding, self.folder)} in {_NAME})"
            except OSError as error:  # a full disk doesn't end the training
                where = f"({_NAME} can't be written: {error.strerror})"
            warn(f"{finding}; its update was not made {where}")
        return None

    def ends(self, finding: Finding, config: AnomalyConfig) -> DivergedError:
        """Writes the anomaly that ends a run; returns the run's error."""
        try:
            if self.folder is not None:
                self._add(finding, self.folder)
        except OSError as error:
            return DivergedError(f"{finding}; {_NAME} can't be written ({error.strerror})")
        if finding.one_too_many:
            return DivergedError(f"{finding}; it is anomaly {config.most}: anomaly.most={config.most}")
        told = f"{finding} (the mean of a micro-batch without any item that counts is 0/0)"
        told = told if self.means and finding.kind == "nonfinite" else str(finding)
        if finding.step == 0:
            return DivergedError(
                f"{told}; no update was made before it: look for NaN in its samples, whose numbers are in "
                f"{_NAME} in the run folder, and in the loss; precision.debug=true names the first module"
            )
        skip = " or anomaly.nonfinite=skip" * (finding.kind == "nonfinite")
        return DivergedError(
            f"{told}; lower optim.lr, set optim.max_grad_norm{skip}, and go on by --resume force; "
            f"{_NAME} in the run folder has the samples"
        )

    def _add(self, finding: Finding, folder: Path) -> int:
        """Appends an anomaly to the file; returns its number."""
        epochs, samples = _samples(self.plan, finding.step)
        anomaly = {
            "number": 0,
            "step": finding.step + 1,
            "kind": finding.kind,
            "policy": finding.policy,
            "loss": _json(finding.loss),
            "grad_norm": _json(finding.grad_norm),
            "median": finding.median,
            "deviation": finding.deviation,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "epochs": epochs,
            "samples": samples,
        }
        anomalies = [*read_anomalies(folder), anomaly]
        write_anomalies(folder, anomalies)
        return len(anomalies)


def _json(number: float) -> float | str:
    """Returns a finite number as it is, others as text: JSON has no NaN or infinity."""
    return number if math.isfinite(number) else str(number)
