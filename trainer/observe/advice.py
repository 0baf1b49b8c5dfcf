"""Logs the bottleneck of a run, during the run and at its end."""

import dataclasses
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainer.host.processes import queued_ns
from trainer.observe.diagnosis import Facts, Verdict, diagnose, diagnose_run, merge
from trainer.observe.flops import Count
from trainer.observe.log import Logged, Row, Sink
from trainer.observe.phases import PHASE_TIMER

_MOST_ROWS = 1000


class Advisor:
    """A sink that prints the bottleneck of the run when it changes."""

    def __init__(
        self,
        facts: Facts,
        count: Count | None,
        tell: Sink,
        price_per_hour: float = 0.0,
        logged: Logged | None = None,
    ) -> None:
        """Begins without a verdict; `logged` has sums of earlier attempts, if there are any."""
        self._begun = False
        self._price = price_per_hour
        self._facts, self._count, self._tell = facts, count, tell
        self._rows = (logged or Logged()).rows
        self._before: list[str] = []

    def __call__(self, row: Row) -> None:
        """Takes a record; the first is ignored, as it includes imports and compilation."""
        if row["kind"] != "train":
            return
        if "time/wall" in row:
            self._rows.append(row)
        if "samples_per_s" not in row:
            return
        self._begun = True
        if "time/wall" not in row:
            return
        if len(self._rows) > _MOST_ROWS:
            self._rows[:] = [merge(self._rows)]
        if self._facts.profiled:
            return
        verdict = diagnose(row, self._known())
        # Twice in a row, and not what was said last: a moment is no reason to speak.
        recent = [*self._before[-1:], verdict.cause]
        reported = self._before[0] if self._before else "none"
        if len(recent) == 2 and recent[0] == recent[1] != reported:
            self._tell(_row(verdict, int(row["step"]), final=False))
            reported = verdict.cause
        self._before = [reported, verdict.cause]

    def conclude(self, step: int, rest: Row) -> Verdict | None:
        """Returns the verdict on all attempts, `rest` included; None without timings."""
        if not self._begun:
            return None
        self._rows.append(rest)
        verdict = diagnose_run(merge(self._rows), self._known())
        self._tell(_row(verdict, step, final=True))
        return verdict

    def totals(self, samples: int) -> dict[str, float]:
        """Returns totals of the run: seconds in each phase, joules, cost, and cost of a thousand samples."""
        merged = merge(self._rows)
        totals = {k: float(v) for k, v in merged.items() if k.startswith(("time/", "energy/"))}
        if self._price and totals:
            totals["cost/money"] = totals["time/wall"] / 3600 * self._price
            totals["cost/per_thousand_samples"] = 1000 * totals["cost/money"] / max(samples, 1)
        return totals

    def _known(self) -> Facts:
        return dataclasses.replace(self._facts, waits=self._count.waits if self._count else "")


def _row(verdict: Verdict, step: int, final: bool) -> dict[str, float | int | str]:
    return {"kind": "verdict", "step": step, **verdict._asdict(), "final": int(final)}


@contextmanager
def host_clock() -> Iterator[Callable[[], dict[str, float]]]:
    """Yields a source of metrics: each call returns those since the last one.

    `time/gc` and, if there was any, `time/compile` are seconds in the garbage collector and in torch.compile
    while training: not what is collected at the start or while compiling, nor what an evaluation compiles;
    `cpu/starved` is the fraction of the wall time for which the asking thread could have run and had no CPU.
    """
    collector, compiler = _Stopwatch(), _Stopwatch()
    asked, queued = time.perf_counter(), queued_ns()

    def collected(phase: str, _: dict[str, Any]) -> None:
        if phase == "stop":
            collector.end()
        elif PHASE_TIMER.phase != "start" and not compiler.runs:
            collector.begin()

    def compiling(*_: object) -> None:
        compiler.begin(counts=PHASE_TIMER.phase != "evaluation")

    def take() -> dict[str, float]:
        nonlocal asked, queued
        now, queued_now = time.perf_counter(), queued_ns()
        metrics = {
            "time/gc": collector.take(),
            "cpu/starved": (queued_now - queued) / 1e9 / max(now - asked, 1e-9),
        }
        asked, queued = now, queued_now
        if seconds := compiler.take():
            metrics["time/compile"] = seconds
        return metrics

    # Imported where the run compiles, and then before this; else it isn't worth its seconds.
    compiled = sys.modules.get("torch._dynamo.callback")
    gc.callbacks.append(collected)
    if compiled is not None:
        compiled.callback_handler.register_start_callback(compiling)
        compiled.callback_handler.register_end_callback(compiler.end)
    try:
        yield take
    finally:
        gc.callbacks.remove(collected)
        if compiled is not None:
            compiled.callback_handler.remove_start_callback(compiling)
            compiled.callback_handler.remove_end_callback(compiler.end)


class _Stopwatch:
    """Seconds between `begin` and `end`; what begins within is within."""

    def __init__(self) -> None:
        self._depth, self._began, self._seconds = 0, 0.0, 0.0

    @property
    def runs(self) -> bool:
        return self._depth > 0

    def begin(self, counts: bool = True) -> None:
        if self._depth == 0:
            self._began = time.perf_counter() if counts else 0.0
        self._depth += 1

    def end(self, *_: object) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and self._began:
            self._seconds += time.perf_counter() - self._began
            self._began = 0.0

    def take(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds
