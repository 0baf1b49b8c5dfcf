"""What anomaly detection found, in the run folder: one line of JSON for each anomaly."""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.training import AnomalyConfig
from trainer.data.sampling.plan import Plan
from trainer.errors import BadInputError, DivergedError
from trainer.host import strict_json
from trainer.host.files import lines_inside, written_whole
from trainer.observe.console import warn
from trainer.train.anomaly import Finding

_NAME = "anomalies.jsonl"


def read_anomalies(folder: Path) -> list[dict[str, Any]]:
    """The anomalies of a run, in their order; a last line that was cut off by a kill doesn't count.

    Raises:
        BadInputError: If the file can't be read as such.
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
            f"{folder / _NAME}: can't be read as a list of anomalies ({error}); it decides which steps are "
            "left out: bring it back, or give another --out"
        ) from error
    return anomalies


def left_out(anomalies: list[dict[str, Any]]) -> set[int]:
    """Numbers, from 0, of the steps that are not trained: those that a run was rolled back for."""
    return {anomaly["step"] - 1 for anomaly in anomalies if anomaly["policy"] == "rollback"}


def anomalies_before(anomalies: list[dict[str, Any]], step: int, plan: Plan) -> list[dict[str, Any]]:
    """Those that hold for a run that goes on after so many steps, by this plan.

    What was skipped later, or stopped it, would happen again; a rollback is not undone, unless other samples
    are in its step now.
    """

    def comes_again(anomaly: dict[str, Any]) -> bool:
        if anomaly["policy"] != "rollback" or anomaly["step"] > plan.steps:
            return False
        return anomaly.get("samples") in (None, _samples(plan, anomaly["step"] - 1)[1])

    return [one for one in anomalies if one["step"] <= step or comes_again(one)]


def _samples(plan: Plan, step: int) -> tuple[list[int], list[int]]:
    """Epochs and samples of a step."""
    epoch, sample, weight = plan.read(np.arange(step * plan.micro_batches, (step + 1) * plan.micro_batches))
    return np.unique(epoch[weight > 0]).tolist(), sample[weight > 0].tolist()


def write_anomalies(folder: Path, anomalies: list[dict[str, Any]]) -> None:
    """Replaces the list of anomalies by one with new numbers; for good when it returns.

    Raises:
        OSError: If it can't be written.
    """
    path = folder / _NAME
    text = "".join(f"{json.dumps({**one, 'number': number})}\n" for number, one in enumerate(anomalies, 1))
    if text != (path.read_text() if path.exists() else ""):
        with written_whole(path) as beside:
            beside.write_text(text)


@dataclass(frozen=True)
class AnomalyLog:
    """Writes down what anomaly detection finds.

    Attributes:
        folder: The run folder; None on ranks that write nothing.
        plan: Knows the samples of a step.
    """

    folder: Path | None
    plan: Plan

    def skipped(self, finding: Finding) -> None:
        """Of a step whose update was not made."""
        if self.folder is None:
            return
        try:
            where = f"(anomaly {self._add(finding, self.folder)} in {_NAME})"
        except OSError as error:  # the training is worth more than its record
            where = f"({_NAME} can't be written: {error.strerror})"
        warn(f"{finding}; its update was not made {where}")

    def ends(self, finding: Finding, config: AnomalyConfig) -> DivergedError | None:
        """Of a step that ends the attempt; returns why the run ends, None if it is to be rolled back."""
        try:
            if self.folder is not None:
                self._add(finding, self.folder)
        except OSError as error:
            return DivergedError(f"{finding}; {_NAME} can't be written ({error.strerror})")
        if finding.policy == "rollback":
            if self.folder is not None:
                warn(f"{finding}; back to the checkpoint before it, and on without its samples")
            return None
        if finding.one_too_many:
            return DivergedError(f"{finding}; it is anomaly {config.most}: anomaly.most={config.most}")
        return DivergedError(
            f"{finding}; lower optim.lr, set optim.max_grad_norm or anomaly.{finding.kind}=rollback, and go "
            f"on by --resume force; {_NAME} in the run folder has the samples"
        )

    def _add(self, finding: Finding, folder: Path) -> int:
        """Returns the anomaly's number."""
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
    """A number; JSON has no word for one that isn't finite."""
    return number if math.isfinite(number) else str(number)
