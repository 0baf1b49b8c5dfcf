"""Figures as a machine with a GPU would give them, made up: nobody measured them.

They say whether the rules for what needs a GPU can be reached and don't cross one another; not how well they
do. Shares of the wall, written down for a wall of 100 s.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from benchmarks.slowdowns.record import Record
from trainer.observe.diagnosis import Facts

_FACTS = Facts(
    on_gpu=True,
    ranks=1,
    local_ranks=1,
    threads=8,
    cpus=16.0,
    step_samples=256,
    micro_batch_size=256,
    decodes=True,
)


def _record(name: str, cause: str, figures: Mapping[str, float | str], facts: Facts = _FACTS) -> Record:
    times = sum(float(value) for key, value in figures.items() if key.startswith("time/"))
    computed = 100.0 - times
    whole = {
        "time/wall": 100.0,
        "time/forward": computed * 0.32,
        "time/backward": computed * 0.63,
        "time/update": computed * 0.05,
        "cpu/used": 4.0,
        "cpu/others": 0.3,
        "cpu/limit": 16.0,
        "cpu/starved": 0.01,
        "gpu/caught_up": 0.05,
        **figures,
    }
    return Record(f"gpu-{name}", cause, (), whole, facts, {}, where="gpu")


def _loader(workers: int, cpu: float, blocked: float) -> dict[str, float]:
    starved = 1.0 - cpu - blocked
    shares = {"loader/cpu": cpu, "loader/blocked": blocked, "loader/starved": starved}
    return {"loader/workers": workers, **shares, "loader/seconds_per_sample": 0.004}


def _gpu(busy: float, caught_up: float = 0.05, **times: float) -> dict[str, float]:
    waits = {f"time/{phase}": seconds for phase, seconds in times.items()}
    return {"gpu/utilization": busy, "gpu/caught_up": caught_up, **waits}


def _slowed(share: float, reason: str, mhz: float, celsius: float) -> dict[str, float | str]:
    clock = {"gpu/clock_mhz": mhz, "gpu/temperature_c": celsius}
    return {"gpu/throttled": share, "gpu/throttle_reason": reason, **clock}


def records() -> Iterator[Record]:
    """Returns the invented records."""
    decoding, blocked = _loader(12, 0.9, 0.05), _loader(12, 0.1, 0.88)
    yield _record("busy", "none", _gpu(0.97))
    yield _record("busy-data-waits", "none", {**_gpu(0.74, data=20.0), **decoding})
    yield _record("busy-slow-disk", "none", {**_gpu(0.8, data=17.0), **blocked})
    yield _record("copy-unpinned", "copy", _gpu(0.55, copy=31.0))
    yield _record("copy-small", "copy", _gpu(0.42, copy=18.0, data=6.0))
    yield _record("host-small-kernels", "host", _gpu(0.35, caught_up=0.97))
    yield _record("host-half", "host", _gpu(0.55, caught_up=0.9))
    waiting = replace(_FACTS, waits="model.py:41")
    yield _record("item", "sync", _gpu(0.6, caught_up=0.95), waiting)
    yield _record("to-cpu", "sync", _gpu(0.41, caught_up=0.8), waiting)
    yield _record("hot", "thermal", {**_gpu(0.98), **_slowed(0.8, "thermal", 1100.0, 88.0)})
    yield _record("capped", "power", {**_gpu(0.98), **_slowed(0.6, "power", 1300.0, 64.0)})
    yield _record("memory-full", "memory", {**_gpu(0.8), "memory/retries": 14})
    few = {**_gpu(0.3, data=64.0), **_loader(2, 0.95, 0.03)}
    yield _record("too-few-workers", "data-workers", few)
    yield _record("decoding", "data-cpu", {**_gpu(0.37, data=60.0), **decoding, "cpu/used": 15.6})
    yield _record("slow-disk", "data-disk", {**_gpu(0.25, data=72.0), **blocked})
