"""A run's progress for Prometheus, served on this host by prometheus-client. Imports no torch."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from trainer.config.redact import redact_text
from trainer.config.training import LogConfig
from trainer.errors import BadInputError
from trainer.observe.console import warn
from trainer.observe.phases import PHASES
from trainer.observe.text import seconds_left

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_Row = Mapping[str, float | int | str]
_Samples = Sequence[tuple[str, float]]

# Of a row of metrics: what is a family of its own; its name, and what it is.
_TRAIN = {
    "updates": ("updates", "Optimizer updates so far."),
    "epoch": ("epoch", "Epochs so far, with the part of the one under way."),
    "loss": ("loss", "Loss of training, the mean since the row before."),
    "lr": ("lr", "Learning rate."),
    "grad_norm": ("grad_norm", "Norm of the gradients."),
    "samples_per_s": ("samples_per_second", "Samples a second, over all ranks."),
    "tokens_per_s": ("tokens_per_second", "Tokens a second, over all ranks."),
    "flops_per_s": ("flops_per_second", "Floating point operations a second, over all ranks."),
    "mfu": ("mfu", "Share of the GPUs' peak that is used."),
    "memory_bytes": ("memory_bytes", "Memory of rank 0, on its device."),
}


class Progress:
    """A sink that keeps the newest records of a run, and a collector that makes gauges of them on request."""

    def __init__(
        self, about: Mapping[str, str], steps: int, first: int, checkpoint: Callable[[], int | None]
    ) -> None:
        """Starts without figures.

        Args:
            about: What the run is, as labels.
            steps: That it trains in all.
            first: How many of them were done when this attempt began.
            checkpoint: Returns the step of the newest checkpoint that was written, or None.
        """
        self._about = {name: _text(redact_text(value)) for name, value in about.items()}
        self._steps, self._first, self._checkpoint = steps, first, checkpoint
        self._train: _Row = {"step": first}
        self._eval: _Row = {}
        self._phases: _Row = {}
        self._began, self._seen = time.monotonic(), time.time()
        self._left: float | None = None

    def __call__(self, row: _Row) -> None:
        """Takes a record. Records are replaced whole: the server's thread sees one or the other."""
        self._seen = time.time()
        if row["kind"] == "eval":
            self._eval = row
        if row["kind"] == "train":
            step, seconds = int(row["step"]), time.monotonic() - self._began
            self._left = seconds_left(self._steps, step, self._first, seconds)
            self._train = row
            if row.get("time/wall"):  # where rows come often, not each explains itself
                self._phases = row

    def collect(self) -> "Iterator[Metric]":
        """Yields the gauges; none of what isn't known yet. Called by prometheus-client."""
        from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

        train, measured, phases = self._train, self._eval, self._phases
        yield InfoMetricFamily("trainer_run", "The run, in labels.", self._about)
        one = {
            "step": ("Steps done.", train["step"]),
            "steps": ("Steps that the run trains in all.", self._steps),
            **{name: (about, train.get(key)) for key, (name, about) in _TRAIN.items()},
            "remaining_seconds": ("Time left, by this attempt's steps so far.", self._left),
            "checkpoint_step": ("Step of the newest checkpoint.", self._checkpoint()),
            "eval_step": ("Step of the newest evaluation.", measured.get("step")),
            "row_time_seconds": ("When the newest row came, in seconds since 1970.", self._seen),
        }
        for name, (about, value) in one.items():
            if value is not None:
                yield GaugeMetricFamily(f"trainer_{name}", about, float(value))
        wall = float(phases.get("time/wall", 1.0))
        shares = [
            (phase, float(phases[f"time/{phase}"]) / wall)
            for phase in (*PHASES, "unexplained")
            if f"time/{phase}" in phases
        ]
        others = [
            (name, value)
            for name, value in _numbers(train)
            if name not in _TRAIN and not name.startswith("time/")
        ]
        figures = [(name, value) for name, value in _numbers(measured) if name != "epoch"]
        many: list[tuple[str, str, str, _Samples]] = [
            ("phase_share", "Share of the time since the row before, by phase.", "phase", shares),
            ("train", "Further values of a metrics record, by key.", "metric", others),
            ("eval", "The newest evaluation, by metric.", "metric", figures),
        ]
        for name, about, label, samples in many:
            family = GaugeMetricFamily(f"trainer_{name}", about, labels=[label])
            for key, number in samples:
                family.add_metric([_text(key)], number)
            if samples:
                yield family


def _numbers(row: _Row) -> list[tuple[str, float]]:
    return [
        (name, float(value))
        for name, value in row.items()
        if name not in ("kind", "step") and isinstance(value, int | float)
    ]


def _text(text: str) -> str:
    return text.encode("utf-8", "replace").decode()  # a path may hold what is no text


def check_metrics_port(config: LogConfig) -> None:
    """Refuses a port that can't be listened on; for a run that begins.

    Raises:
        BadInputError: In that case.
    """
    if config.metrics_port:
        try:
            where = socket.getaddrinfo(
                config.metrics_host, config.metrics_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            socket.create_server(where[0][4][:2], family=where[0][0]).close()
        except (OSError, UnicodeError) as error:
            raise BadInputError(_taken(config, error)) from error


def _taken(config: LogConfig, error: Exception) -> str:
    where = f"log.metrics_port={config.metrics_port}: nothing can listen on {config.metrics_host} there"
    why = getattr(error, "strerror", None) or error
    host = isinstance(error, socket.gaierror | UnicodeError)
    return f"{where} ({why}); give another {'log.metrics_host' if host else 'one, or 0 for none'}"


@contextlib.contextmanager
def served(config: LogConfig, progress: Progress) -> Iterator[None]:
    """Answers with the page of a run; where the port is taken, the training continues without."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()  # its own: the library's counts Python's garbage and the like
    registry.register(progress)
    try:
        server, thread = start_http_server(config.metrics_port, config.metrics_host, registry)
    except (OSError, UnicodeError) as error:
        warn(f"{_taken(config, error)}; the training goes on without")
        yield
        return
    # A client that goes away is no traceback in the middle of the run's lines.
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
