"""MLflow: the server of MLFLOW_TRACKING_URI, or files in the run folder.

The files are those of MLflow's file store, and not of its newer default, SQLite: that takes ten seconds to
set up, and needs SQLAlchemy and a file system with locks.
"""

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from trainer.errors import BadInputError
from trainer.host.here import path_shown
from trainer.observe.rows import PICTURES, pictures_of
from trainer.runs.differences import flat
from trainer.runs.tracking.tracker import metrics_of, silent

_RUN_ID = "trainer.run_id"
_METRICS, _PARAMS, _LENGTH = 1000, 100, 500  # a server's limits per request, and of a parameter's length
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "diverged": "FAILED"}


class ToMlflow:
    """Tracker for MLflow; on resume its run is found by its id, or by the tag `trainer.run_id`."""

    environment: ClassVar = {
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # By default it retries for ten minutes, while further records wait.
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_LOGGING_LEVEL": "ERROR",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }

    @staticmethod
    def check(environment: Mapping[str, str]) -> None:
        """Refuses a server in MLFLOW_TRACKING_URI that doesn't answer."""
        server = environment.get("MLFLOW_TRACKING_URI", "")
        if server.startswith(("http://", "https://")) and (why := silent(server)):
            raise BadInputError(
                f"log.to=mlflow: {server} doesn't answer ({why}); start it, or unset MLFLOW_TRACKING_URI for "
                "files in the run folder"
            )

    def open(self, about: dict[str, Any]) -> tuple[str, str]:
        """See `Tracker.open`."""
        logging.getLogger("urllib3").setLevel(
            logging.ERROR
        )  # it warns of each retry, between the run's lines
        server = os.environ.get("MLFLOW_TRACKING_URI")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        folder = Path(about["folder"], "mlflow")
        self._client = MlflowClient(server or folder.absolute().as_uri())
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or about["recipe"]
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        run = self._earlier(about, experiment)
        if run is None:
            tags = {_RUN_ID: about["run_id"]}
            if about["commit"]:
                tags["mlflow.source.git.commit"] = about["commit"]
            run = self._client.create_run(experiment, tags=tags, run_name=about["name"])
        else:
            self._client.update_run(run.info.run_id, status="RUNNING")
        self._id, self._folder = str(run.info.run_id), Path(about["folder"])
        # A parameter is set once: what --resume force changed stands in the run's manifest.
        params = [
            Param(_name(key), str(value)[:_LENGTH])
            for key, value in flat(about["config"]).items()
            if _name(key) not in run.data.params
        ]
        for start in range(0, len(params), _PARAMS):
            self._client.log_batch(self._id, params=params[start : start + _PARAMS])
        if server:
            return self._id, f"run {self._id} of {server}"
        shows = f"MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {path_shown(folder)}"
        return self._id, f"in {path_shown(folder)}; see it by {shows}"

    def _earlier(self, about: dict[str, Any], experiment: str) -> Any:
        mine = f"tags.`{_RUN_ID}` = '{about['run_id']}'"
        runs = self._client.search_runs([experiment], mine)
        known = [run for run in runs if run.info.run_id == about["id"]]
        return next(iter([*known, *runs]), None)

    def log(self, rows: list[dict[str, Any]]) -> None:
        """See `Tracker.log`; MLflow keeps equal values of the same time once, so retries are harmless."""
        from mlflow.entities import Metric

        metrics = [
            Metric(_name(name), float(value), int(row["time"] * 1000), row["step"])
            for row in rows
            for name, value in metrics_of(row).items()
        ]
        for start in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + _METRICS])
        for row in rows:
            for _, file in pictures_of(row, self._folder):
                self._client.log_artifact(self._id, str(file), PICTURES)
            if row["kind"] == "verdict":
                self._client.set_tag(self._id, "verdict", row["text"])

    def close(self, status: str) -> None:
        """See `Tracker.close`."""
        if status in _STATUS:
            self._client.set_terminated(self._id, _STATUS[status])


def _name(key: str) -> str:
    """Converts a key to a name that MLflow accepts."""
    return re.sub(r"[^\w\-. :/]", "_", key)
