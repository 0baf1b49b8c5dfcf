"""Kubeflow Trainer (v2.2 and later, feature gate TrainJobStatus): `status.trainerStatus` of the TrainJob.

The controller sets environment variables with URL, certificate and token in every pod of the job; they switch
this tracker on.
"""

import json
import math
import os
import ssl
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.observe.text import seconds_left
from trainer.runs.tracking.tracker import metrics_of

URL = "KUBEFLOW_TRAINER_SERVER_URL"
_CERTIFICATE, _TOKEN = "KUBEFLOW_TRAINER_SERVER_CA_CERT", "KUBEFLOW_TRAINER_SERVER_TOKEN"  # files
_EVERY_S = 5.0  # least interval, as its documentation asks for
_ANSWER_S = 5.0
# Metrics sent of a train record; of an eval record all are sent.
_OF_TRAIN = (
    "train/loss",
    "train/lr",
    "train/epoch",
    "train/samples_per_s",
    "train/tokens_per_s",
    "train/grad_norm",
)


class ToKubeflow:
    """Tracker of the newest values only: the status has one value of each metric."""

    def open(self, about: dict[str, Any]) -> tuple[str, str]:
        """See `Tracker.open`; sends a first status, so that a wrong address is reported at once."""
        self._url, self._steps, self._first = os.environ[URL], about["steps"], about["step"]
        self._metrics, self._step = dict[str, float](), self._first
        self._began = time.monotonic()
        self._send()
        return self._url, f"status of the TrainJob at {self._url}"

    def log(self, rows: list[dict[str, Any]]) -> None:
        """See `Tracker.log`."""
        for row in rows:
            if row["kind"] in ("train", "eval"):
                self._step = row["step"]
                self._metrics |= {
                    name: value
                    for name, value in metrics_of(row).items()
                    if row["kind"] == "eval" or name in _OF_TRAIN
                }
        if time.monotonic() >= self._sent + _EVERY_S:
            self._send()

    def close(self, status: str) -> None:
        """See `Tracker.close`; sends the last values, however short the interval."""
        self._send(finished=status == "finished")

    def _send(self, finished: bool = False) -> None:
        self._sent = time.monotonic()
        left = None
        if self._step > self._first:
            left = seconds_left(self._steps, self._step, self._first, self._sent - self._began)
        body = trainer_status(self._step, self._steps, left, self._metrics, time.time(), finished)
        headers = {"Content-Type": "application/json"}
        if token := os.environ.get(_TOKEN):  # read each time: the file is replaced every hour
            headers["Authorization"] = f"Bearer {Path(token).read_text().strip()}"
        context = None
        if self._url.startswith("https://"):
            context = ssl.create_default_context(cafile=os.environ.get(_CERTIFICATE))
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers, method="POST")
        with urllib.request.urlopen(request, timeout=_ANSWER_S, context=context):
            pass


def trainer_status(
    step: int, steps: int, left: float | None, metrics: Mapping[str, float], now: float, finished: bool
) -> dict[str, Any]:
    """Returns the status in the controller's format.

    Args:
        left: Seconds until the last step; None while unknown.
        now: Unix time in seconds.
        finished: True if the run has finished, which may be before its last step.
    """
    status: dict[str, Any] = {
        "progressPercentage": 100 if finished else 100 * step // steps,
        "metrics": [{"name": name, "value": f"{value:.6g}"} for name, value in metrics.items()],
        "lastUpdatedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
    }
    if finished or left is not None:
        status["estimatedRemainingSeconds"] = 0 if finished or left is None else math.ceil(left)
    return {"trainerStatus": status}
