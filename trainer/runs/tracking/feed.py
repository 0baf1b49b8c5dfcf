"""Feeds the trackers of `log.to` from one thread. The training waits for it only at its end, and briefly."""

import atexit
import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config.recipe import Recipe
from trainer.config.redact import redact, redact_text
from trainer.config.sinks import SINKS
from trainer.host import strict_json
from trainer.host.files import own_folder, read_bounded, write_whole
from trainer.launch.worker import requested
from trainer.observe.console import warn
from trainer.observe.log import Row
from trainer.observe.phases import heartbeat
from trainer.runs.manifest import Manifest, status_after, update_manifest
from trainer.runs.tracking.tracker import Tracker, tracker_class, trackers_of

_ROWS = 1000  # most records that wait for the thread, and for each tracker
_FINISH_S = 30.0  # for the last records of a run that finished, to all trackers together
_LEAVE_S = 5.0  # of one that was stopped, or failed
REST_S = 30.0  # after an error, so that the thread has time for the other tracker
_LIBRARIES = {one.module for one in SINKS.values() if one.module}


class Sent:
    """Records that a tracker's run has, in a file of the run folder: none is sent twice.

    Attributes:
        id: Id of the tracker's run.
        rows: Number of its records.
    """

    def __init__(self, file: Path, after: int | None = None) -> None:
        """Reads the file; one that is odd says nothing.

        Args:
            file: The file.
            after: Step after which the records are others now, so that what was sent doesn't count; or None.
        """
        self._file, self.id, self.rows = file, "", 0
        self._steps: dict[str, int] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            facts = strict_json.parse_quickly(read_bounded(file))
            steps = {kind: int(last) for kind, last in facts["steps"].items()}
            if after is not None:
                steps = {kind: min(last, after) for kind, last in steps.items()}
            self.id, self.rows, self._steps = str(facts["id"]), int(facts["rows"]), steps
        self._before = dict(self._steps)

    def begin(self, id_: str) -> None:
        """Sets the tracker's run; records that another one has count as not sent."""
        if id_ != self.id:
            self.id, self.rows, self._steps, self._before = id_, 0, {}, {}

    def new(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the records that no earlier attempt sent."""
        return [row for row in rows if row["step"] > self._before.get(row["kind"], -1)]

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Stores that these records were sent."""
        self.rows += len(rows)
        for row in rows:
            self._steps[row["kind"]] = max(row["step"], self._steps.get(row["kind"], 0))
        with contextlib.suppress(OSError):
            write_whole(
                self._file, json.dumps({"id": self.id, "rows": self.rows, "steps": self._steps}) + "\n"
            )


class _Link:
    """A tracker as the thread calls it. What fails is tried again with the records after a rest.

    Attributes:
        done: Number of records that it has, or had.
        again: Time on the monotonic clock until which it rests.
    """

    def __init__(self, name: str, about: Mapping[str, Any], tell: Callable[..., None]) -> None:
        self.name, self.done, self.again = name, 0, 0.0
        self._about, self._tell = about, tell
        self._tracker: Tracker | None = None
        self._waiting = deque[dict[str, Any]](maxlen=_ROWS)
        self._sent = Sent(Path(about["folder"], "trackers", f"{name}.json"), about.get("changed_after"))

    def send(self, rows: Sequence[dict[str, Any]], last: bool = False) -> None:
        """Sends records, after those that wait; the last ones without a rest."""
        self._waiting.extend(rows)
        if time.monotonic() < self.again and not last:
            return
        with self._errors_told():
            if self._tracker is None:
                self._open()
            if self._tracker is not None and (fresh := self._sent.new(self._waiting)):
                self._tracker.log(fresh)
                self._sent.add(fresh)
            self.done += len(self._waiting)
            self._waiting.clear()

    def _open(self) -> None:
        tracker, sent = tracker_class(self.name)(), self._sent
        known = (
            self._about["trackers"].get(self.name) or sent.id or None
        )  # a killed run's manifest may lack it
        about = {**self._about}
        for ours in ("trackers", "changed_after"):
            about.pop(ours, None)
        id_, where = tracker.open({**about, "id": known, "rows": sent.rows if sent.id == known else 0})
        sent.begin(id_)
        self._tracker = tracker
        self._tell(self.name, id=id_, where=where)

    def close(self, status: str) -> None:
        """Ends the run at the tracker."""
        if self._tracker is not None:
            with self._errors_told():
                self._tracker.close(status)

    @contextlib.contextmanager
    def _errors_told(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            # Redacted before it is shortened, which could cut off the sign of a secret.
            problem = redact_text(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
            self._tell(self.name, problem=problem)
            self.again = time.monotonic() + REST_S


class Feed:
    """Sink that hands records to the thread of the trackers."""

    def __init__(
        self, names: Sequence[str], about: Mapping[str, Any], found: Callable[[str, str, str], object]
    ) -> None:
        """Starts the thread; after the loader's workers, which may be forks.

        Args:
            names: Trackers, from `trackers_of`.
            about: As for `Tracker.open`, but for `id` and `rows`; and `trackers`: ids by name;
                `changed_after`: see `Sent`.
            found: Called with name, id and place of a tracker's run once they are known.
        """
        self._found, self._rows, self._warned = found, 0, set[str]()
        self._queue = queue.Queue[dict[str, Any] | str]()  # a text ends it: the run's status
        self._news = queue.SimpleQueue[tuple[str, dict[str, str]]]()
        self._links = [_Link(name, about, lambda n, **news: self._news.put((n, news))) for name in names]
        self.thread = threading.Thread(target=self._feed, name="trackers", daemon=True)
        self.thread.start()

    def __call__(self, row: Row) -> None:
        """Hands on a record without waiting; drops it if `_ROWS` records wait already."""
        self._rows += 1
        if self._queue.qsize() < _ROWS:
            self._queue.put({**row, "time": time.time()})
        self._hear()

    def _feed(self) -> None:
        status, rows = None, list[dict[str, Any]]()
        while status is None:
            for link in self._links:
                link.send(rows)
            rows = []
            message = self._queue.get()
            while isinstance(message, dict):
                rows.append(message)
                if self._queue.empty() or len(rows) == _ROWS:  # a link would drop what is beyond
                    break
                message = self._queue.get()
            else:
                status = message
        for link in sorted(self._links, key=lambda one: one.again):  # sound ones first
            link.send(rows, last=True)
            link.close(status)

    def _hear(self) -> None:
        while not self._news.empty():
            name, news = self._news.get()
            if "id" in news:
                self._found(name, news["id"], news["where"])
            elif name not in self._warned:
                self._warned.add(name)
                warn(f"{name}: {news['problem']}; its records may be lost, the training goes on")

    def close(self, status: str) -> None:
        """Sends the run's status, waits for the last records, and counts those that didn't get there."""
        self._queue.put(status)
        began = time.monotonic()
        while self.thread.is_alive():
            # A signal may come now, and leaves less time.
            bound = _FINISH_S if status == "finished" and requested() is None else _LEAVE_S
            if (left := began + bound - time.monotonic()) <= 0:
                break
            heartbeat()
            self.thread.join(min(left, 0.2))
        self._hear()
        for link in self._links:
            if lost := self._rows - link.done:
                warn(f"{link.name}: {lost} of {self._rows} records didn't reach it; the run folder has them")


@contextlib.contextmanager
def tracked(
    folder: Path, recipe: Recipe, step: int, manifest: Manifest, say: Callable[[str], object]
) -> Iterator[list[Feed]]:
    """Opens the trackers of `log.to`; at the end sends them the run's status and waits for them briefly.

    Their ids are written to the manifest once they are known, which may be during the training.
    """

    def found(name: str, id_: str, where: str) -> None:
        say(f"  {name:<12} {where}")
        with contextlib.suppress(OSError):
            update_manifest(folder, manifest, trackers={**manifest.trackers, name: id_})

    names = trackers_of(recipe.log.to)
    if not names:
        yield []
        return
    process, status = os.getpid(), str(manifest.status)
    with contextlib.suppress(OSError):
        own_folder(folder / "trackers")
    with _process_kept(names):
        feed = Feed(names, _about(folder, recipe, step, manifest), found)
        try:
            yield [feed]
            status = manifest.status
        except BaseException as error:
            status = status_after(error)
            raise
        finally:
            if os.getpid() == process:  # not in a fork by user code
                feed.close(status)


def _about(folder: Path, recipe: Recipe, step: int, manifest: Manifest) -> dict[str, Any]:
    return {
        "run_id": manifest.run_id,
        "commit": manifest.commit,
        "name": folder.name,
        "recipe": Path(manifest.recipe).stem,
        "folder": str(folder),
        "config": redact(recipe.model_dump(mode="json")),
        "trackers": dict(manifest.trackers),
        "changed_after": step if manifest.attempts[-1].changed else None,
        "step": step,
        "steps": manifest.planned_steps,
    }


@contextlib.contextmanager
def _process_kept(names: Sequence[str]) -> Iterator[None]:
    """Keeps the environment and the end of this process free of what W&B and MLflow put there.

    Their exit functions wait for a server without a bound, and W&B replaces sys.exit and sys.excepthook.
    Signal handlers are safe: Python lets only the main thread set one.
    """
    environment = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    register, training = atexit.register, threading.get_ident()

    def registered(function: Callable[..., Any], *given: Any, **named: Any) -> Callable[..., Any]:
        if threading.get_ident() != training and _is_theirs(function):
            return function
        return register(function, *given, **named)

    for name in names:
        for variable, value in getattr(tracker_class(name), "environment", {}).items():
            os.environ.setdefault(variable, value)  # here: another thread may be reading it later
    hooks = {name: getattr(sys, name) for name in ("exit", "excepthook")}
    atexit.register = registered  # type: ignore[assignment]
    try:
        yield
    finally:
        if not any(thread.name == "trackers" for thread in threading.enumerate()):
            atexit.register = register
        for name, hook in hooks.items():
            if _is_theirs(getattr(sys, name)):
                setattr(sys, name, hook)
        for name in [name for name in os.environ if name.startswith(_VARIABLES)]:
            if name not in environment:
                del os.environ[name]
        os.environ.update(environment)


_VARIABLES = ("WANDB_", "MLFLOW_", "_WANDB_")


def _is_theirs(function: object) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] in _LIBRARIES
