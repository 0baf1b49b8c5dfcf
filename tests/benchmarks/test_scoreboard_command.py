"""Promise: a part of the scoreboard that fails says so, and takes no other along."""

import json
import multiprocessing
import os
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.scoreboard import benches
from benchmarks.scoreboard.benches import BENCHES, QUICK, measured_apart
from benchmarks.scoreboard.figures import Part
from trainer.errors import BadInputError


def killed(*_: Any) -> Part:
    os._exit(9)


def test_a_bench_that_fails_or_dies_is_a_part_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = BENCHES["tokens"]._replace(measure=lambda *_: json.loads("{}")["key"])
    monkeypatch.setitem(BENCHES, "tokens", bench)
    assert benches._measure("tokens", QUICK, None) == Part("tokens", failed="KeyError: 'key'")

    def too_few(*_: Any) -> Part:
        raise BadInputError("no photographs")

    monkeypatch.setitem(BENCHES, "tokens", bench._replace(measure=too_few))
    assert benches._measure("tokens", QUICK, None) == Part("tokens", lacking="no photographs")
    monkeypatch.setattr(benches, "_measure", killed)
    fork = multiprocessing.get_context("fork")  # it computes nothing here, and imports nothing anew
    monkeypatch.setattr(benches, "multiprocessing", SimpleNamespace(get_context=lambda _: fork))
    died = measured_apart("tokens", QUICK, None)
    assert "ended before it answered" in died.failed
    assert died.seconds > 0
