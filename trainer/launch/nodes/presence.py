"""Which launchers are there, by a file of each in the run folder: RUN/nodes/NODE-ID, ID new with each start.

A launcher replaces its file when what it says changes, and sets the file's time every second: any change
shows that it lives. Clocks of hosts differ, so no time is read, and silence is counted by the reader, in
looks that succeeded: a file server that hangs makes nobody look dead. One daemon thread does all that
touches files, so that signals and the grace don't wait for such a server. Who can write to the folder may
train there, so files aren't signed; what isn't a launcher's file is passed over.
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
POLL_SECONDS = 0.5
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
    """What a launcher says.

    Attributes:
        name: Of its host.
        ranks: That it starts.
        same: What must be the same on every node, by name.
        leader: The ID of the node 0 that it goes by.
        address: Of its host, as seen from there.
        ended: The round whose ranks have ended here, 0 before the first;
        records: how they ended, with times since the round's begin;
        leaving: and whether this launcher was asked to stop.
        round: Of node 0: which one it has begun;
        members: the ID and the number of ranks of each node in it, in order;
        stop: the round whose ranks are to stop with a checkpoint;
        over: the round that is lost, whose ranks need no longer wait;
        verdict: the round whose end is known, with another to follow; `text` says why.
        end: The exit code of all launchers, once no round follows; `text` says why.
        refused: IDs of launchers that can't be part of it, and why.
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
        node: Its number, by its name.
        id: Of its start.
        said: What it says.
        sign: Of the file; it changes with each beat.
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
        """Whether it changed while this launcher looked, and not too long ago: a file alone may be left."""
        return self.silent < min(self.age, SILENT_SECONDS)


class Presence:
    """This launcher's file, and what it sees of the others'.

    Attributes:
        id: Of this start.
        seen: The others, by name; replaced as a whole.
        looks: How often the folder was looked at.
        unwritten: Why this launcher's file couldn't be written last; else empty.
    """

    def __init__(self, folder: Path, node: int) -> None:
        """Looks from now on; the run folder needn't be there yet."""
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
        """What is wrong where the folder couldn't be looked at for so long that others may be gone."""
        seconds = time.monotonic() - self._looked
        return f"{self.folder} can't be read since {seconds:.0f} s" if seconds > SILENT_SECONDS else ""

    @property
    def stands(self) -> bool:
        """Whether this launcher's file is there."""
        return self._written is not None

    def say(self, said: Said) -> None:
        """Replaces what this launcher says; its thread writes it."""
        self._said = said
        self._wake.set()

    def close(self, keep: bool) -> None:
        """Writes what is left to say, and removes the file unless it is to be kept; waits some seconds."""
        self._keep = keep
        self._closing.set()
        self._wake.set()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()
            self.turn()
        if not self._keep and self._said is not None:
            with suppress(OSError):
                self._file.unlink()

    @property
    def _file(self) -> Path:
        return self.folder / f"{self.node}-{self.id}"

    def turn(self) -> None:
        """Writes and looks, once."""
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
        since = min(now - self._looked, 2 * POLL_SECONDS)
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
    """What is seen of a file now; None if it is none of a launcher's.

    Raises:
        OSError: If the file server doesn't answer as it should.
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
