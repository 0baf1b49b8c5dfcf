"""Sinks of metrics records: JSON lines, TensorBoard."""

import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from trainer.host import strict_json
from trainer.host.files import lines_inside, open_own, own_folder, written_whole
from trainer.observe.log import Row, Sink
from trainer.observe.rows import FILES, pictures_of, tag

_EVENTS, _LAST_SECOND = re.compile(r"events\.out\.tfevents\.(\d{10})\."), 10**10 - 1
_TOGETHER_S = 0.25  # so long, at most, rows of training wait for others on their way to TensorBoard


def jsonl_sink(folder: Path, step: int = 0) -> tuple[Sink, Callable[[], None]]:  # noqa: ARG001
    """Writes a file for each kind of record, a JSON object per line; values that aren't finite are null.

    Returns:
        The sink and the function that closes its files.

    Raises:
        OSError: If a file can't be made; the sink raises it if one can't be written.
    """
    with contextlib.ExitStack() as opening:
        files = {kind: opening.enter_context(opened_to_add(folder / name)) for kind, name in FILES.items()}
        close = opening.pop_all().close

    def write(row: Row) -> None:
        file = files[str(row["kind"])]
        file.write(json.dumps(finite(row)) + "\n")
        file.flush()

    return write, close


def opened_to_add(path: Path) -> TextIO:
    """A file of lines, to write at its end.

    Raises:
        OSError: If it can't be opened, or its name leads elsewhere.
    """
    return os.fdopen(open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8")


def finite(row: Row) -> dict[str, float | int | str | None]:
    """Converts a record for JSON; numbers that aren't finite become null."""
    return {k: None if isinstance(v, float) and not abs(v) < float("inf") else v for k, v in row.items()}


def keep_rows(file: Path, step: int) -> int:
    """Removes records of later steps, and malformed ones, from a file; a missing file is fine.

    Before step 1 all are removed, those of step 0 too: a restart writes them again.

    Returns:
        How many lines couldn't be read, without a last one that was cut off: that is what a kill leaves.

    Raises:
        OSError: If the file can't be read or written.
    """
    if not os.path.lexists(file):
        return 0
    unreadable = 0
    # Line by line: a long run has gigabytes of them.
    with written_whole(file, lasting=False) as beside, beside.open("wb") as kept:
        for line in (one for one in lines_inside(file) if one.endswith(b"\n")):
            at = _step_of(line)
            unreadable += at is None
            if at is not None and at <= step and step:
                kept.write(line)
    return unreadable


def _step_of(line: bytes) -> int | None:
    try:
        row = strict_json.parse(line)
        step = row["step"]
        # Goes: the attempt that repeats the end or extends the run writes its own.
        if row.get("kind") == "end":
            return sys.maxsize
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    return step if isinstance(step, int) else None


def tensorboard_sink(folder: Path, step: int = 0) -> tuple[Sink, Callable[[], None]]:
    """Writes TensorBoard scalars, one event per record: add_scalar's events, one per scalar, cost 71 µs each.

    TensorBoard's own writer has a thread, whose Python (checksums, mostly) runs whenever the training
    releases the GIL, and keeps it waiting. Here the training thread writes; records are buffered for up to a
    quarter of a second, and written with the ones that follow.

    Returns:
        The sink and the function that closes it.

    Raises:
        OSError: If the file can't be made; the sink raises it if it can't be written.
    """
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # here: the import takes half a second
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.plugins.text.metadata import create_summary_metadata
    from tensorboard.summary.writer.record_writer import RecordWriter

    own_folder(folder)
    seconds, rest = divmod(time.time_ns(), 10**9)
    # TensorBoard reads a folder's files in their names' order, also where the clock was set back.
    event_files = (_EVENTS.match(file.name) for file in folder.iterdir())
    seconds = min(max([seconds, *(int(match[1]) + 1 for match in event_files if match)]), _LAST_SECOND)
    name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.{rest:09d}"
    file = (folder / name).open("xb")
    records = RecordWriter(file)
    begun = set[str]()
    waiting = list[tuple[float, Row]]()
    written = time.monotonic()

    def summary(row: Row) -> Summary:
        if row["kind"] == "verdict":
            text = TensorProto(dtype="DT_STRING", string_val=[str(row["text"]).encode()])
            value = Summary.Value(tag="verdict", metadata=create_summary_metadata("verdict", ""), tensor=text)
            return Summary(value=[value])
        # A curve begins where it is first anything but 0: every value is bytes that Python adds up (CRC).
        begun.update(name for name, value in row.items() if value != 0)
        scalars = [
            Summary.Value(tag=tag(str(row["kind"]), name), simple_value=value)
            for name, value in row.items()
            if name in begun and name not in ("step", "epoch") and isinstance(value, float | int)
        ]
        return Summary(
            value=[*scalars, *(picture(name, png) for name, png in pictures_of(row, folder.parent))]
        )

    def picture(name: str, file: Path) -> Summary.Value:
        png = file.read_bytes()
        width, height, kind = int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big"), png[25]
        channels = {0: 1, 2: 3, 6: 4}[kind]  # gray, RGB, RGBA
        shown = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=png)
        return Summary.Value(tag=tag("hook", name), image=shown)

    def write_waiting() -> None:
        nonlocal written
        rows, waiting[:] = waiting[:], []
        for at, row in rows:
            event = Event(wall_time=at, step=row["step"], summary=summary(row))
            records.write(event.SerializeToString())
        file.flush()
        written = time.monotonic()

    def write(row: Row) -> None:
        if row["kind"] == "end":  # a summary, not a curve
            return
        waiting.append((time.time(), row))
        if row["kind"] != "train" or time.monotonic() - written >= _TOGETHER_S:
            write_waiting()

    def close() -> None:
        try:
            write_waiting()
        finally:
            file.close()

    records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
    if step:  # what an earlier attempt wrote of later steps is not shown then
        started = SessionLog(status=SessionLog.START)
        records.write(Event(wall_time=time.time(), step=step + 1, session_log=started).SerializeToString())
    file.flush()
    return write, close
