"""Says during a run, and at its end, what holds it up."""

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainer.host.processes import queued_ns
from trainer.observe.diagnosis import Facts, Metrics, Verdict, diagnose, merge
from trainer.observe.flops import Count
from trainer.observe.leak import Trends
from trainer.observe.log import Row, Sink

_MOST_ROWS = 1000


class Advisor:
    """A sink that tells of each row what holds the run up, when that changes."""

    def __init__(
        self,
        facts: Facts,
        count: Count | None,
        tell: Sink,
        price_per_hour: float = 0.0,
        trends: Trends | None = None,
    ) -> None:
        """Begins without an opinion."""
        self._begun = False
        self._price, self._trends = price_per_hour, trends or Trends()
        self._facts, self._count, self._tell = facts, count, tell
        self._rows: list[Metrics] = []
        self._before: list[str] = []

    def __call__(self, row: Row) -> None:
        """A row; the first, which begins with imports and compiling, says nothing."""
        if row["kind"] != "train" or "samples_per_s" not in row:
            return
        self._begun = True
        if "time/wall" not in row:
            return
        self._rows.append(row)
        if len(self._rows) > _MOST_ROWS:
            self._rows = [merge(self._rows)]
        self._trends(row)
        verdict = self._diagnose(row)
        # Twice in a row, and not what was said last: a moment is no reason to speak.
        recent = [*self._before[-1:], verdict.cause]
        told = self._before[0] if self._before else "none"
        if len(recent) == 2 and recent[0] == recent[1] != told:
            self._tell(_row(verdict, int(row["step"]), final=False))
            told = verdict.cause
        self._before = [told, verdict.cause]

    def conclude(self, step: int, rest: Row) -> Verdict | None:
        """The verdict on the whole attempt, with the time after its last row; None if nothing was timed."""
        if not self._begun:
            return None
        self._rows.append(rest)
        verdict = self._diagnose(merge(self._rows))
        limit = self._facts.memory_bytes
        for line in self._trends.lines({"memory/rss_bytes": limit} if limit else {}):
            self._tell(_row(Verdict("leak", 0.0, line), step, final=False))
        self._tell(_row(verdict, step, final=True))
        return verdict

    def totals(self, samples_per_s: float) -> dict[str, float]:
        """Of the attempt: seconds in each phase, joules, its cost, and that of a thousand samples."""
        merged = merge(self._rows)
        totals = {k: float(v) for k, v in merged.items() if k.startswith(("time/", "energy/"))}
        if self._price and totals:
            totals["cost/money"] = totals["time/wall"] / 3600 * self._price
            totals["cost/per_thousand_samples"] = 1000 / samples_per_s / 3600 * self._price
        return totals

    def _diagnose(self, metrics: Metrics) -> Verdict:
        waits = self._count.waits if self._count else ""
        return diagnose(metrics, dataclasses.replace(self._facts, waits=waits))


def _row(verdict: Verdict, step: int, final: bool) -> dict[str, float | int | str]:
    return {"kind": "verdict", "step": step, **verdict._asdict(), "final": int(final)}


@contextmanager
def host_clock() -> Iterator[Callable[[], dict[str, float]]]:
    """Gives a source of metrics: `time/gc`, seconds in the garbage collector, and `cpu/starved`.

    The latter is the share of the wall's time for which the thread that asks could have run and had no CPU.
    Both are of the time since it was asked last.
    """
    began = collecting = 0.0
    asked, queued = time.perf_counter(), queued_ns()

    def collected(phase: str, _: dict[str, Any]) -> None:
        nonlocal began, collecting
        if phase == "start":
            began = time.perf_counter()
        elif began:
            collecting += time.perf_counter() - began

    def take() -> dict[str, float]:
        nonlocal asked, queued, collecting
        now, queued_now = time.perf_counter(), queued_ns()
        metrics = {"time/gc": collecting, "cpu/starved": (queued_now - queued) / 1e9 / max(now - asked, 1e-9)}
        asked, queued, collecting = now, queued_now, 0.0
        return metrics

    gc.callbacks.append(collected)
    try:
        yield take
    finally:
        gc.callbacks.remove(collected)
