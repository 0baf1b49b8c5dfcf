"""Process of a tracker: reads what `feed` writes, calls the tracker, reports its progress.

Signals stay blocked, as the rank left them: this process ends when the rank says so, or ends itself.
"""

import contextlib
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

from trainer.config.redact import redact_text
from trainer.errors import EXIT_DONE, EXIT_FAILED
from trainer.host import strict_json
from trainer.host.files import read_bounded, write_whole
from trainer.launch.worker import die_with_parent
from trainer.runs.tracking.tracker import tracker_class

_T = TypeVar("_T")
_ROWS = 1000  # most records that wait here; further ones wait at the rank
_BATCH = 200  # records at a time
_LINE = 1 << 16  # bytes of a line of the log
_LAST_LINES_S = 0.5
_WAITS = (1.0, 2.0, 4.0, 8.0)  # seconds between tries to send a batch


class _Given(Exception):  # noqa: N818
    """Signal that a tracker was given up."""


class _Inbox:
    """Messages from the rank: records, and then how the run ended.

    Attributes:
        status: Status of the run, once `closing` is set.
    """

    def __init__(self) -> None:
        self.status = ""
        self.closing = threading.Event()
        self._rows: queue.Queue[dict[str, Any] | None] = queue.Queue(_ROWS)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            message = json.loads(line)
            if "close" in message:
                self.status = message["close"]
                self.closing.set()
                self._rows.put(None)
                return
            self._rows.put(message)
        os._exit(EXIT_FAILED)  # the rank is gone

    def take(self) -> list[dict[str, Any]]:
        """Waits for records and returns up to `_BATCH`; an empty list once there will be no more."""
        rows = []
        while (row := self._rows.get()) is not None:
            rows.append(row)
            if len(rows) == _BATCH or self._rows.empty():
                return rows
        self._rows.put(None)
        return rows


class _Sent:
    """Steps already sent to a tracker's run, in a file of the run folder: no step is sent twice."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.id, self.rows, self._left_out = "", 0, 0
        self._steps: dict[str, int] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            facts = strict_json.parse_quickly(read_bounded(file))
            steps = {kind: int(last) for kind, last in facts["steps"].items()}
            self.id, self.rows, self._steps = str(facts["id"]), int(facts["rows"]), steps
            self._left_out = int(facts.get("left_out", 0))
        self._before = dict(self._steps)

    def begin(self, id_: str, step: int, left_out: int) -> None:
        """Sets the tracker's run; records sent to another one, or rolled back since, count as not sent.

        Args:
            step: Steps that are done.
            left_out: Steps left out by rollbacks; if more than before, records after `step` are sent again.
        """
        if id_ != self.id:
            self.id, self.rows, self._steps, self._before = id_, 0, {}, {}
        if left_out > self._left_out:
            self._before = {kind: min(last, step) for kind, last in self._before.items()}
            self._steps = dict(self._before)
        self._left_out = left_out

    def new(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the records that no earlier attempt sent."""
        return [row for row in rows if row["step"] > self._before.get(row["kind"], -1)]

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Stores that these records were sent."""
        self.rows += len(rows)
        for row in rows:
            self._steps[row["kind"]] = max(row["step"], self._steps.get(row["kind"], 0))
        with contextlib.suppress(OSError):
            facts = {"id": self.id, "rows": self.rows, "steps": self._steps, "left_out": self._left_out}
            write_whole(self._file, json.dumps(facts) + "\n")


def main(name: str, about: Mapping[str, Any], parent: int) -> None:
    """Sends records to a tracker until the rank says that there are no more.

    Args:
        name: Name of the tracker.
        about: Facts of the run, see `Tracker.open`.
        parent: Process id of the rank.
    """
    die_with_parent(parent)
    to_rank = os.fdopen(os.dup(1), "w", buffering=1)
    with _redacted_log():
        _send(name, about, to_rank)
    os._exit(EXIT_DONE)  # threads that a library left may not delay it


@contextlib.contextmanager
def _redacted_log() -> Iterator[None]:
    """Context manager that writes all output of this process to the log (its standard error), redacted."""
    log, (reads, writes) = os.dup(2), os.pipe()

    def copy() -> None:
        with os.fdopen(reads, "rb") as printed, contextlib.suppress(OSError):
            for line in iter(lambda: printed.readline(_LINE), b""):
                os.write(log, redact_text(line.decode("utf-8", "replace")).encode())

    copies = threading.Thread(target=copy, daemon=True)
    copies.start()
    for file in (1, 2):
        os.dup2(writes, file)
    os.close(writes)
    try:
        yield
    except BaseException:
        traceback.print_exc()
        raise SystemExit(EXIT_FAILED) from None
    finally:
        sys.stdout.flush()
        for file in (1, 2):
            os.dup2(log, file)
        copies.join(_LAST_LINES_S)  # a process that a library started may hold it open


def _send(name: str, about: Mapping[str, Any], to_rank: TextIO) -> None:
    def tell(**message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            to_rank.write(json.dumps(message) + "\n")

    inbox = _Inbox()
    sent = _Sent(Path(about["folder"], "trackers", f"{name}.json"))
    with contextlib.suppress(_Given):
        tracker = _tried(tracker_class(name), inbox, tell)
        known = about["id"] or sent.id or None  # the manifest of a killed run may lack it
        facts = {**about, "id": known, "rows": sent.rows if sent.id == known else 0}
        id_, where = _tried(partial(tracker.open, facts), inbox, tell, last=False)
        sent.begin(id_, about["step"], about["left_out"])
        tell(id=id_, where=where)
        while rows := inbox.take():
            fresh = sent.new(rows)
            with contextlib.suppress(_Given):
                if fresh:
                    _tried(partial(tracker.log, fresh), inbox, tell)
                    sent.add(fresh)
                tell(done=len(rows))
        _tried(lambda: tracker.close(inbox.status), inbox, tell)
    tell(closed=True)


def _tried(call: Callable[[], _T], inbox: _Inbox, tell: Callable[..., None], last: bool = True) -> _T:
    """Calls a function until it succeeds, with growing waits; once the run is over, without a retry.

    Args:
        last: True to give up after `len(_WAITS)` retries.

    Raises:
        _Given: If it is given up.
    """
    for number in range(sys.maxsize):
        try:
            return call()
        except (Exception, SystemExit) as error:
            # Redacted before it is shortened, which could cut off the sign of a secret.
            tell(problem=redact_text(" ".join(f"{type(error).__name__}: {error}".split()))[:300])
        if (last and number >= len(_WAITS)) or inbox.closing.wait(_WAITS[min(number, len(_WAITS) - 1)]):
            break
    raise _Given
