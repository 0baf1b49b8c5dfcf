"""Promise: a tracker gets every row once, costs the training nothing, and can't end it."""

import atexit
import contextlib
import http.server
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import ending
from tests.helpers import plugged
from tests.helpers.forked import attempt, replace, small
from tests.helpers.plugged import patiently, waiting
from tests.helpers.programs import Quiet, served
from tests.helpers.refusals import named, refused
from tests.helpers.rows import read_rows
from tests.helpers.run_folders import manifest
from tests.helpers.toys import before_each_step_ends
from tests.helpers.waiting import SECONDS, until
from trainer.config.redact import redact_text
from trainer.config.section import validated
from trainer.config.training import LogConfig
from trainer.errors import EXIT_REQUEUE, BadInputError
from trainer.runs.tracking import feed
from trainer.runs.tracking.tracker import check_reachable, metrics_of
from trainer.train import outputs
from trainer.train.components.task import check_request, make_task
from trainer.train.start import checks as start_checks

SECRET = "hunter2hunter2"


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[list[Any]]]]:
    """The package is there; returns what its sinks were told, of some kinds or all: process, kind, more."""
    file = plugged.install(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")

    def read(*kinds: str) -> list[list[Any]]:
        events = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [event for event in events if not kinds or event[1] in kinds]

    yield read
    sys.modules.pop("plugged_sinks", None)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key, no server, no settings of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_")) or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def logged(*names: str, **more: Any) -> dict[str, Any]:
    return {"log": {"every": 2, "to": ["jsonl", *names]}, **more}


def test_a_package_brings_a_function_and_a_tracker(told: Any, tmp_path: Path) -> None:
    recipe = small(**logged("teller", "watching"), about=f"AWS_SECRET_ACCESS_KEY={SECRET}")
    run = tmp_path / "run"
    assert "watching     somewhere" in attempt(run, recipe, before=patiently, code=0).said
    rows = [[row["kind"], row["step"]] for row in read_rows(run, ())]
    assert sorted(event[2:] for event in told("sent")) == sorted(rows)
    assert [event[2:4] for event in told("row")] == [event[2:] for event in told("sent")]
    ((process, _, about),) = told("open")
    assert {event[0] for event in told("row", "close", "sent")} == {process}
    assert manifest(run)["trackers"] == {"watching": f"id-{process}"}
    assert manifest(run)["status"] == "finished"
    assert (about["id"], about["rows"], about["run_id"]) == (None, 0, manifest(run)["run_id"])
    assert about["config"]["about"] == "AWS_SECRET_ACCESS_KEY=***"
    assert told("close") == [[process, "close", "finished"]]
    losses = [event[4]["loss"] for event in told("row") if event[2] == "end"]
    assert losses == [row["loss"] for row in read_rows(run, ("end",))]


def test_a_killed_run_goes_on_with_the_same_id_and_no_row_comes_twice(told: Any, tmp_path: Path) -> None:
    run, recipe = tmp_path / "run", small(**logged("watching"))

    def kill_after(done: int) -> None:
        if done == 3:
            until((run / "trackers/watching.json").exists)  # then its id is told with the next row
        if done == 9:  # the checkpoint is of step 5
            sent = run / "trackers/watching.json"
            until(lambda: json.loads(sent.read_text())["rows"] == len(read_rows(run, ())) and 8 in written())
            until((run / "checkpoints/step-00000005").exists)
            os.kill(os.getpid(), signal.SIGKILL)

    def written() -> set[int]:
        return {row["step"] for row in read_rows(run, ())}

    attempt(run, recipe, before=lambda: before_each_step_ends(kill_after), code=-signal.SIGKILL)
    (first,) = told("open")
    assert not told("close")
    assert manifest(run)["trackers"] == {"watching": f"id-{first[0]}"}
    killed_at, forced = (shutil.copytree(run, tmp_path / name) for name in ("without", "forced"))
    assert "resumes after step 5" in attempt(run, recipe, before=patiently, code=0).said
    _, (process, _, about) = told("open")
    assert about["id"] == f"id-{first[0]}"
    assert about["rows"] == sum(event[0] == first[0] for event in told("row"))
    assert process != first[0]
    assert manifest(run)["trackers"] == {"watching": about["id"]}
    steps = Counter((kind, step) for _, _, kind, step, _ in told("row") if kind in ("train", "eval", "end"))
    assert steps == Counter((row["kind"], row["step"]) for row in read_rows(run))
    assert max(steps.values()) == 1
    # What was changed after the checkpoint is sent again, with its new values.
    attempt(forced, recipe.model_copy(update={"seed": 9}), "force", before=patiently, code=0)
    (*_, (process, *_)) = told("open")
    again = [row["step"] for row in read_rows(forced, ("train",)) if row["step"] > 5]
    assert [event[3] for event in told("row") if event[0] == process and event[2] == "train"] == again
    # The manifest knows the id, too; one that fails costs its rows alone.
    shutil.rmtree(killed_at / "trackers")
    recipe = small(**logged("watching", "closed"))
    done = attempt(killed_at, recipe, stop_after=9, before=patiently, code=EXIT_REQUEUE)
    assert told("open")[-1][2]["id"] == f"id-{first[0]}"
    assert [event[2] for event in told("close")] == ["finished", "finished", "stopped"]
    assert named(done.said, "closed ConnectionError") and "hunter2" not in done.said
    assert manifest(killed_at)["status"] == "stopped"


class Held:
    """A tracker that waits, and one that can't be opened at first."""

    def __init__(self, failures: int = 0) -> None:
        self.rows, self.gate, self.failures = list[dict[str, Any]](), threading.Event(), failures

    def open(self, about: dict[str, Any]) -> tuple[str, str]:
        assert about["id"] is None
        self.failures -= 1
        if self.failures >= 0:
            raise ConnectionError("nobody is there yet")
        return "id", "there"

    def log(self, rows: list[dict[str, Any]]) -> None:
        self.gate.wait(SECONDS)
        self.rows += rows

    def close(self, status: str) -> None:
        assert status == "finished"


Fed = Callable[[Callable[[], Held], int], feed.Feed]
Capfd = pytest.CaptureFixture[str]


@pytest.fixture
def fed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fed:
    """Makes a feed with a tracker, and gives it rows."""
    monkeypatch.setattr(feed, "REST_S", 0.0)

    def make(tracker: Callable[[], Held], rows: int) -> feed.Feed:
        monkeypatch.setattr(feed, "tracker_class", lambda _: tracker)
        made = feed.Feed(["held"], {"folder": str(tmp_path), "trackers": {}}, lambda *_: None)
        for step in range(rows):
            made({"kind": "train", "step": step})
        return made

    return make


def test_rows_never_wait_and_those_beyond_the_bound_are_counted(fed: Fed, capfd: Capfd) -> None:
    held = Held()
    made = fed(lambda: held, 4000)
    held.gate.set()
    made.close("finished")
    steps = [row["step"] for row in held.rows]
    assert steps[:1000] == list(range(1000)) and len(steps) <= 2000, "what waits, and what the thread took"
    assert named(capfd.readouterr().err, f"held {4000 - len(steps)} 4000")


def test_a_server_that_answers_later_gets_what_waited(fed: Fed, capfd: Capfd) -> None:
    held = Held(failures=2)  # at its start, and with the first row
    held.gate.set()
    made = fed(lambda: held, 1)
    until(lambda: held.failures <= 0)
    made({"kind": "train", "step": 1})
    made.close("finished")
    assert [row["step"] for row in held.rows] == [0, 1]
    assert capfd.readouterr().err.count("\n") == 1, "one warning, and none of lost rows"


@pytest.fixture
def both() -> tuple[str, str]:
    for module in ("wandb", "mlflow"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    return "wandb", "mlflow"


@pytest.mark.usefixtures("alone")
def test_a_server_that_never_answers_changes_neither_bits_nor_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, both: tuple[str, str], whole: Path
) -> None:
    """It takes connections from W&B and from MLflow."""

    def asked(done: int) -> None:
        if done == 9:
            until(lambda: select.select([silent], [], [], 0)[0])

    def before() -> None:
        waiting(0.2)
        replace(start_checks, "check_reachable", lambda _: None)  # it answered then
        before_each_step_ends(asked)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        values = {"WANDB_BASE_URL": address, "WANDB_API_KEY": "0" * 40, "WANDB_MODE": "online"}
        for name, value in {**values, "MLFLOW_TRACKING_URI": address}.items():
            monkeypatch.setenv(name, value)
        done = attempt(tmp_path / "run", small(**logged(*both)), before=before, code=0)
    assert all(named(done.said, f"{name} records") for name in both), done.said
    assert ending(tmp_path / "run").weights == ending(whole).weights


def state() -> tuple[Any, ...]:
    """What W&B and MLflow put into a process: exit functions, an excepthook, a sys.exit, variables."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return sys.exit, sys.excepthook, threading.excepthook, atexit.register, handlers, dict(os.environ)


def noting(seen: Path) -> None:
    """Notes, in a fork, whose exit functions were registered, and what of `state` stays."""
    patiently()
    kept, real = outputs.__dict__["tracked"], atexit.register
    modules = list[str]()

    def noted(function: Any, *given: Any, **named: Any) -> Any:
        modules.append(str(function.__module__))
        return real(function, *given, **named)

    @contextlib.contextmanager
    def looked_at(*given: Any) -> Iterator[Any]:
        replace(atexit, "register", noted)
        before = state()
        with kept(*given) as feeds:
            yield feeds
        differ = [n for n, (one, other) in enumerate(zip(state(), before, strict=True)) if one != other]
        seen.write_text(json.dumps([modules, differ]))

    replace(outputs, "tracked", looked_at)


PICTURE = """
import numpy

class Picture:
    def after_evaluation(self, step, metrics):
        return {"square": numpy.full((3, 4), step, numpy.uint8)}
"""


def losses_of(store: Path, id_: str = "*") -> list[tuple[int, float]]:
    """What a folder of MLflow's has of a run."""
    (file,) = store.glob(f"*/{id_}/metrics/train/loss")
    lines = [line.split() for line in file.read_text().splitlines()]
    return [(int(step), float(value)) for _, value, step in lines]


@pytest.mark.usefixtures("alone")
def test_wandb_and_mlflow_without_a_server(
    tmp_path: Path, both: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the run folder, over two attempts; and by the example's program, later and to another store."""
    from tests.helpers.wandb_files import history, records

    run, seen = tmp_path / "run", tmp_path / "seen.json"
    (tmp_path / "own.py").write_text(PICTURE)
    hooks = {"use": [f"{tmp_path / 'own.py'}:Picture"]}
    recipe = small(**logged(*both), about=f"AWS_SECRET_ACCESS_KEY={SECRET}", hooks=hooks)
    attempt(run, recipe, stop_after=7, before=patiently, code=EXIT_REQUEUE)
    done = attempt(run, recipe, before=lambda: noting(seen), code=0)
    modules, differ = json.loads(seen.read_text())
    assert differ == [] and not [one for one in modules if one.partition(".")[0] in both]
    id_, trackers = manifest(run)["run_id"], manifest(run)["trackers"]
    assert trackers["wandb"] == id_
    assert f"wandb        offline; upload it by wandb sync {run}/wandb/offline-run-*-{id_}" in done.said
    files = sorted(run.glob(f"wandb/offline-run-*-{id_}/run-{id_}.wandb"))
    assert len(files) == 2
    rows = list[dict[str, Any]]()
    for file in files:
        found = records(file)
        (about,) = [one.run for one in found if one.WhichOneof("record_type") == "run"]
        assert (about.run_id, about.project, about.display_name) == (id_, "small", "run")
        config = {item.key: item.value_json for item in about.config.update}
        assert json.loads(config["about"]) == "AWS_SECRET_ACCESS_KEY=***"
        assert SECRET.encode() not in file.read_bytes()
        rows += history(found)
    counted = [row["_step"] for row in rows]
    assert counted == sorted(set(counted)), "they follow each other, over both files"
    wanted = [{"step": row["step"], **metrics_of(row)} for row in read_rows(run, ("train", "eval"))]
    wanted = [{name: value for name, value in row.items() if value is not None} for row in wanted]
    sent = [row for row in rows if any(name.startswith("hook/square") for name in row)]
    assert len(sent) == len(list(read_rows(run, ("hook",)))) > 1
    assert len(list(run.glob("wandb/**/media/images/hook/square_*.png"))) == len(sent)
    got = [row for row in rows if "train/loss" in row or "eval/loss" in row]
    assert [{name: row.get(name) for name in want} for row, want in zip(got, wanted, strict=True)] == wanted
    losses = [(row["step"], row["loss"]) for row in read_rows(run, ("train",))]
    assert losses_of(run / "mlflow", trackers["mlflow"]) == losses
    (run / "manifest.json").write_text(json.dumps({**manifest(run), "trackers": {}}))
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    script = Path(__file__).parents[2] / "examples/send-records/send.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(run), "mlflow"])
    runpy.run_path(str(script), run_name="__main__")
    assert losses_of(tmp_path / "store") == losses


@pytest.mark.usefixtures("told")
def test_what_is_neither() -> None:
    for name in ("lacking", "number", "gone"):
        recipe = small(**logged(name))
        with refused("log.to", name):
            check_request(recipe, make_task(recipe), 1)
    with refused("watchin", "watching"):
        validated(LogConfig, {"to": ["watchin"]}, "here")


@pytest.mark.usefixtures("alone", "both")
def test_a_server_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and nobody listens there
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        ended = attempt(tmp_path / "run", small(**logged("mlflow")), code=2)
        assert named(ended.line, "log.to", "mlflow", address)
        assert not (tmp_path / "run" / "manifest.json").exists()
        with refused("WANDB_MODE", "online", address):
            check_reachable(["wandb"], {"WANDB_MODE": "online", "WANDB_BASE_URL": address})
    with refused("WANDB_MODE", "onlin"):
        check_reachable(["wandb"], {"WANDB_MODE": "onlin"})
    check_reachable(["wandb", "jsonl"], {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": address})


def test_an_address_with_a_password_is_asked_without_it_and_never_shown() -> None:
    class Answer(Quiet, http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(401)

    with served(Answer) as server:
        address = f"http://me:hunter2@127.0.0.1:{server.server_port}"
        check_reachable(["mlflow"], {"MLFLOW_TRACKING_URI": address})
    with pytest.raises(BadInputError) as refused:
        check_reachable(["mlflow"], {"MLFLOW_TRACKING_URI": "http://me:hunter2@127.0.0.1:x"})
    assert "hunter2" not in redact_text(str(refused.value))


def test_an_error_of_a_tracker_is_cut_after_its_secrets_went(fed: Fed, capfd: Capfd) -> None:
    def fail() -> Held:
        raise RuntimeError(f"https://{'u' * 200}:hunter2hunter2{'x' * 200}@host/x")

    fed(fail, 1).close("finished")
    said = capfd.readouterr().err
    assert "hunter2" not in said and "***@host" in said
