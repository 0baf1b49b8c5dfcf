"""What filling batches takes: computing, waiting for a CPU, waiting for a disk or network.

The kernel counts the first two for each thread: CLOCK_THREAD_CPUTIME_ID, and in /proc/thread-self/schedstat
the time for which it could have run and didn't (https://docs.kernel.org/scheduler/sched-stats.html). For the
rest it was blocked.
"""

import time
from typing import NamedTuple

from trainer.host.processes import queued_ns


class Work(NamedTuple):
    """Nanoseconds of filling, in one or many workers.

    Attributes:
        wall: In all.
        cpu: Computing: decoding, cropping, copying.
        queued: Ready to run, without a CPU.
        samples: How many were filled.
    """

    wall: int
    cpu: int
    queued: int
    samples: int

    def plus(self, other: "Work") -> "Work":
        """Both together."""
        return Work(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def metrics(self, workers: int) -> dict[str, float]:
        """Shares of the time, for a row of metrics; empty if nothing was filled."""
        if not self.samples or not self.wall:
            return {}
        cpu, queued = (min(1.0, part / self.wall) for part in (self.cpu, self.queued))
        return {
            "loader/workers": workers,
            "loader/cpu": cpu,
            "loader/starved": queued,
            "loader/blocked": max(0.0, 1.0 - cpu - queued),
            "loader/seconds_per_sample": self.wall / 1e9 / self.samples,
        }


NO_WORK = Work(0, 0, 0, 0)


def now() -> Work:
    """The clocks of this thread."""
    return Work(time.perf_counter_ns(), time.thread_time_ns(), queued_ns(), 0)


def work_since(began: Work, samples: int) -> Work:
    """What was done since `now` was called in the same thread."""
    wall, cpu, queued, _ = now()
    return Work(wall - began.wall, cpu - began.cpu, queued - began.queued, samples)
