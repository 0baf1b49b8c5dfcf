"""Promise: metrics are right, arrive in every sink, and logging every 50 steps reads the device once."""

import io
import math
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.clock import Clock
from tests.helpers.refusals import named
from tests.helpers.rows import read_rows
from tests.helpers.toys import TokenTask, build_alone, make_recipe, rows_to
from trainer.observe import console
from trainer.observe.console import ProgressBar
from trainer.observe.log import Logged
from trainer.observe.rows import FILES
from trainer.observe.sinks import jsonl_sink, tensorboard_sink
from trainer.optim.schedules import schedule
from trainer.train import loop
from trainer.train.loop import train


def run_logged(log_every: int, sinks: list[Any]) -> Any:
    data, log = {"global_batch_size": 8, "micro_batch_size": 4}, {"every": log_every}
    run = build_alone(make_recipe(epochs=5, data=data, optim={"max_grad_norm": 1.0}, log=log), TokenTask(40))

    def train_rows(row: Any) -> None:
        if row["kind"] == "train":
            for sink in sinks:
                sink(row)

    out = rows_to(run, train_rows)
    with mock.patch.object(loop, "next_evaluation", lambda *_: -1):
        train(run, out)
    return out.logger


def test_rows_hold_the_mean_loss_of_their_steps() -> None:
    every, some = list[Any](), list[Any]()
    run_logged(1, [every.append])
    run_logged(7, [some.append])
    assert [row["step"] for row in every] == list(range(1, 26))
    assert [row["step"] for row in some] == [7, 14, 21, 25]
    losses = [row["loss"] for row in every]
    table = schedule(make_recipe(optim={"max_grad_norm": 1.0}).optim, 25, 25)
    assert [row["lr"] for row in every] == pytest.approx(table), "of the row's own update"
    for row, start in zip(some, (0, 7, 14, 21), strict=True):
        part = losses[start : row["step"]]
        assert row["loss"] == pytest.approx(sum(part) / len(part), rel=1e-9)
        assert (row["updates"], row["epoch"]) == (row["step"], row["step"] * 8 / 40)
        assert row["samples_per_s"] > 0 and row["memory_bytes"] > 1 << 20 and row["grad_norm"] > 0


def test_a_clock_that_stands_still_gives_rows_without_a_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("trainer.observe.log.time", clock.time)
    rows: list[Any] = []
    logger = run_logged(10, [rows.append, lambda row: row["step"] == 10 and clock.move(2.0)])
    assert [row["step"] for row in rows] == [10, 20, 25]
    assert [row.get("samples_per_s") for row in rows] == [None, 40.0, None]
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert logger.logged == Logged(25, 2.0, 80)


def test_each_kind_of_row_is_a_table_of_its_own(tmp_path: Path) -> None:
    """Whole at each moment: a kill loses no row."""
    sink, close = jsonl_sink(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(FILES.values())
    for step in (1, 2):
        for kind in FILES:
            sink({"kind": kind, "step": step, "loss": math.nan, "loss_scale": math.inf})
            assert (tmp_path / FILES[kind]).read_text().count("\n") == step, "before it is closed"
    close()
    for kind in FILES:
        rows = read_rows(tmp_path, (kind,))
        assert [(row["kind"], row["step"]) for row in rows] == [(kind, 1), (kind, 2)]
        assert {(row["loss"], row["loss_scale"]) for row in rows} == {(None, None)}, "JSON has no infinity"


def test_tensorboard_reads_a_resumed_run_last_also_where_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for now, begin, loss in ((2_000_000_000, 0, 1.0), (1_000_000_000, 3, 2.0), (500_000_000, 5, 3.0)):
        monkeypatch.setattr("trainer.observe.sinks.time.time_ns", lambda now=now: now * 10**9)
        sink, close = tensorboard_sink(tmp_path, begin)
        for step in range(begin + 1, begin + 5):  # two of which the next attempt takes anew
            sink({"kind": "train", "step": step, "loss": loss})
        close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    losses = [1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0]
    assert [(event.step, event.value) for event in events] == list(enumerate(losses, 1))


def test_a_bar_with_loss_throughput_and_time_left_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, terminal = Clock(), io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(console, "time", clock.time)
    monkeypatch.setattr(sys, "stdout", terminal)
    for name, value in {"TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    progress_bar = ProgressBar(10)
    for step in range(1, 11):
        progress_bar({"kind": "train", "step": step, "loss": 0.5, "samples_per_s": 1000.0})
        clock.move(0.1)
        progress_bar.step_done(step)
    print("kept")
    progress_bar.close()
    shown = terminal.getvalue()
    # A few times a second, and at the end.
    assert {int(n) for n in re.findall(r"(?<!\d)(\d+)/10(?!\d)", shown)} == {0, 3, 6, 9, 10}
    assert "1,000 samples/s" in shown and "loss 0.5000" in shown and "kept" in shown
    assert re.search(r"\d:\d\d:\d\d", shown)


def test_the_time_left_of_a_resumed_run_is_by_its_own_steps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(console, "time", clock.time)
    progress_bar = ProgressBar(1000, done=900)
    clock.move(30.0)
    progress_bar({"kind": "train", "step": 910, "loss": 0.5})
    assert named(capsys.readouterr().out, "910/1000 4 min 30 s")
