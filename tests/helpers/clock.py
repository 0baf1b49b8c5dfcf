"""A clock that moves only when a test moves it, so that what is timed is the same on every machine."""

from types import SimpleNamespace


class Clock:
    """Stands for the `time` module of a module: `monkeypatch.setattr(overhead, "time", clock.time)`."""

    def __init__(self) -> None:
        self.now = 0.0
        names = dict.fromkeys(("perf_counter", "monotonic", "process_time", "thread_time"), self)
        self.time = SimpleNamespace(**names, perf_counter_ns=self.nanoseconds, sleep=self.move)

    def __call__(self) -> float:
        return self.now

    def nanoseconds(self) -> int:
        return round(self.now * 1e9)

    def move(self, seconds: float) -> float:
        """Moves it on; returns the time then."""
        self.now += seconds
        return self.now
