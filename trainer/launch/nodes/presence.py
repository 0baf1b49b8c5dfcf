"""Presence of the launchers: a file of each in the run folder, RUN/nodes/NODE-ID, with a new ID per start.

A launcher replaces its file when its message changes, and touches the file every second: any change shows
that it is alive. Hosts' clocks differ, so file times are never compared with a clock; the reader counts
silence in successful reads, so that nobody seems dead while a file server hangs. One daemon thread does all
file access, so that signals and the grace period don't wait for such a server. Anyone who can write to the
folder may train there, so files aren't signed; other files are ignored.
"""

import errno
import json
import os
import re
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import asdict, field
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from trainer.host.files import names, open_inside, own_folder, remove_unfinished, write_whole
from trainer.launch.exit_record import ExitRecord
from trainer.observe.text import plain

BEAT_SECONDS = 1.0
PRESENCE_POLL_SECONDS = 0.5
# So long a launcher may be silent until its node is taken to be gone; and until another may take its place.
SILENT_SECONDS, ALIVE_SECONDS = 30.0, 5.0
_CLOSE_SECONDS = 5.0
_NAME = re.compile(r"(0|[1-9]\d{0,5})-([0-9a-f]{16})")
_MOST_FILES, _MOST_BYTES = 1 << 14, 4 << 20
# The file server's trouble and this process's; any other error is of the file.
_PASSING = {errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOMEM}

_Word = Annotated[str, BeforeValidator(lambda said: " ".join(plain(said, 100).split()))]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Said:
    """Message of a launcher.

    Attributes:
        name: Name of its host.
        ranks: Number of ranks that it starts.
        same: Values that must be the same on every node, by name.
        leader: ID of the node 0 that it follows.
        address: Address of its host, as seen from node 0.
        ended: Last round whose ranks have ended on this node; 0 before the first.
        records: Exit records of that round, with times since its start.
        leaving: Whether this launcher was asked to stop.
        round: On node 0, the current round.
        members: On node 0, ID and number of ranks of each node in it, in order.
        stop: On node 0, the round whose ranks must stop with a checkpoint.
        over: On node 0, the round that is lost, whose ranks need no longer wait.
        verdict: On node 0, the round that has ended with another to follow; `text` says why.
        end: On node 0, the exit code of all launchers once no round follows; `text` says why.
        refused: On node 0, IDs of launchers that can't be part of the job, and why.
    """

    name: _Word
    ranks: Annotated[int, Field(ge=1, le=1 << 16)]
    same: dict[_Word, _Word]
    leader: str = ""
    address: _Word = ""
    ended: int = 0
    records: tuple[ExitRecord, ...] = ()
    leaving: bool = False
    round: int = 0
    members: tuple[tuple[str, int], ...] = ()
    stop: int = 0
    over: int = 0
    verdict: int = 0
    end: int | None = None
    text: str = ""
    refused: dict[str, str] = field(default_factory=dict)


_SAID = TypeAdapter(Said)


class Seen(NamedTuple):
    """Another launcher's file.

    Attributes:
        node: Number of its node, from its name.
        id: ID of the launcher's start.
        said: Its message.
        sign: File metadata that change with each beat.
        age: Seconds since it was first seen.
        silent: Seconds since it last changed.
    """

    node: int
    id: str
    said: Said
    sign: tuple[int, ...]
    age: float = 0.0
    silent: float = 0.0

    @property
    def beats(self) -> bool:
        """Returns True if it changed lately, after it was first seen: a killed launcher leaves its file."""
        return self.silent < min(self.age, SILENT_SECONDS)


class Presence:
    """This launcher's file, and the others' as it reads them.

    Attributes:
        id: ID of this start.
        seen: The others' files, by name; replaced as a whole.
        looks: Number of successful reads of the folder.
        unwritten: Error of the last write of this launcher's file, or "".
    """

    def __init__(self, folder: Path, node: int) -> None:
        """Starts the thread; the run folder needn't exist yet."""
        self.folder, self.node, self.id = folder, node, secrets.token_hex(8)
        self.seen: dict[str, Seen] = {}
        self.looks, self.unwritten, self._keep = 0, "", True
        self._said: Said | None = None
        self._written: Said | None = None
        self._beat = self._looked = time.monotonic()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def blind(self) -> str:
        """Returns the error if the folder couldn't be read for so long that others may be gone, else ""."""
        seconds = time.monotonic() - self._looked
        return f"{self.folder} can't be read since {seconds:.0f} s" if seconds > SILENT_SECONDS else ""

    @property
    def stands(self) -> bool:
        """Returns True if this launcher's file exists."""
        return self._written is not None

    def say(self, said: Said) -> None:
        """Replaces this launcher's message; the thread writes it."""
        self._said = said
        self._wake.set()

    def close(self, keep: bool) -> None:
        """Writes a pending message, and removes the file unless `keep`; waits some seconds."""
        self._keep = keep
        self._closing.set()
        self._wake.set()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(PRESENCE_POLL_SECONDS)
            self._wake.clear()
            self.turn()
        if not self._keep and self._said is not None:
            with suppress(OSError):
                self._file.unlink()

    @property
    def _file(self) -> Path:
        return self.folder / f"{self.node}-{self.id}"

    def turn(self) -> None:
        """Writes and reads once."""
        try:
            self._write()
            self.unwritten = ""
        except OSError as error:  # who can't write is silent, too
            self.unwritten = f"{self.folder} can't be written ({error.strerror})"
        with suppress(OSError):
            self._look()

    def _write(self) -> None:
        said, now = self._said, time.monotonic()
        if said is None:
            return
        if said is self._written and now - self._beat < BEAT_SECONDS:
            return
        if said is self._written:
            with suppress(FileNotFoundError):
                os.utime(self._file, follow_symlinks=False)
                self._beat = now
                return
        if not self.stands and self.node == 0:  # what earlier starts left, and starts that were killed
            for name in filter(_NAME.fullmatch, names(own_folder(self.folder))):
                with suppress(OSError):
                    (self.folder / name).unlink()
            remove_unfinished(self.folder)
        own_folder(self.folder)
        write_whole(self._file, json.dumps(asdict(said)))
        self._written, self._beat = said, now

    def _look(self) -> None:
        now = time.monotonic()
        since = min(now - self._looked, 2 * PRESENCE_POLL_SECONDS)
        matches = (_NAME.fullmatch(name) for name in names(self.folder))
        listed = {found[0] for found in islice(filter(None, matches), _MOST_FILES)}
        seen = {}
        for name in sorted({*listed, *self.seen}):  # a listing may lack what is being replaced
            number, _, id_ = name.partition("-")
            if id_ != self.id and (self.node == 0 or number == "0"):
                seen[name] = _seen(self.folder / name, int(number), id_, self.seen.get(name), since)
        self.seen = {name: one for name, one in seen.items() if one}
        self._looked = now
        self.looks += 1


def _seen(path: Path, node: int, id_: str, before: Seen | None, since: float) -> Seen | None:
    """Returns a file's current state; None if it is no launcher's.

    Raises:
        OSError: If the file server fails.
    """
    waited = before and before._replace(age=before.age + since, silent=before.silent + since)
    try:
        with os.fdopen(open_inside(path), "rb") as file:
            facts = os.fstat(file.fileno())
            data = file.read(_MOST_BYTES + 1)
        said = _SAID.validate_json(data)
    except ValidationError:
        return waited
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in _PASSING:
            raise
        return waited
    sign = (facts.st_ino, facts.st_mtime_ns, facts.st_size)
    if waited is None:
        return Seen(node, id_, said, sign)
    return (
        waited._replace(said=said)
        if sign == waited.sign
        else waited._replace(said=said, sign=sign, silent=0.0)
    )
