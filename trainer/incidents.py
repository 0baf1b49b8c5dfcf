"""What the guards found, in the run folder: one line of JSON for each incident."""

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.checkpoint import strict_json
from trainer.checkpoint.files import sync_folder
from trainer.errors import BadInputError, DivergedError
from trainer.guard import Finding, GuardConfig
from trainer.observe.console import warn
from trainer.plan import Plan

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
            if not (type(incident["window"]) is int and isinstance(incident["policy"], str)):
                raise ValueError("window or policy is odd")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(
            f"{folder / _NAME}: can't be read as a list of incidents ({error}); it decides which windows are "
            "left out: bring it back, or give another --out"
        ) from error
    return incidents


def left_out(incidents: list[dict[str, Any]]) -> set[int]:
    """Numbers, from 0, of the windows that are not trained: those that a run was rolled back for."""
    return {incident["window"] - 1 for incident in incidents if incident["policy"] == "rollback"}


def incidents_before(incidents: list[dict[str, Any]], window: int) -> list[dict[str, Any]]:
    """Those that hold for a run that goes on after so many windows.

    What was skipped later, or stopped it, would happen again; a rollback is not undone.
    """
    return [one for one in incidents if one["policy"] == "rollback" or one["window"] <= window]


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
        plan: Knows the samples of a window.
    """

    folder: Path | None
    plan: Plan

    def skipped(self, finding: Finding) -> None:
        """Of a window whose update was not made."""
        try:
            number = self._add(finding)
        except OSError as error:  # the training is worth more than its record
            warn(f"{finding}; its update was not made, and incidents.jsonl not written ({error.strerror})")
            return
        if number:
            warn(f"{finding}; its update was not made (incident {number} in incidents.jsonl)")

    def ends(self, finding: Finding, config: GuardConfig) -> None:
        """Of a window that ends the attempt; returns if the run is to be rolled back.

        Raises:
            DivergedError: If it is to stop.
        """
        try:
            number = self._add(finding)
        except OSError as error:
            raise DivergedError(f"{finding}; incidents.jsonl can't be written ({error.strerror})") from error
        if finding.policy == "rollback":
            if number:
                warn(f"{finding}; back to the checkpoint before it, and on without its samples")
            return
        if number >= config.most > 1:
            raise DivergedError(f"{finding}; it is incident {number} of guard.most={config.most}")
        raise DivergedError(
            f"{finding}; lower optim.lr, set optim.clip or guard.{finding.kind}=rollback, and go on by "
            "--resume force; incidents.jsonl in the run folder has the samples"
        )

    def _add(self, finding: Finding) -> int:
        """Returns the incident's number; 0 on ranks that write nothing."""
        if self.folder is None:
            return 0
        shards = np.arange(finding.window * self.plan.shards, (finding.window + 1) * self.plan.shards)
        epoch, sample, weight = self.plan.read(shards)
        incident = {
            "number": 0,
            "window": finding.window + 1,
            "kind": finding.kind,
            "policy": finding.policy,
            "loss": _json(finding.loss),
            "gradient_norm": _json(finding.gradient_norm),
            "median": finding.median,
            "deviation": finding.deviation,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "epochs": np.unique(epoch[weight > 0]).tolist(),
            "samples": sample[weight > 0].tolist(),
        }
        earlier = read_incidents(self.folder)
        write_incidents(self.folder, [*earlier, incident])
        return len(earlier) + 1


def _json(number: float) -> float | str:
    """A number; JSON has no word for one that isn't finite."""
    return number if math.isfinite(number) else str(number)
