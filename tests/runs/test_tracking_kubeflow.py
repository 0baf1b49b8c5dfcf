"""Promise: a TrainJob's status says how far the run is; what is rolled back is told again as it became."""

import http.server
import json
import os
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.forked import attempt, small
from tests.helpers.plugged import patiently
from tests.helpers.rows import read_rows
from trainer.runs.tracking.process import _Sent
from trainer.runs.tracking.to_kubeflow import ToKubeflow, trainer_status
from trainer.runs.tracking.tracker import trackers_here

ABOUT = {"step": 10, "steps": 110}


@contextmanager
def controller(certificate: Path | None = None) -> Iterator[tuple[str, list[tuple[str, str, Any]]]]:
    """A local server in its place: its URL, and path, token and body of each request."""
    heard: list[tuple[str, str, Any]] = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            heard.append((self.path, self.headers.get("Authorization", ""), body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        scheme = "http" if certificate is None else "https"
        yield f"{scheme}://127.0.0.1:{server.server_address[1]}/namespaces/lab/trainjobs/a/status", heard
        server.shutdown()


def test_what_the_controller_is_told() -> None:
    assert trainer_status(45, 100, 119.2, {"train/loss": 0.234567891, "eval/accuracy": 1.0}, 0.0, False) == {
        "trainerStatus": {
            "progressPercentage": 45,
            "estimatedRemainingSeconds": 120,
            "metrics": [
                {"name": "train/loss", "value": "0.234568"},
                {"name": "eval/accuracy", "value": "1"},
            ],
            "lastUpdatedTime": "1970-01-01T00:00:00Z",
        }
    }
    begun = trainer_status(0, 100, None, {}, 0.0, False)["trainerStatus"]
    assert (begun["progressPercentage"], "estimatedRemainingSeconds" in begun) == (0, False)
    early = trainer_status(45, 100, 9.0, {}, 0.0, True)["trainerStatus"]  # out of patience
    assert (early["progressPercentage"], early["estimatedRemainingSeconds"]) == (100, 0)


def test_it_is_told_now_and_then_by_tls_with_the_token_of_that_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("no openssl here, which makes the certificate")
    both, token = tmp_path / "both.pem", tmp_path / "token"
    words = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=a", "-days", "2"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(both), "-out", str(tmp_path / "ca")]
    subprocess.run(words, check=True, capture_output=True)
    both.write_text(both.read_text() + (tmp_path / "ca").read_text())
    clock = [100.0]
    monkeypatch.setattr("trainer.runs.tracking.to_kubeflow.time.monotonic", lambda: clock[0])
    with controller(both) as (url, heard):
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", url)
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(tmp_path / "ca"))
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(token))
        token.write_text("first\n")
        tracker = ToKubeflow()
        assert tracker.open(ABOUT)[0] == url
        clock[0] += 4
        tracker.log([{"kind": "train", "step": 20, "time": 1.0, "loss": 2.0, "time/data": 1.0}])
        assert len(heard) == 1, "not more often than each five seconds"
        clock[0] += 1
        token.write_text("second\n")
        rows = [{"kind": "eval", "step": 60, "time": 1.0, "accuracy": 0.5}]
        tracker.log([{"kind": "train", "step": 60, "time": 1.0, "loss": 1.0}, *rows])
        tracker.close("stopped")
        monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_CA_CERT")
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            ToKubeflow().open(ABOUT)
    path = "/namespaces/lab/trainjobs/a/status"
    assert [one[:2] for one in heard] == [(path, f"Bearer {name}") for name in ("first", "second", "second")]
    later = heard[1][2]["trainerStatus"]
    assert (later["progressPercentage"], later["estimatedRemainingSeconds"]) == (54, 5)  # 50 steps in 5 s
    metrics = [
        {"name": "train/loss", "value": "1"},
        {"name": "eval/accuracy", "value": "0.5"},
    ]
    assert later["metrics"] == metrics
    assert heard[2][2]["trainerStatus"]["progressPercentage"] == 54


def test_a_run_tells_by_the_variable_alone_and_one_that_nobody_hears_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trackers_here(["jsonl"], {}) == []
    assert trackers_here(["jsonl"], {"KUBEFLOW_TRAINER_SERVER_URL": "http://x"}) == ["kubeflow"]
    with controller() as (url, heard):
        monkeypatch.setitem(os.environ, "KUBEFLOW_TRAINER_SERVER_URL", url)
        done = attempt(tmp_path / "run", small(), before=patiently)
    assert done.code == 0, done.said
    last = heard[-1][2]["trainerStatus"]
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    accuracy = read_rows(tmp_path / "run", ("eval",))[-1]["accuracy"]
    assert {"name": "eval/accuracy", "value": f"{accuracy:.6g}"} in last["metrics"]
    done = attempt(tmp_path / "alone", small(), before=patiently)
    assert done.code == 0, done.said
    assert "kubeflow: URLError" in done.said


def test_rows_after_a_rollback_are_sent_again_and_after_a_crash_they_are_not(tmp_path: Path) -> None:
    file = tmp_path / "tracker.json"
    rows: list[dict[str, Any]] = [{"kind": "train", "step": step} for step in (2, 4, 6, 8)]
    first = _Sent(file)
    first.begin("id", 0, 0)
    first.add(first.new(rows))
    crashed = _Sent(file)
    crashed.begin("id", 4, 0)
    assert crashed.new(rows) == []
    rolled_back = _Sent(file)
    rolled_back.begin("id", 4, 1)
    fresh = rolled_back.new(rows)
    assert [row["step"] for row in fresh] == [6, 8]
    rolled_back.add(fresh[:1])
    again = _Sent(file)  # killed after its first row
    again.begin("id", 4, 1)
    assert [row["step"] for row in again.new(rows)] == [8]
