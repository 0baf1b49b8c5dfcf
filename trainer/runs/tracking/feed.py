"""Sends records to the processes of trackers. The training waits for them only at its end, and briefly."""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.config.recipe import Recipe
from trainer.config.redact import redact
from trainer.host import strict_json
from trainer.host.files import open_own, own_folder
from trainer.launch.signals import blocked
from trainer.launch.worker import requested
from trainer.observe.console import warn
from trainer.observe.log import Row
from trainer.observe.phases import heartbeat
from trainer.runs.manifest import Manifest, status_after, update_manifest
from trainer.runs.tracking import as_tracker
from trainer.runs.tracking.tracker import trackers_of

_ROWS = 1000  # most records that wait for the pipe
_FINISH_S = 30.0  # for the last records of a run that finished
_LEAVE_S = 5.0  # of one that was stopped, or failed


class Feed:
    """Sink that sends records to the process of a tracker."""

    def __init__(self, name: str, about: Mapping[str, Any], found: Callable[[str, str, str], object]) -> None:
        """Starts the process.

        Args:
            about: See `Tracker.open`.
            found: Called with name, id and place of the tracker's run once they are known.
        """
        self._name, self._found, self._rank = name, found, os.getpid()
        self._rows = self._done = 0
        self._warned = self._closed = False
        self._heard = b""
        log = Path(about["folder"], "trackers", f"{name}.log")
        own_folder(log.parent)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        log_file = open_own(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with os.fdopen(log_file, "ab") as errors, blocked():
            self._process = subprocess.Popen([sys.executable, as_tracker.__file__], stderr=errors, **pipes)  # type: ignore[call-overload]
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        for end in (self._to, self._from):
            os.set_blocking(end, False)
        first = {"path": sys.path, "name": name, "about": about, "parent": self._rank}
        self._waiting = deque([_line(first)])
        self._write()

    def __call__(self, row: Row) -> None:
        """Sends a record without waiting; drops it if `_ROWS` records wait already."""
        self._rows += 1
        if len(self._waiting) < _ROWS:
            self._waiting.append(_line({**row, "time": time.time()}))
        self._write()
        self._hear()

    def _write(self) -> None:
        try:
            while self._waiting:
                written = os.write(self._to, self._waiting[0])
                if written < len(self._waiting[0]):
                    self._waiting[0] = self._waiting[0][written:]
                else:
                    self._waiting.popleft()
        except BlockingIOError:
            pass
        except OSError:  # its process has ended
            self._waiting.clear()
            self._warn("its process ended")

    def _hear(self) -> bool:
        """Reads messages of the process; returns False once its output has ended."""
        try:
            received = os.read(self._from, 1 << 16)
        except BlockingIOError:
            return True
        self._heard += received
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            try:
                message = dict(strict_json.parse_quickly(line))
            except (ValueError, TypeError):  # printed by user code before the process redirected its output
                continue
            self._done += message.get("done", 0)
            self._closed |= message.get("closed", False)
            if "id" in message:
                self._found(self._name, str(message["id"]), str(message["where"]))
            if "problem" in message:
                self._warn(message["problem"])
        if not received and not self._closed:
            self._warn("its process ended")
        return bool(received)

    def _warn(self, why: str) -> None:
        if not self._warned:
            warn(
                f"{self._name}: {why}; its records may be lost, the training goes on "
                f"(trackers/{self._name}.log)"
            )
        self._warned = True

    def end(self, status: str) -> None:
        """Sends the status at the end of the run, without waiting."""
        self._waiting.append(_line({"close": status}))
        self._write()

    def close(self, deadline: Callable[[], float]) -> None:
        """Waits for the last records, and ends the process.

        Args:
            deadline: Returns the end of the wait on the monotonic clock; a signal may bring it nearer.
        """
        while (left := deadline() - time.monotonic()) > 0:
            heartbeat()
            pipes = select.poll()
            pipes.register(self._from, select.POLLIN)
            if self._waiting:
                pipes.register(self._to, select.POLLOUT)
            ready = [pipe for pipe, _ in pipes.poll(min(left, 0.2) * 1000)]
            self._write()
            if self._from in ready and not self._hear():
                break
        self._process.kill()  # nothing, if it has ended
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        if lost := self._rows - self._done:
            warn(f"{self._name}: {lost} of {self._rows} records didn't reach it")


@contextlib.contextmanager
def tracked(
    folder: Path,
    recipe: Recipe,
    step: int,
    manifest: Manifest,
    say: Callable[[str], object],
    left_out: int = 0,
) -> Iterator[list[Feed]]:
    """Opens the trackers of `log.to`; at the end sends them the run's status and waits for them briefly.

    Their ids are written to the manifest once they are known, which may be during the training.
    """
    process, feeds, status = os.getpid(), list[Feed](), str(manifest.status)

    def found(name: str, id_: str, where: str) -> None:
        say(f"  {name:<12} {where}")
        with contextlib.suppress(OSError):
            update_manifest(folder, manifest, trackers={**manifest.trackers, name: id_})

    try:
        for name in trackers_of(recipe.log.to):
            try:
                about = _about(folder, recipe, step, manifest, name)
                feeds.append(Feed(name, {**about, "left_out": left_out}, found))
            except OSError as error:
                warn(
                    f"{name}: can't be started ({error.strerror}); its records are lost, the training goes on"
                )
        yield feeds
        status = manifest.status
    except BaseException as error:
        status = status_after(error)
        raise
    finally:
        if os.getpid() == process:  # not in a fork by user code
            _close(feeds, status)


def _about(folder: Path, recipe: Recipe, step: int, manifest: Manifest, name: str) -> dict[str, Any]:
    return {
        "run_id": manifest.run_id,
        "commit": manifest.commit,
        "name": folder.name,
        "recipe": Path(manifest.recipe).stem,
        "folder": str(folder),
        "config": redact(recipe.model_dump(mode="json")),
        "id": manifest.trackers.get(name),
        "step": step,
        "steps": manifest.planned_steps,
    }


def _close(feeds: list[Feed], status: str) -> None:
    for feed in feeds:
        feed.end(status)
    began = time.monotonic()
    for feed in feeds:  # a signal has less time
        feed.close(lambda: began + (_FINISH_S if status == "finished" and requested() is None else _LEAVE_S))


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"
