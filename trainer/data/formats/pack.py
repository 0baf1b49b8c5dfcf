"""Packs: shards of samples that were shrunk and encoded again once, so that each epoch decodes less.

Samples keep their numbers, so a pack is read in the same order as its source. A shard is written by one
process. A pack that is interrupted has no index, and is made anew by the next call.
"""

import contextlib
import fcntl
import io
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from trainer.data.corrupt import Corrupt
from trainer.data.formats.index import Index, content_hash
from trainer.data.formats.records import Records
from trainer.data.formats.sharded import INDEX, About, Shard, about_of, write_index
from trainer.data.shared import name_columns
from trainer.errors import BadInputError
from trainer.host import files as disk

Advance = Callable[[int], object]
T = TypeVar("T")

UNFINISHED = ".unfinished"
_LONGEST_JPEG = 65_500  # pixels per side


@dataclass(frozen=True)
class PackSettings:
    """Form in which samples are stored.

    Attributes:
        short_side: Short side in pixels that larger images are shrunk to; None: no image is shrunk.
        quality: JPEG quality of shrunk images, 1 to 95.
        raw: True to store pixels instead of JPEG.
    """

    short_side: int | None = None
    quality: int = 90
    raw: bool = False

    @property
    def decodes(self) -> bool:
        """True if images are decoded."""
        return self.short_side is not None or self.raw


class Packed(NamedTuple):
    """A finished pack.

    Attributes:
        about: Content of index.json.
        unreadable: int64 (n,), samples that can't be decoded and are stored unchanged.
    """

    about: About
    unreadable: npt.NDArray[np.int64]


class _PackedShard(NamedTuple):
    """A shard and its samples' rows of the index."""

    shard: Shard
    columns: dict[str, npt.NDArray[Any]]


class _Stored(NamedTuple):
    data: bytes | bytearray
    height: int = 0
    width: int = 0
    unreadable: bool = False


def pack(
    records: Records,
    target: Path,
    settings: PackSettings,
    processes: int = 1,
    advance: Advance = lambda _: None,
) -> Packed:
    """Makes a pack.

    Args:
        records: Samples to pack.
        target: Folder that doesn't exist, is empty, or holds what is left of a pack that was interrupted.
        settings: Form in which samples are stored.
        processes: Number of processes; it doesn't change the result.
        advance: Called with the number of samples of each finished shard.

    Returns:
        The pack. Samples that can't be decoded are stored unchanged, and are corrupt in training as before.

    Raises:
        BadInputError: If the target isn't empty, or the source can't be read.
        OSError: If the target can't be written.
    """
    if records.raw:
        raise BadInputError("the source holds pixels already: pack from the images that it was made from")
    with _begun(target):
        # At least 16 shards for parallel work, at most 256, which stay open.
        size = max(64, min(2048, -(-len(records) // 16)), -(-len(records) // 256))
        ranges = [range(at, min(at + size, len(records))) for at in range(0, len(records), size)]
        imports = [__name__, *(["trainer.data.formats.decode"] if settings.decodes else [])]
        work = partial(_pack_shard, records, target, settings)
        made = _work_off(work, ranges, processes, advance, imports)
        columns = {name: np.concatenate([part.columns[name] for part in made]) for name in made[0].columns}
        unreadable = np.flatnonzero(columns.pop("unreadable"))
        columns |= name_columns([records.file_name(sample) for sample in range(len(records))])
        shards = {"shards": [part.shard.model_dump() for part in made]}
        index = Index(columns, records.classes, records.left_out, shards)
        stored: Literal["files", "pixels"] = "pixels" if settings.raw else "files"
        reading = {"upright": records.upright}
        about = about_of(index, stored, records.fingerprint(), **vars(settings), reading=reading)
        return Packed(write_index(target, index, about), unreadable)


@contextlib.contextmanager
def _begun(target: Path) -> Iterator[None]:
    """Context manager in which a pack is made; a file marks and locks the folder until it is whole."""
    mark = target / UNFINISHED
    if (target / INDEX).exists():
        raise BadInputError(f"{target}: there is a pack already; remove it, or choose another folder")
    if target.exists() and any(target.iterdir()) and not mark.exists():
        raise BadInputError(f"{target}: isn't empty; choose another folder")
    target.mkdir(parents=True, exist_ok=True)
    with mark.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadInputError(f"{target}: another process is packing into it; wait for it") from error
        for left in target.glob("*.bin"):  # of a pack that was interrupted
            disk.remove(left)
        yield
        disk.remove(mark)


def _work_off(
    work: Callable[[int, range], T],
    shards: Sequence[range],
    processes: int,
    advance: Advance,
    imports: Sequence[str] = (),
) -> list[T]:
    """Calls `work` with number and samples of each shard, and `advance` with the samples of finished ones.

    Returns:
        The results, in the order of the shards.
    """
    made = list[T]()
    if processes < 2:
        for number, samples in enumerate(shards):
            made.append(work(number, samples))
            advance(len(samples))
        return made
    context, others = multiprocessing.get_context("forkserver"), {*multiprocessing.active_children()}
    if imports:  # once, in the fork server: torch and torchvision take 5 s per process
        context.set_forkserver_preload(list(imports))
    try:
        with ProcessPoolExecutor(min(processes, len(shards)), context, _begin, (work,)) as pool:
            try:
                under_way = {pool.submit(_call, n, samples): len(samples) for n, samples in enumerate(shards)}
                for done in as_completed(under_way):
                    done.result()
                    advance(under_way[done])
            except BaseException:  # otherwise the pool first finishes its shards, even after a signal
                for process in {*multiprocessing.active_children()} - others:
                    process.terminate()
                raise
    except BrokenProcessPool as error:
        raise BadInputError(
            "a process of the pool was killed (out of memory?); start again, maybe with a smaller --processes"
        ) from error
    return [future.result() for future in under_way]


_work = list[Callable[[int, range], Any]]()  # of this process of the pool


def _begin(work: Callable[[int, range], Any]) -> None:
    # Given at the start, as descriptors of shared memory then come with it. With a task each process would
    # fetch them from a thread of the parent, which prints a traceback where the process ends meanwhile.
    _work[:] = [work]
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends this one


def _call(number: int, samples: range) -> Any:
    return _work[0](number, samples)


def _pack_shard(
    records: Records, target: Path, settings: PackSettings, number: int, samples: range
) -> _PackedShard:
    """Writes a shard."""
    rows = list[tuple[int, int, int, int, bool]]()
    name = f"{number:05d}.bin"
    digest = disk.write_file(target / name, _stored_one_by_one(records, settings, samples, rows))
    sizes, hashes, heights, widths, unreadable = zip(*rows, strict=True)
    columns = {
        "shard": np.full(len(rows), number, np.int32),
        "offset": np.cumsum(sizes, dtype=np.int64) - np.array(sizes, np.int64),
        "bytes": np.array(sizes, np.int64),
        "label": records.labels[samples.start : samples.stop].copy(),
        "hash": np.array(hashes, np.uint64),
        "unreadable": np.array(unreadable, np.bool_),
    }
    if settings.raw:
        columns |= {"height": np.array(heights, np.int32), "width": np.array(widths, np.int32)}
    return _PackedShard(Shard(name=name, bytes=sum(sizes), sha256=digest), columns)


def _stored_one_by_one(
    records: Records,
    settings: PackSettings,
    samples: Iterable[int],
    rows: list[tuple[int, int, int, int, bool]],
) -> Iterator[bytes]:
    """Yields the content of a shard; appends a row of each sample's facts to `rows`."""
    for sample in samples:
        try:
            data = records.read(sample)
        except Corrupt as error:  # its label may not be its own
            raise BadInputError(f"{records.name(sample)}: {error}") from error
        stored = _stored(data, settings, records.upright)
        rows.append((len(stored.data), content_hash(stored.data), *stored[1:]))
        yield bytes(stored.data)


def _stored(data: bytearray, settings: PackSettings, upright: bool) -> _Stored:
    if not settings.decodes:
        return _Stored(data)
    from trainer.data.formats import decode  # torchvision takes 3 s to import

    try:
        image = decode.decode_whole(data, upright)
    except Corrupt:
        return _Stored(data, unreadable=True)
    height, width = image.shape[2:]
    short = min(height, width)
    if settings.short_side is not None and short > settings.short_side:
        height, width = (round(edge * settings.short_side / short) for edge in (height, width))
        image = decode.resize(image, height, width)
    elif not settings.raw:
        return _Stored(data)  # small enough: encoding again would lose quality
    if not settings.raw and max(height, width) > _LONGEST_JPEG:
        return _Stored(data)
    pixels = image[0].permute(1, 2, 0).contiguous().numpy()
    if settings.raw:
        return _Stored(pixels.tobytes(), height, width)
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=settings.quality)
    return _Stored(buffer.getvalue())
