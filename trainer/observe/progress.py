"""A run's progress as Prometheus reads it: the text format, served on this host. Imports no torch.

By the standard library's server and a dozen lines: prometheus-client is in no stack's train group.
"""

import contextlib
import http.server
import io
import ipaddress
import math
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trainer.config.redact import redact_text
from trainer.config.training import LogConfig
from trainer.errors import BadInputError
from trainer.observe.console import warn
from trainer.observe.phases import PHASES
from trainer.observe.text import seconds_left

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "trainer_"
_CLIENT_S = 5.0  # for a request as a whole
_CONNECTIONS = 16  # at once, a thread each
_REQUEST_BYTES = 8 << 10
_POLL_S = 0.1  # as long the end of a run may wait for the server's

_Samples = Sequence[tuple[Mapping[str, str], float]]

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
    """A sink that keeps the newest records of a run, and makes a page of them on request."""

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
        self._about = {name: redact_text(value) for name, value in about.items()}
        self._steps, self._first, self._checkpoint = steps, first, checkpoint
        self._train: Mapping[str, float | int | str] = {"step": first}
        self._eval: Mapping[str, float | int | str] = {}
        self._phases: Mapping[str, float | int | str] = {}
        self._began, self._seen = time.monotonic(), time.time()
        self._left: float | None = None

    def __call__(self, row: Mapping[str, float | int | str]) -> None:
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

    def page(self) -> str:
        """Returns the page of metrics for Prometheus."""
        train, measured, phases, saved = self._train, self._eval, self._phases, self._checkpoint()
        wall = float(phases.get("time/wall", 1.0))
        shares = [
            ({"phase": phase}, float(phases[f"time/{phase}"]) / wall)
            for phase in (*PHASES, "unexplained")
            if f"time/{phase}" in phases
        ]
        others = [
            ({"metric": name}, value)
            for name, value in _numbers(train)
            if name not in _TRAIN and not name.startswith("time/")
        ]
        figures = [({"metric": name}, value) for name, value in _numbers(measured) if name != "epoch"]
        families = [
            ("run_info", "The run, in labels.", [(self._about, 1.0)]),
            ("step", "Steps done.", _one(train["step"])),
            ("steps", "Steps that the run trains in all.", _one(self._steps)),
            *((name, about, _one(train.get(key))) for key, (name, about) in _TRAIN.items()),
            ("remaining_seconds", "Time left, by this attempt's steps so far.", _one(self._left)),
            ("checkpoint_step", "Step of the newest checkpoint.", _one(saved)),
            ("phase_share", "Share of the time since the row before, by phase.", shares),
            ("train", "Further values of a metrics record, by key.", others),
            ("eval_step", "Step of the newest evaluation.", _one(measured.get("step"))),
            ("eval", "The newest evaluation, by metric.", figures),
            ("row_time_seconds", "When the newest row came, in seconds since 1970.", _one(self._seen)),
        ]
        return "".join(_family(*family) for family in families)


def _numbers(row: Mapping[str, float | int | str]) -> list[tuple[str, float]]:
    return [
        (name, float(value))
        for name, value in row.items()
        if name not in ("kind", "step") and isinstance(value, int | float)
    ]


def _one(value: float | int | str | None) -> _Samples:
    """A sample without labels; none of what isn't known."""
    return [] if value is None else [({}, float(value))]


def _family(name: str, about: str, samples: _Samples) -> str:
    """A gauge in the text format 0.0.4; nothing without samples."""
    if not samples:
        return ""
    name = _PREFIX + name
    lines = [f"# HELP {name} {about}", f"# TYPE {name} gauge"]
    for labels, value in samples:
        pairs = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        lines.append(f"{name}{{{pairs}}} {_number(value)}" if pairs else f"{name} {_number(value)}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()  # a path may hold what is no text
    return re.sub(r"[\\\"\n]", lambda found: {"\n": r"\n"}.get(found[0], f"\\{found[0]}"), text)


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


class _Server(socketserver.ThreadingTCPServer):
    # Not http.server's own, which asks a name service for the host's name: that may take ten seconds.
    allow_reuse_address = True
    request_queue_size = 64
    daemon_threads = True
    block_on_close = False

    def __init__(self, *given: Any) -> None:
        self._under_way = list[socket.socket]()
        self.address_family = socket.AF_INET6 if ":" in given[0][0] else socket.AF_INET
        super().__init__(*given)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Gives a connection a thread; of too many the oldest ends, so that Prometheus is answered."""
        self._under_way.append(request)
        if len(self._under_way) > _CONNECTIONS:
            with contextlib.suppress(OSError):
                self._under_way.pop(0).shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection; its thread is about to."""
        with contextlib.suppress(ValueError):
            self._under_way.remove(request)
        super().shutdown_request(request)

    def handle_error(self, *_: object) -> None:
        """Ignores errors of a client that went away."""


def _head_of_request(connection: socket.socket) -> bytes:
    """A request up to its blank line, with bounds on its bytes and on its time as a whole; else nothing."""
    data, end = b"", time.monotonic() + _CLIENT_S
    while b"\r\n\r\n" not in data and b"\n\n" not in data:
        left = end - time.monotonic()
        if left <= 0 or len(data) > _REQUEST_BYTES:
            return b""
        connection.settimeout(left)
        try:
            piece = connection.recv(_REQUEST_BYTES)
        except OSError:
            return b""
        if not piece:
            return b""
        data += piece
    connection.settimeout(_CLIENT_S)
    return data


def is_asked(host: str | None, listens: str) -> bool:
    """Returns True if a request's Host header means this host.

    A web page could read it by a foreign name that resolves to this address (DNS rebinding).

    Args:
        host: The header; None without one, which no browser sends.
        listens: log.metrics_host.
    """
    if host is None:
        return True
    name = re.sub(r":\d*$", "", host.strip()).lower().rstrip(".")
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name.removeprefix("[").removesuffix("]")))
    own = socket.gethostname().lower()
    return name in ("localhost", listens.lower()) or name.partition(".")[0] == own.partition(".")[0]


def check_metrics_port(config: LogConfig) -> None:
    """Refuses a port that can't be listened on; for a run that begins.

    Raises:
        BadInputError: In that case.
    """
    if config.metrics_port:
        try:
            with _Server((config.metrics_host, config.metrics_port), http.server.BaseHTTPRequestHandler):
                pass
        except (OSError, UnicodeError) as error:
            raise BadInputError(_taken(config, error)) from error


def _taken(config: LogConfig, error: Exception) -> str:
    where = f"log.metrics_port={config.metrics_port}: nothing can listen on {config.metrics_host} there"
    why = getattr(error, "strerror", None) or error
    host = isinstance(error, socket.gaierror | UnicodeError)
    return f"{where} ({why}); give another {'log.metrics_host' if host else 'one, or 0 for none'}"


@contextlib.contextmanager
def served(config: LogConfig, page: Callable[[], str]) -> Iterator[None]:
    """Answers GET /metrics with the page; where the port is taken, the training continues without."""

    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = _CLIENT_S
        server_version, sys_version = "trainer", ""

        def setup(self) -> None:
            """Reads the request here: a byte now and then would put off the end of `timeout` for ever."""
            super().setup()
            self.rfile = io.BytesIO(_head_of_request(self.connection))

        def do_GET(self) -> None:
            """The page, or 404."""
            hosts = self.headers.get_all("Host", [None])
            if len(hosts) > 1 or not is_asked(hosts[0], config.metrics_host):
                self.send_error(421, explain="Ask by this host's own name or address.")
                return
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404, explain="It is at /metrics.")
                return
            body = page().encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Logs no requests."""

    try:
        server = _Server((config.metrics_host, config.metrics_port), Handler)
    except (OSError, UnicodeError) as error:
        warn(f"{_taken(config, error)}; the training goes on without")
        yield
        return
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
