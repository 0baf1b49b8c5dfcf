"""Cache folder of remote shards, for all ranks, loader workers and jobs of a machine.

DIR/<sha256>.shard          a complete shard, named by its content
DIR/<sha256>.shard.part     a shard that is being fetched by the process that holds its lock
DIR/<sha256>.index/         the index of a data set, named by the content of its index.json; never evicted
DIR/trainer-cache.lock      held while shards are evicted or renamed

No other file of the folder is touched. An evicted shard stays readable for processes that have it open.
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
from trainer.data.remote.access import DiskError, DownloadSink, WrongContentError, fetch, join
from trainer.data.shared import anonymous_file
from trainer.errors import BadInputError
from trainer.host import files as disk, strict_json
from trainer.observe.console import warn

_OURS = re.compile(r"[0-9a-f]{64}\.shard(\.part)?")
_LOCK = "trainer-cache.lock"
_PATIENCE = 0.05
AGAIN = (0.5, 2.0)  # seconds before an index that isn't JSON is fetched again
# A hundred million samples have some 10 GB of columns.
_MOST_COLUMNS = 16 << 30


class Cached:
    """Shards below a URL, downloaded once; a `sharded.ShardStore`.

    Args:
        url: Folder of the shards.
        folder: Cache folder, which exists.
        limit: Bytes of all shards in the folder, including other data sets'; None: unlimited.
    """

    def __init__(self, url: str, folder: Path, limit: int | None) -> None:
        self.url, self.folder, self.limit = url, folder, limit

    def open(self, shard: Shard) -> int:
        """Returns the descriptor of a shard, downloading it if necessary.

        Raises:
            BadInputError: If the shard can't be downloaded or stored, or isn't what the index says.
        """

        def make(file: int) -> None:
            self._reserve(shard, file)
            self._download(shard, file)

        with _bad_input(self.folder):
            path, wanted = self.folder / f"{shard.sha256}.shard", _Wanted(shard.bytes, shard.sha256)
            return _made_once(path, wanted, make, self.folder / _LOCK)

    def __str__(self) -> str:
        return self.url

    def _download(self, shard: Shard, file: int) -> None:
        url = join(self.url, shard.name)
        for _ in range(2):
            sink = DownloadSink(file, shard.bytes)
            with contextlib.suppress(WrongContentError):
                fetch(url, sink)
                if sink.sha256() == shard.sha256:
                    return
        raise BadInputError(
            f"{url}: isn't what its index says (SHA-256, fetched twice); put the right file there, or make "
            "the index again"
        )

    def _reserve(self, shard: Shard, file: int) -> None:
        """Evicts shards until there is room, then sets the file to its final size."""
        if self.limit is not None and shard.bytes > self.limit:
            raise BadInputError(
                f"data.cache_limit={size_text(self.limit)}: {join(self.url, shard.name)} alone has "
                f"{size_text(shard.bytes)}; raise it"
            )
        os.ftruncate(file, 0)  # from a killed process
        while True:
            with disk.locked(self.folder / _LOCK):
                if self.limit is None or _evict(self.folder, self.limit - shard.bytes):
                    os.ftruncate(file, shard.bytes)
                    return
            # The other shards are being fetched; once complete, they may be evicted.
            time.sleep(_PATIENCE)


class _Entry(NamedTuple):
    used: int
    bytes: int
    path: Path


def _evict(folder: Path, room: int) -> bool:
    """Removes the least recently used shards until the rest fits; returns False if it doesn't fit."""
    entries = list[_Entry]()
    with os.scandir(folder) as files:
        for file in files:
            if _OURS.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # fetched or removed meanwhile
                    facts = file.stat(follow_symlinks=False)
                    entries.append(_Entry(facts.st_mtime_ns, facts.st_size, Path(file.path)))
    total = sum(entry.bytes for entry in entries)
    # Leftovers of killed processes first; never a shard that is being fetched.
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
    """Expected size and SHA-256 of a file in the cache; None: unknown."""

    bytes: int | None = None
    sha256: str | None = None


def _made_once(path: Path, wanted: _Wanted, make: Callable[[int], None], lock: Path) -> int:
    """Returns the descriptor of a file that the first process makes and others wait for.

    An existing file is hashed: it may have been changed, or the disk may be failing. The lock is on the
    unfinished file itself and ends with the process that holds it.
    """
    part = path.with_name(path.name + ".part")
    while (file := _opened(path, wanted)) is None:
        file = disk.open_own(part, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file, part):  # else it was finished or removed while this waited
                if (made := _opened(path, wanted, warns=True)) is None:
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
        with disk.locked(lock):  # else a concurrent eviction might list it twice or not at all
            part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    fcntl.flock(file, fcntl.LOCK_UN)


def _opened(path: Path, wanted: _Wanted, warns: bool = False) -> int | None:
    """Opens an intact file and marks it as used now; returns None if it is missing or damaged."""
    try:
        # O_NONBLOCK: opening a FIFO must not block.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        odd = _oddity(file, wanted)
        if odd and warns:
            warn(f"data.cache: {readable(os.fsencode(path))} {odd}: it is fetched again")
        if not odd:
            with contextlib.suppress(OSError):  # another user's file, or a read-only folder
                _touch(file)
            return file
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None


def _oddity(file: int, wanted: _Wanted) -> str:
    """Returns how an open file differs from what is expected; "" if it doesn't."""
    facts = os.fstat(file)
    if not stat.S_ISREG(facts.st_mode):
        return "isn't a regular file"
    if wanted.bytes is not None and facts.st_size != wanted.bytes:
        return f"has {facts.st_size:,} bytes and not {wanted.bytes:,}"
    if wanted.sha256 is not None:
        try:
            digest = disk.read_hashed(file, facts.st_size, None, lambda _: None)
        except ValueError as error:
            return str(error)
        if digest != wanted.sha256:
            return "was changed (its SHA-256 isn't what the index says)"
    return ""


def _touch(file: int) -> None:
    now = time.time_ns()  # finer than the kernel's clock for file times
    os.utime(file, ns=(now, now))


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _bad_input(folder: Path) -> Iterator[None]:
    """Raises BadInputError with one line on the cache folder instead of a system error."""
    try:
        yield
    except (OSError, DiskError) as error:
        cause = error.__cause__ if isinstance(error, DiskError) else error
        assert isinstance(cause, OSError)
        where = f"data.cache={readable(os.fsencode(folder))}"
        if cause.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BadInputError(
                f"{where}: the disk is full ({cause.strerror}); free some, or set a lower data.cache_limit"
            ) from error
        raise BadInputError(
            f"{where}: can't be used ({cause.strerror or cause}); give another folder"
        ) from error


class CachedShards(ShardedRecords):
    """Shards behind a cache; `shards_per_block` of them form a shuffle block (0: all)."""

    shards_per_block = 0

    def _file(self, number: int) -> int:
        if number not in self._files:
            # An evicted shard occupies the disk as long as it is open.
            for gone in [other for other, file in self._files.items() if not os.fstat(file).st_nlink]:
                os.close(self._files.pop(gone))
        return super()._file(number)

    def check_order(self) -> None:
        """Checks that the samples of a shard have consecutive numbers.

        Raises:
            BadInputError: If they don't.
        """
        if bool((np.diff(self._columns["shard"]) < 0).any()):
            raise BadInputError(
                f"{self._store}: its samples are numbered across its shards, so data.cache_limit must hold "
                f"all of them ({size_text(_total([self.about]))}); raise it, or make the pack or index again"
            )


def open_cached(url: str, folder: Path, limit: int | None) -> CachedShards:
    """Opens shards or a pack behind a URL.

    Args:
        url: Folder that holds the index.
        folder: Cache folder; created if it doesn't exist.
        limit: See `Cached`.

    Raises:
        BadInputError: If there is no valid index, or it can't be downloaded or stored.
    """
    with _bad_input(folder):
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
    """Returns the cached folder of an index's two files, after downloading those that are missing."""
    about = _json_of(join(url, INDEX))
    digest = hashlib.sha256(about).hexdigest()
    index = disk.own_folder(folder / f"{digest}.index")

    def columns(file: int) -> None:
        os.ftruncate(file, _fetched(join(url, COLUMNS), file, _MOST_COLUMNS))

    wanted = _Wanted(len(about), digest)
    os.close(_made_once(index / INDEX, wanted, lambda file: _write(file, about), folder / _LOCK))
    os.close(_made_once(index / COLUMNS, _Wanted(), columns, folder / _LOCK))
    return index


def _json_of(url: str) -> bytes:
    """Downloads a JSON file, again where it is cut off: a server that gives no length doesn't tell."""
    for wait in (*AGAIN, None):
        data = _bytes_of(url)
        try:
            strict_json.parse(data)
            break
        except ValueError as error:
            if wait is None:
                raise BadInputError(
                    f"{url}: what came isn't JSON ({error}), each time; put the whole index there, or make "
                    "it again"
                ) from error
        time.sleep(wait)
    return data


def _bytes_of(url: str) -> bytes:
    file = anonymous_file()
    try:
        return disk.read_at(file, 0, _fetched(url, file, strict_json.LARGEST))
    finally:
        os.close(file)


def _fetched(url: str, file: int, most: int) -> int:
    """Downloads a file of unknown size, at most `most` bytes; returns its size."""
    sink = DownloadSink(file, most=most)
    try:
        fetch(url, sink)
    except WrongContentError as error:
        raise BadInputError(
            f"{url}: more than {size_text(most)} came, which no index has; check the address and the server"
        ) from error
    return sink.done


def _write(file: int, data: bytes) -> None:
    DownloadSink(file).write(data)
    os.ftruncate(file, len(data))


def fitting_shards_per_block(limit: int | None, parts: Sequence[CachedShards]) -> int:
    """Returns the shards per shuffle block such that two blocks fit into the cache limit (workers overlap).

    Args:
        limit: Bytes of all shards in the cache, or None.
        parts: Splits of a data set, which share the cache.

    Returns:
        A number of shards; 0 if all splits fit.

    Raises:
        BadInputError: If two shards don't fit, or the samples aren't in the order of the shards.
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
