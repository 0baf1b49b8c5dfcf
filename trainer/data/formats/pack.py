"""Packs: shards of samples that were shrunk and encoded again once, so that each epoch decodes less.

Samples keep their numbers, so a pack is read in the same order as its source. A shard is written by one
process and kept if packing is interrupted; the next call continues.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trainer.checkpoint.tensor_file import safetensors_bytes
from trainer.data.corrupt import Corrupt
from trainer.data.formats.files import size_of
from trainer.data.formats.index import Index, content_hash
from trainer.data.formats.records import Reading, Records
from trainer.data.formats.sharded import INDEX, About, Shard, about_of, write_index
from trainer.data.shared import Columns, name_columns
from trainer.errors import BadInputError
from trainer.host import files as disk

Advance = Callable[[int], object]

UNFINISHED = ".unfinished"
_LARGEST_PART = 1 << 30  # bytes
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
    """Makes a pack, or continues an unfinished one.

    Args:
        records: Samples to pack.
        target: Folder that doesn't exist, is empty, or holds an unfinished pack of the same samples.
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
    work = _prepared(target, records, settings)
    with _locked(work):
        packed = _packed(records, target, settings, processes, advance)
        disk.remove(work)
    return packed


def _packed(
    records: Records, target: Path, settings: PackSettings, processes: int, advance: Advance
) -> Packed:
    size = samples_per_shard(len(records))
    ranges = [range(at, min(at + size, len(records))) for at in range(0, len(records), size)]
    imports = [__name__, *(["trainer.data.formats.decode"] if settings.decodes else [])]
    _work_off(partial(_pack_shard, records, target, settings), ranges, processes, advance, imports)
    shards, columns = [], list[dict[str, npt.NDArray[Any]]]()
    for number in range(len(ranges)):
        shard, part = _finished(target, number)
        shards.append(shard)
        columns.append(part)
    merged = {name: np.concatenate([part[name] for part in columns]) for name in columns[0]}
    unreadable = np.flatnonzero(merged.pop("unreadable"))
    merged |= name_columns([records.file_name(sample) for sample in range(len(records))])
    index = Index(merged, records.classes, records.left_out, {"shards": shards})
    stored: Literal["files", "pixels"] = "pixels" if settings.raw else "files"
    about = about_of(index, stored, records.fingerprint(), **_settings(records, settings))
    return Packed(write_index(target, index, about), unreadable)


def samples_per_shard(samples: int) -> int:
    """Returns the samples per shard: at least 16 shards for parallel work, at most 256 that stay open."""
    return max(64, min(2048, -(-samples // 16)), -(-samples // 256))


def _prepared(target: Path, records: Records, settings: PackSettings) -> Path:
    """Creates the work folder of a pack, or checks the one of an unfinished pack."""
    if (target / INDEX).exists():
        raise BadInputError(f"{target}: there is a pack already; remove it, or choose another folder")
    work = target / UNFINISHED
    plan = json.dumps({"source": records.fingerprint(), "settings": _settings(records, settings)}).encode()
    if not work.exists():
        if target.exists() and any(target.iterdir()):
            raise BadInputError(f"{target}: isn't empty; choose another folder")
        target.mkdir(parents=True, exist_ok=True)
        disk.make_folder(work)
    try:
        earlier = (work / "plan.json").read_bytes()
    except FileNotFoundError:
        with disk.written_whole(work / "plan.json") as beside:
            beside.write_bytes(plan)
        return work
    if earlier != plan:
        raise BadInputError(
            f"{target}: holds an unfinished pack of other data or settings; remove it, or "
            "choose another folder"
        )
    return work


@contextlib.contextmanager
def _locked(work: Path) -> Iterator[None]:
    """Locks the pack; the lock ends with the process."""
    file = os.open(work / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise BadInputError(f"{work.parent}: another process is packing into it; wait for it") from error
    finally:
        os.close(file)


def _work_off(
    work: Callable[[int, range], object],
    shards: Sequence[range],
    processes: int,
    advance: Advance,
    imports: Sequence[str] = (),
) -> None:
    """Calls `work` with number and samples of each shard, and `advance` with the samples of finished ones."""
    if processes < 2:
        for number, samples in enumerate(shards):
            work(number, samples)
            advance(len(samples))
        return
    context, others = multiprocessing.get_context("forkserver"), {*multiprocessing.active_children()}
    if imports:  # once, in the fork server: torch and torchvision take 5 s per process
        context.set_forkserver_preload(list(imports))
    try:
        with ProcessPoolExecutor(min(processes, len(shards)), context, _begin) as pool:
            try:
                under_way = {pool.submit(work, n, samples): len(samples) for n, samples in enumerate(shards)}
                for done in as_completed(under_way):
                    done.result()
                    advance(under_way[done])
            except BaseException:  # otherwise the pool first finishes its shards, even after a signal
                for process in {*multiprocessing.active_children()} - others:
                    process.terminate()
                raise
    except BrokenProcessPool as error:
        raise BadInputError(
            "a process of the pool was killed (out of memory?); the same command resumes, with a smaller "
            "--processes perhaps"
        ) from error


def _begin() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends this one


def _pack_shard(records: Records, target: Path, settings: PackSettings, number: int, samples: range) -> None:
    """Writes a shard and its part of the index, unless they exist and are whole."""
    if _part(target, number) is not None:
        return
    part = target / UNFINISHED / f"{number:05d}.tmp"
    name = f"{number:05d}.bin"
    for left in (target / name, part):
        disk.remove(left)
    rows = list[tuple[int, int, int, int, bool]]()
    digest = disk.write_file(target / name, _stored_one_by_one(records, settings, samples, rows))
    sizes, hashes, heights, widths, unreadable = zip(*rows, strict=True)
    columns = {
        "shard": np.full(len(rows), number, np.int32),
        "offset": np.cumsum(sizes, dtype=np.int64) - np.array(sizes, np.int64),
        "bytes": np.array(sizes, np.int64),
        "label": records.labels[samples.start : samples.stop].copy(),
        "hash": np.array(hashes, np.uint64),
        "sha256": np.frombuffer(bytearray.fromhex(digest), np.uint8),
        "unreadable": np.array(unreadable, np.uint8),
    }
    if settings.raw:
        columns |= {"height": np.array(heights, np.int32), "width": np.array(widths, np.int32)}
    parts = safetensors_bytes({name: torch.from_numpy(array) for name, array in columns.items()})
    digest = disk.write_file(part, parts)
    disk.sync_folder(target)
    disk.rename(part, part.with_name(f"{number:05d}-{digest}.safetensors"))
    disk.sync_folder(part.parent)


def _part(target: Path, number: int) -> Columns | None:
    """Returns a finished shard's part of the index; None if there is none, or it or the shard is damaged.

    A damaged part hasn't the hash in its name, a shard that was cut not the bytes in its part.
    """
    for file in (target / UNFINISHED).glob(f"{number:05d}-*.safetensors"):
        data = disk.read_inside(file, _LARGEST_PART)
        if file.name == f"{number:05d}-{hashlib.sha256(data).hexdigest()}.safetensors":
            columns = Columns.copy(data)
            if size_of(target / f"{number:05d}.bin") == int(columns["bytes"].sum()):
                return columns
        disk.remove(file)
    return None


def _finished(target: Path, number: int) -> tuple[Shard, dict[str, npt.NDArray[Any]]]:
    columns = _part(target, number)
    if columns is None:
        raise BadInputError(f"{target}: shard {number} changed while it was packed; the same command resumes")
    wanted = ("shard", "offset", "bytes", "label", "hash", "height", "width", "unreadable")
    arrays = {name: columns[name] for name in wanted if name in columns}
    shard = Shard(
        name=f"{number:05d}.bin",
        bytes=int(arrays["bytes"].sum()),
        sha256=columns["sha256"].tobytes().hex(),
    )
    return shard, arrays


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
        stored = _stored(data, settings, records.reading)
        rows.append((len(stored.data), content_hash(stored.data), *stored[1:]))
        yield bytes(stored.data)


def _settings(records: Records, settings: PackSettings) -> dict[str, Any]:
    """Returns the settings for the index, including those for reading pixels."""
    return {**vars(settings), "reading": records.reading._asdict()}


def _stored(data: bytearray, settings: PackSettings, reading: Reading) -> _Stored:
    if not settings.decodes:
        return _Stored(data)
    from trainer.data.formats import decode  # torchvision takes 3 s to import

    try:
        image = decode.decode_whole(data, reading)
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
