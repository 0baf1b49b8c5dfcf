"""Promise: a real MLflow server has a run's records, and one that dies changes nothing of the run."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from tests.helpers.forked import attempt, small
from tests.helpers.plugged import patiently
from tests.helpers.rows import read_rows
from tests.helpers.run_folders import manifest
from tests.helpers.toys import before_each_step_ends
from tests.helpers.waiting import until, until_gone
from tests.runs.test_trackers import SECRET, alone, logged
from trainer.errors import EXIT_REQUEUE

__all__ = ["alone"]  # a fixture

SERVER = dedent("""
    import sys
    from mlflow.server import app
    from werkzeug.serving import make_server
    server = make_server("127.0.0.1", 0, app, threaded=True)
    print(server.port, flush=True)
    server.serve_forever()
""")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """A tracking server on this machine: its address and its process."""
    for module in ("mlflow", "sqlalchemy", "alembic", "flask"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    store = str(tmp_path / "server")
    environment = dict.fromkeys(("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"), "true")
    places = dict.fromkeys(("_MLFLOW_SERVER_FILE_STORE", "_MLFLOW_SERVER_ARTIFACT_ROOT"), store)
    how: Any = {"stdout": subprocess.PIPE, "text": True, "env": {**os.environ, **environment, **places}}
    with (
        (tmp_path / "server.log").open("w") as log,
        subprocess.Popen([sys.executable, "-c", SERVER], stderr=log, **how) as process,
    ):
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port, (tmp_path / "server.log").read_text()[-2000:]
        yield f"http://127.0.0.1:{port}", process
        process.kill()


@pytest.mark.slow  # the server imports for ten seconds
@pytest.mark.usefixtures("alone")
def test_mlflow_server(server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One run at the server for a run that was stopped; then the server dies in the middle of another run."""
    address, process = server
    monkeypatch.setenv("TRACKER_API_KEY", SECRET)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

    def ask(what: str, **words: str) -> Any:
        with urlopen(f"{address}/api/2.0/mlflow/{what}?{urlencode(words)}", timeout=60) as answer:
            return json.load(answer)

    run = tmp_path / "run"
    recipe = small(**logged("mlflow"), about=f"AWS_SECRET_ACCESS_KEY={SECRET}")
    attempt(run, recipe, stop_after=7, before=patiently, code=EXIT_REQUEUE)
    (id_,) = manifest(run)["trackers"].values()
    assert ask("runs/get", run_id=id_)["run"]["info"]["status"] == "KILLED"
    done = attempt(run, recipe, before=patiently, code=0)
    assert f"mlflow       run {id_} of {address}" in done.said
    assert manifest(run)["trackers"] == {"mlflow": id_}
    there = ask("runs/get", run_id=id_)["run"]
    assert (there["info"]["status"], there["info"]["run_name"]) == ("FINISHED", "run")
    params = {one["key"]: one["value"] for one in there["data"]["params"]}
    assert (params["about"], params["optim.lr"]) == ("AWS_SECRET_ACCESS_KEY=***", "0.001")
    tags = {one["key"]: one["value"] for one in there["data"]["tags"]}
    assert tags["trainer.run_id"] == manifest(run)["run_id"]
    for kind in ("train", "eval"):
        history = ask("metrics/get-history", run_id=id_, metric_key=f"{kind}/loss")["metrics"]
        wanted = [(row["step"], row["loss"]) for row in read_rows(run, (kind,))]
        assert [(one["step"], one["value"]) for one in history] == wanted

    def die(done: int) -> None:
        if done == 9:
            until((other / "trackers/mlflow.json").exists, seconds=60)  # a row has arrived
            os.kill(process.pid, signal.SIGKILL)  # it is no child of this fork
            until_gone(process.pid)

    other = tmp_path / "other"

    def before() -> None:
        patiently()
        before_each_step_ends(die)

    lost = attempt(other, small(**logged("mlflow")), before=before, code=0)
    assert lost.said.count("trainer: mlflow: ") == 2, lost.said
    assert "records didn't reach it" in lost.said
    assert manifest(other)["status"] == "finished"
