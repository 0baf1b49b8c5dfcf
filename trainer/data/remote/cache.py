"""A folder with copies of remote shards, for all ranks, workers and jobs of a machine.

DIR/<sha256>.shard          a shard, named by its content: whole and right, or not there
DIR/<sha256>.shard.part     one that is being fetched, by whoever has the lock on it
DIR/<sha256>.index/         the index of a data set, named by the content of its index.json; never evicted
DIR/trainer-cache.lock      held for the moments in which room is made or a shard gets its name

Nothing else in the folder is touched. A shard that is evicted stays readable for whoever has it open.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.config.sizes import size_text
from trainer.data.formats.files import readable
from trainer.data.formats.sharded import COLUMNS, INDEX, About, Shard, ShardedRecords, read_index
from trainer.data.remote.access import DiskError, Sink, WrongContentError, fetch, join
from trainer.data.shared import anonymous_file
from trainer.errors import BadInputError
from trainer.host import files as disk, strict_json
from trainer.observe.console import warn

_OURS = re.compile(r"[0-9a-f]{64}\.shard(\.part)?")
_LOCK = "trainer-cache.lock"
_PATIENCE = 0.05
# A hundred million samples have some 10 GB of columns.
_MOST_COLUMNS = 16 << 30


class Cached:
    """Shards below a URL, copied once; see `sharded.Place`.

    Args:
        url: Folder of the shards.
        folder: The cache, which exists.
        limit: Bytes that all shards in it may take, those of other data sets too; None: as many as there are.
    """

    def __init__(self, url: str, folder: Path, limit: int | None) -> None:
        self.url, self.folder, self.limit = url, folder, limit

    def open(self, shard: Shard) -> int:
        """See `Place.open`.

        Raises:
            BadInputError: If the shard can't be had, is another than the index says, or can't be stored.
        """

        def make(file: int) -> None:
            self._reserve(shard, file)
            self._download(shard, file)

        with _told(self.folder):
            path, wanted = self.folder / f"{shard.sha256}.shard", _Wanted(shard.bytes, shard.sha256)
            return _made_once(path, wanted, make, self.folder / _LOCK)

    def __str__(self) -> str:
        return self.url

    def _download(self, shard: Shard, file: int) -> None:
        url = join(self.url, shard.name)
        for _ in range(2):
            sink = Sink(file, shard.bytes)
            with contextlib.suppress(WrongContentError):
                fetch(url, sink)
                if sink.sha256() == shard.sha256:
                    return
        raise BadInputError(
            f"{url}: isn't what its index says (SHA-256, fetched twice); put the right file there, or make "
            "the index again"
        )

    def _reserve(self, shard: Shard, file: int) -> None:
        """Gives a file the size that it will have, once there is room for it."""
        if self.limit is not None and shard.bytes > self.limit:
            raise BadInputError(
                f"data.cache_limit={size_text(self.limit)}: {join(self.url, shard.name)} alone has "
                f"{size_text(shard.bytes)}; raise it"
            )
        os.ftruncate(file, 0)  # what a killed process left
        while True:
            with disk.locked(self.folder / _LOCK):
                if self.limit is None or _evict(self.folder, self.limit - shard.bytes):
                    os.ftruncate(file, shard.bytes)
                    return
            # The rest is being fetched by others; then it may go.
            time.sleep(_PATIENCE)


class _Entry(NamedTuple):
    used: int
    bytes: int
    path: Path


def _evict(folder: Path, room: int) -> bool:
    """Removes the shards that were not used for longest until the rest fits; False if it doesn't."""
    entries = list[_Entry]()
    with os.scandir(folder) as listed:
        for file in listed:
            if _OURS.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # fetched or removed meanwhile
                    facts = file.stat(follow_symlinks=False)
                    entries.append(_Entry(facts.st_mtime_ns, facts.st_size, Path(file.path)))
    total = sum(entry.bytes for entry in entries)
    # What a killed process left goes first; but never what is being fetched.
    for entry in sorted(entries, key=lambda entry: (entry.path.suffix != ".part", entry.used)):
        if total <= room:
            break
        if entry.bytes and _removed(entry.path):
            total -= entry.bytes
    return total <= room


def _removed(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        if path.suffix != ".part":
            path.unlink()
            return True
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):  # else it was finished or replaced meanwhile
                path.unlink()
        except BlockingIOError:
            return False
        finally:
            os.close(file)
    return True


class _Wanted(NamedTuple):
    """Requirements on a file in the cache: its bytes, and their SHA-256; None: unknown."""

    bytes: int | None = None
    sha256: str | None = None


def _made_once(path: Path, wanted: _Wanted, make: Callable[[int], None], lock: Path) -> int:
    """Descriptor of a file that is made by one process, whoever comes first; the others wait for it.

    One that is there is hashed: others may have written to it, or the disk is failing. The lock is on the
    unfinished file itself and ends with the process that holds it.
    """
    part = path.with_name(path.name + ".part")
    while (file := _opened(path, wanted)) is None:
        file = disk.open_own(part, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file, part):  # else it was finished or removed while this waited
                if (made := _opened(path, wanted, tell=True)) is None:
                    _finish(file, part, path, make, lock)
                    return file
                part.unlink()
                os.close(file)
                return made
        except BaseException:
            os.close(file)
            raise
        os.close(file)
    return file


def _finish(file: int, part: Path, path: Path, make: Callable[[int], None], lock: Path) -> None:
    try:
        make(file)
        os.fsync(file)
        _touch(file)
        with disk.locked(lock):  # else who makes room might list it twice or not at all
            part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    fcntl.flock(file, fcntl.LOCK_UN)


def _opened(path: Path, wanted: _Wanted, tell: bool = False) -> int | None:
    """A file that is there, is what it should be, and is marked as used now; says what is wrong with one."""
    try:
        # O_NONBLOCK: a FIFO that somebody put there must not hold up the start.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        odd = _oddity(file, wanted)
        if odd and tell:
            warn(f"data.cache: {readable(os.fsencode(path))} {odd}: it is fetched again")
        if not odd:
            with contextlib.suppress(OSError):  # somebody else's, or a read-only folder
                _touch(file)
            return file
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None


def _oddity(file: int, wanted: _Wanted) -> str:
    """Says why an open file doesn't fit; empty if it does."""
    facts = os.fstat(file)
    if not stat.S_ISREG(facts.st_mode):
        return "isn't a regular file"
    if wanted.bytes is not None and facts.st_size != wanted.bytes:
        return f"has {facts.st_size:,} bytes and not {wanted.bytes:,}"
    if wanted.sha256 is not None:
        try:
            found = disk.read_hashed(file, facts.st_size, None, lambda _: None)
        except ValueError as error:
            return str(error)
        if found != wanted.sha256:
            return "was changed (its SHA-256 isn't what the index says)"
    return ""


def _touch(file: int) -> None:
    now = time.time_ns()  # finer than the kernel's own clock for this
    os.utime(file, ns=(now, now))


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Says what is wrong with the folder where a system error would be shown."""
    try:
        yield
    except (OSError, DiskError) as error:
        found = error.__cause__ if isinstance(error, DiskError) else error
        assert isinstance(found, OSError)
        where = f"data.cache={readable(os.fsencode(folder))}"
        if found.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BadInputError(
                f"{where}: the disk is full ({found.strerror}); free some, or set a lower data.cache_limit"
            ) from error
        raise BadInputError(
            f"{where}: can't be used ({found.strerror or found}); give another folder"
        ) from error


class CachedShards(ShardedRecords):
    """Shards behind a cache; `shards_per_block` of them are shuffled together, or all (0)."""

    shards_per_block = 0

    def _file(self, number: int) -> int:
        if number not in self._files:
            # What was evicted takes up the disk as long as it is open.
            for gone in [other for other, file in self._files.items() if not os.fstat(file).st_nlink]:
                os.close(self._files.pop(gone))
        return super()._file(number)

    def check_order(self) -> None:
        """Makes sure that the samples of a shard have consecutive numbers.

        Raises:
            BadInputError: If they don't.
        """
        if bool((np.diff(self._columns["shard"]) < 0).any()):
            raise BadInputError(
                f"{self._place}: its samples are numbered across its shards, so data.cache_limit must hold "
                f"all of them ({size_text(_total([self.about]))}); raise it, or make the pack or index again"
            )


def open_cached(url: str, folder: Path, limit: int | None) -> CachedShards:
    """Opens shards or a pack behind a URL.

    Args:
        url: Folder that holds the index.
        folder: The cache; made if it isn't there.
        limit: See `Cached`.

    Raises:
        BadInputError: If it isn't one, can't be had or can't be stored.
    """
    with _told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for last in (False, True):  # once more where it is damaged, or was replaced between its two files
            index = _index(url, folder)
            try:
                about, columns = read_index(index)
                break
            except BadInputError as error:
                disk.remove(index)
                if last:
                    raise BadInputError(f"{url}: {error}") from error
                warn(f"data.cache: {error}: it is fetched again")
    return CachedShards(about, columns, Cached(url, folder, limit))


def _index(url: str, folder: Path) -> Path:
    """The folder with the two files of an index, each fetched if it isn't there."""
    about = _bytes_of(join(url, INDEX))
    digest = hashlib.sha256(about).hexdigest()
    index = disk.own_folder(folder / f"{digest}.index")

    def columns(file: int) -> None:
        os.ftruncate(file, _fetched(join(url, COLUMNS), file, _MOST_COLUMNS))

    wanted = _Wanted(len(about), digest)
    os.close(_made_once(index / INDEX, wanted, lambda file: _write(file, about), folder / _LOCK))
    os.close(_made_once(index / COLUMNS, _Wanted(), columns, folder / _LOCK))
    return index


def _bytes_of(url: str) -> bytes:
    file = anonymous_file()
    try:
        return disk.read_at(file, 0, _fetched(url, file, strict_json.LARGEST))
    finally:
        os.close(file)


def _fetched(url: str, file: int, most: int) -> int:
    """Fetches what nobody has said the size of; returns that."""
    sink = Sink(file, most=most)
    try:
        fetch(url, sink)
    except WrongContentError as error:
        raise BadInputError(
            f"{url}: more than {size_text(most)} came, which no index has; check the address and the server"
        ) from error
    return sink.done


def _write(file: int, data: bytes) -> None:
    Sink(file).write(data)
    os.ftruncate(file, len(data))


def fitting_shards_per_block(limit: int | None, parts: Sequence[CachedShards]) -> int:
    """Returns how many shards are shuffled together so that two such blocks fit: workers overlap.

    Args:
        limit: Bytes that all shards may take, or None.
        parts: The parts of a data set, which share the cache.

    Returns:
        A number of shards, or 0 where all parts fit.

    Raises:
        BadInputError: If not even two shards fit, or the samples don't lie in the order of the shards.
    """
    if limit is None or _total([part.about for part in parts]) <= limit:
        return 0
    largest = max(shard.bytes for part in parts for shard in part.about.shards)
    if 2 * largest > limit:
        raise BadInputError(
            f"data.cache_limit={size_text(limit)} is too low: at least two shards must fit, and the largest "
            f"has {size_text(largest)}; set {size_text(2 * largest)} or more"
        )
    for part in parts:
        part.check_order()
    return limit // (2 * largest)


def _total(abouts: Sequence[About]) -> int:
    return sum(shard.bytes for about in abouts for shard in about.shards)
