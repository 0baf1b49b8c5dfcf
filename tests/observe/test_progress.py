"""Promise: Prometheus reads a run's progress, without cost for the training and without secrets."""

import json
import math
import re
import socket
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.forked import attempt, small
from tests.helpers.ports import free_port
from tests.helpers.refusals import named, refused
from tests.helpers.rows import read_rows
from tests.helpers.run_folders import same
from tests.helpers.toys import before_each_step_ends
from trainer.config.training import LogConfig
from trainer.observe.progress import Progress, check_metrics_port, served

ABOUT = {"run": "a", "run_id": "0f"}
TRAIN = {
    **{"kind": "train", "step": 20, "epoch": 1.5, "loss": 0.25, "loss/box": 0.125, "lr": 1e-3},
    **{"updates": 19.0, "samples_per_s": 800.0, "slow_phase": "data", "cpu/used": 1.25},
    **{"time/wall": 2.0, "time/data": 0.5, "time/forward": 1.5, "time/gc": 0.1},
}


def read(page: str) -> dict[str, float]:
    """Samples by name and labels, as Prometheus' own parser reads them."""
    families = list(text_string_to_metric_families(page))
    assert {family.type for family in families} == {"gauge"}
    samples = [sample for family in families for sample in family.samples]
    found = {}
    for one in samples:
        labels = ",".join(f'{name}="{value}"' for name, value in one.labels.items())
        found[f"{one.name}{{{labels}}}" if labels else one.name] = one.value
    assert len(found) == len(samples)
    return found


def told(*rows: dict[str, Any], saved: int | None = None, **about: str) -> Progress:
    made = Progress({**ABOUT, **about}, 100, 10, lambda: saved)
    for row in rows:
        made(row)
    return made


def page_of(*rows: dict[str, Any], **more: Any) -> str:
    registry = CollectorRegistry()
    registry.register(told(*rows, **more))
    return generate_latest(registry).decode()


def test_a_row_is_the_page_that_prometheus_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 105.0])
    times = SimpleNamespace(time=lambda: 1700000000.5, monotonic=lambda: next(clock))
    monkeypatch.setattr("trainer.observe.progress.time", times)
    evaluation = {"kind": "eval", "step": 20, "epoch": 1.5, "accuracy": 0.75, "night/accuracy": 0.5}
    verdict = {"kind": "verdict", "step": 20, "text": "data-cpu", "share": 0.4}
    assert read(page_of(TRAIN, evaluation, verdict, saved=15)) == {
        'trainer_run_info{run="a",run_id="0f"}': 1,
        "trainer_step": 20,
        "trainer_steps": 100,
        "trainer_updates": 19,
        "trainer_epoch": 1.5,
        "trainer_loss": 0.25,
        "trainer_lr": 0.001,
        "trainer_samples_per_second": 800,
        "trainer_remaining_seconds": 40,  # 10 steps took 5 s, 80 are left
        "trainer_checkpoint_step": 15,
        'trainer_phase_share{phase="data"}': 0.25,
        'trainer_phase_share{phase="forward"}': 0.75,
        'trainer_train{metric="loss/box"}': 0.125,
        'trainer_train{metric="cpu/used"}': 1.25,
        "trainer_eval_step": 20,
        'trainer_eval{metric="accuracy"}': 0.75,
        'trainer_eval{metric="night/accuracy"}': 0.5,
        "trainer_row_time_seconds": 1700000000.5,
    }


def test_phases_stay_where_a_row_does_not_explain_itself() -> None:
    brief = {name: value for name, value in TRAIN.items() if not name.startswith("time/")}
    within = {"time/compile": 0.5, "time/gc": 0.25}  # parts of other phases
    page = read(page_of({**TRAIN, **within}, {**brief, "step": 21}))
    assert page["trainer_step"] == 21
    shares = {name: value for name, value in page.items() if "phase" in name}
    assert shares == {'trainer_phase_share{phase="data"}': 0.25, 'trainer_phase_share{phase="forward"}': 0.75}


def test_numbers_and_labels_of_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2hunter2")
    odd = {"kind": "eval", "step": 1, "epoch": 0.1, 'a"b\\c\nd': 1.0}
    row = {**TRAIN, "loss": math.nan, "grad_norm": math.inf, "lr": -math.inf}
    page = page_of(row, odd, run="AWS_SECRET_ACCESS_KEY=hunter2hunter2", recipe="no text: \udcff")
    assert "hunter2" not in page
    found = read(page)
    assert math.isnan(found["trainer_loss"])
    assert (found["trainer_grad_norm"], found["trainer_lr"]) == (math.inf, -math.inf)
    assert found['trainer_eval{metric="a"b\\c\nd"}'] == 1


def test_the_dashboard_asks_for_what_there_is() -> None:
    board = json.loads((Path(__file__).parents[2] / "scripts/grafana/trainer.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [one["query"] for one in board["templating"]["list"]]
    row = {**TRAIN, "grad_norm": 1.0, "tokens_per_s": 1.0, "memory_bytes": 1.0}
    page = page_of(row, {"kind": "eval", "step": 1, "loss": 1.0}, saved=1)
    asked = {name for query in queries for name in re.findall(r"\btrainer_\w+", query)}
    assert asked - {name.partition("{")[0] for name in read(page)} == set()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) >= 12


def test_the_page_is_served_on_this_host_alone() -> None:
    config = LogConfig(metrics_port=free_port())
    with served(config, told(TRAIN)):
        address = f"http://127.0.0.1:{config.metrics_port}/metrics"
        page = urllib.request.urlopen(address, timeout=60).read().decode()
        assert read(page)["trainer_step"] == 20
        assert "python_" not in page and "process_" not in page
        with pytest.raises(ConnectionRefusedError):  # another address of the same host
            socket.create_connection(("127.0.0.2", config.metrics_port), timeout=60)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", config.metrics_port), timeout=60)


def test_a_port_that_is_taken_is_refused_or_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = LogConfig(metrics_port=other.getsockname()[1])
        key = f"log.metrics_port={config.metrics_port}"
        with refused(key):
            check_metrics_port(config)
        with served(config, told()):
            pass
        assert named(capsys.readouterr().err, key)
    check_metrics_port(config)
    check_metrics_port(LogConfig())
    with refused("log.metrics_host"):
        check_metrics_port(LogConfig(metrics_port=free_port(), metrics_host="no.such.host.invalid"))


def test_a_run_shows_what_its_rows_say_and_trains_the_same(tmp_path: Path, whole: Path) -> None:
    port, seen = free_port(), tmp_path / "seen.json"

    def look(done: int) -> None:
        if done == 12:
            seen.write_bytes(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read())

    log = {"every": 2, "to": ["jsonl"], "metrics_port": port}
    attempt(tmp_path / "run", small(log=log), before=lambda: before_each_step_ends(look), code=0)
    page = read(seen.read_text())
    (row,) = [row for row in read_rows(tmp_path / "run", ("train",)) if row["step"] == page["trainer_step"]]
    assert page["trainer_step"] >= 8
    assert (page["trainer_loss"], page["trainer_lr"]) == (row["loss"], row["lr"])
    assert (page["trainer_steps"], page["trainer_checkpoint_step"]) in [(16, 5), (16, 10)]
    (measured,) = [row for row in read_rows(tmp_path / "run", ("eval",)) if row["step"] == 8]
    assert page['trainer_eval{metric="accuracy"}'] == measured["accuracy"]
    assert any(name.startswith("trainer_run_info{") and 'run="run"' in name for name in page)
    assert same(tmp_path / "run", whole)
