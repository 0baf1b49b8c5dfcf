"""What the guards found, in the run folder: one line of JSON for each incident."""

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.training import GuardConfig
from trainer.data.sampling.plan import Plan
from trainer.errors import BadInputError, DivergedError
from trainer.host import strict_json
from trainer.host.files import sync_folder
from trainer.observe.console import warn
from trainer.train.guard import Finding

_NAME = "incidents.jsonl"


def read_incidents(folder: Path) -> list[dict[str, Any]]:
    """The incidents of a run, in their order; a last line that was cut off by a kill doesn't count.

    Raises:
        BadInputError: If the file can't be read as such.
    """
    try:
        *lines, _ = (folder / _NAME).read_bytes().split(b"\n")
        incidents = [strict_json.parse(line) for line in lines]
        for incident in incidents:
            if not (type(incident["step"]) is int and incident["step"] >= 1):
                raise ValueError("a step is odd")
            if not (incident["kind"] in ("nonfinite", "spike") and isinstance(incident["policy"], str)):
                raise ValueError("a kind or policy is odd")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(
            f"{folder / _NAME}: can't be read as a list of incidents ({error}); it decides which steps are "
            "left out: bring it back, or give another --out"
        ) from error
    return incidents


def left_out(incidents: list[dict[str, Any]]) -> set[int]:
    """Numbers, from 0, of the steps that are not trained: those that a run was rolled back for."""
    return {incident["step"] - 1 for incident in incidents if incident["policy"] == "rollback"}


def incidents_before(incidents: list[dict[str, Any]], step: int, plan: Plan) -> list[dict[str, Any]]:
    """Those that hold for a run that goes on after so many steps, by this plan.

    What was skipped later, or stopped it, would happen again; a rollback is not undone, unless other samples
    are in its step now.
    """
    return [one for one in incidents if one["step"] <= step or _comes_again(one, plan)]


def _comes_again(incident: dict[str, Any], plan: Plan) -> bool:
    if incident["policy"] != "rollback" or incident["step"] > plan.steps:
        return False
    return incident.get("samples") in (None, _samples(plan, incident["step"] - 1)[1])


def _samples(plan: Plan, step: int) -> tuple[list[int], list[int]]:
    """Epochs and samples of a step."""
    epoch, sample, weight = plan.read(np.arange(step * plan.micro_batches, (step + 1) * plan.micro_batches))
    return np.unique(epoch[weight > 0]).tolist(), sample[weight > 0].tolist()


def restore_incidents(folder: Path, incidents: list[dict[str, Any]]) -> None:
    """Leaves only these in the run folder.

    Raises:
        BadInputError: If they can't be written.
    """
    try:
        write_incidents(folder, incidents)
    except OSError as error:
        raise BadInputError(f"{folder / _NAME} can't be written ({error.strerror}); mend that") from error


def write_incidents(folder: Path, incidents: list[dict[str, Any]]) -> None:
    """Replaces the list of incidents by one with new numbers; for good when it returns.

    Raises:
        OSError: If it can't be written.
    """
    path = folder / _NAME
    text = "".join(f"{json.dumps({**one, 'number': number})}\n" for number, one in enumerate(incidents, 1))
    if text == (path.read_text() if path.exists() else ""):
        return
    beside = path.with_suffix(".tmp")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_folder(folder)


@dataclass(frozen=True)
class IncidentLog:
    """Writes down what the guard finds.

    Attributes:
        folder: The run folder; None on ranks that write nothing.
        plan: Knows the samples of a step.
    """

    folder: Path | None
    plan: Plan

    def skipped(self, finding: Finding) -> None:
        """Of a step whose update was not made."""
        try:
            number = self._add(finding)
        except OSError as error:  # the training is worth more than its record
            warn(f"{finding}; its update was not made, and incidents.jsonl not written ({error.strerror})")
            return
        if number:
            warn(f"{finding}; its update was not made (incident {number} in incidents.jsonl)")

    def ends(self, finding: Finding, config: GuardConfig) -> DivergedError | None:
        """Of a step that ends the attempt; returns why the run ends, None if it is to be rolled back."""
        try:
            number = self._add(finding)
        except OSError as error:
            return DivergedError(f"{finding}; incidents.jsonl can't be written ({error.strerror})")
        if finding.policy == "rollback":
            if number:
                warn(f"{finding}; back to the checkpoint before it, and on without its samples")
            return None
        if finding.one_too_many:
            return DivergedError(f"{finding}; it is incident {config.most}: guard.most={config.most}")
        return DivergedError(
            f"{finding}; lower optim.lr, set optim.max_grad_norm or guard.{finding.kind}=rollback, and go on "
            "by --resume force; incidents.jsonl in the run folder has the samples"
        )

    def _add(self, finding: Finding) -> int:
        """Returns the incident's number; 0 on ranks that write nothing."""
        if self.folder is None:
            return 0
        epochs, samples = _samples(self.plan, finding.step)
        incident = {
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
        earlier = read_incidents(self.folder)
        write_incidents(self.folder, [*earlier, incident])
        return len(earlier) + 1


def _json(number: float) -> float | str:
    """A number; JSON has no word for one that isn't finite."""
    return number if math.isfinite(number) else str(number)
