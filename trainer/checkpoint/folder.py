"""Format of a checkpoint: a folder of safetensors, JSON and a hash manifest.

    step-00001200/{model,optimizer,ema}.safetensors  state.json  SHA256SUMS

In a sharded run each rank writes its rows: `model_00001_of_00004.safetensors` and so on, counted from 0. The
first rank's files also hold unsharded tensors; `state.json` has the whole shapes of the sharded ones.

`sha256sum -c SHA256SUMS` checks it without this package.
"""

import contextlib
import errno
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from trainer.checkpoint import tensor_file
from trainer.host import files, strict_json

_FORMAT = 2
_SUMS = "SHA256SUMS"
_STATE = "state.json"
_SUFFIX = ".safetensors"
_TENSORS = re.compile(r"[a-z][a-z0-9_]{0,31}")
_SUM_LINE = re.compile(r"([0-9a-f]{64})  ([a-z][a-z0-9_]{0,31}\.(?:safetensors|json))")
_SUMS_BYTES = 4 << 20
_MOST_RANKS = 10_000  # that share a model

# While a step is written again, there are two folders of it for a moment.
_FOLDER = re.compile(r"step-([0-9]{8,18})(?:\.([1-9][0-9]{0,8}))?")

Contents = Mapping[str, Iterable[files.Buffer]]
Shapes = Mapping[str, Mapping[str, Sequence[int]]]  # by kind ("model") and name, of tensors that are sharded


class Damaged(Exception):  # noqa: N818  (a finding about a file, not a mistake of the caller)
    """A damaged checkpoint; the message has the file and the reason."""


class Unreadable(Exception):  # noqa: N818  (as above)
    """A checkpoint that can't be read now, for a reason in the message; it may be intact."""


class Checkpoint(NamedTuple):
    """Contents of a checkpoint.

    Attributes:
        step: Step of the run.
        path: Folder.
        tensors: Tensors by file and name, contiguous on the CPU; those of a file share one block of memory.
            From `look_up` they are `Stored`.
        state: State in JSON.
    """

    step: int
    path: Path
    tensors: dict[str, dict[str, torch.Tensor]]
    state: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Stored:
    """Tensor of a checkpoint on the disk; a slice, or [...], reads only these rows.

    Attributes:
        path: Folder of the checkpoint.
        dtype: Dtype.
        shape: Whole shape.
        parts: Files with its rows, in order: name, first byte, number of rows.
    """

    path: Path
    dtype: torch.dtype
    shape: torch.Size
    parts: tuple[tuple[str, int, int], ...]

    layout: ClassVar = torch.strided

    def __len__(self) -> int:
        """Returns the number of rows."""
        return self.shape[0]

    def numel(self) -> int:
        """Returns the number of elements."""
        return self.shape.numel()

    def __getitem__(self, rows: Any) -> torch.Tensor:
        """Reads rows.

        Raises:
            Damaged: If a file has changed.
            Unreadable: If it can't be read now.
        """
        count = len(self) if self.shape else 1
        start, stop, _ = (slice(None) if rows is ... else rows).indices(count)
        each = self.numel() // max(count, 1) * self.dtype.itemsize
        data = torch.empty(max(stop - start, 0) * each, dtype=torch.uint8)
        before = filled = 0
        for name, offset, rows_in_file in self.parts:
            first, last = max(start - before, 0), min(stop - before, rows_in_file)
            before += rows_in_file
            if first < last and each:
                with _opened(self.path, name) as (file, _):
                    into = tensor_file.bytes_view(data)[filled : filled + (last - first) * each]
                    files.read_into(file, offset + first * each, into)
                    filled += len(into)
        shape = (stop - start, *self.shape[1:]) if self.shape else ()
        return data.view(self.dtype).view(shape)


def folder_name(step: int) -> str:
    """Name of the folder of a step."""
    return f"step-{step:08d}"


def parse_name(name: str) -> tuple[int, int] | None:
    """Step of a folder, and its number among the folders of that step; None for any other name."""
    match = _FOLDER.fullmatch(name)
    if match is None or name.split(".", maxsplit=1)[0] != folder_name(int(match[1])):
        return None
    return int(match[1]), int(match[2] or 0)


def quietly(_: int) -> None:
    """Ignores progress."""


def contents(
    step: int, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: Mapping[str, Any]
) -> Contents:
    """Returns the files of a checkpoint, for one `commit`; the state is copied now, tensors are read later.

    Raises:
        ValueError: If they can't be saved exactly.
    """
    if not 0 <= step < 10**18:
        raise ValueError(f"{step} is no step")
    if wrong := [name for name in tensors if not _TENSORS.fullmatch(name)]:
        raise ValueError(f"'{wrong[0]}' can't name a file: small letters, digits and _, 32 at most")
    about = {"format": _FORMAT, "step": step, "tensors": sorted(tensors), "state": dict(state)}
    return {
        **{name + _SUFFIX: tensor_file.safetensors_bytes(tensors[name]) for name in sorted(tensors)},
        _STATE: [strict_json.dump(about)],
    }


def shard_contents(
    tensors: Mapping[str, Mapping[str, torch.Tensor]], shapes: Shapes, rank: int, ranks: int
) -> Contents:
    """Returns a rank's files of a sharded checkpoint.

    Args:
        tensors: Tensors by kind and name; of those in `shapes` this rank's rows.
        shapes: Whole shapes of the sharded tensors.
        rank: Rank among those that share the model; the first also writes unsharded tensors.
        ranks: Number of these ranks.
    """
    return {
        _shard_name(kind, rank, ranks) + _SUFFIX: tensor_file.safetensors_bytes(
            {name: one for name, one in group.items() if not rank or name in shapes.get(kind, {})}
        )
        for kind, group in sorted(tensors.items())
    }


def shared_contents(
    step: int, kinds: Iterable[str], shapes: Shapes, ranks: int, state: Mapping[str, Any]
) -> Contents:
    """Returns the files of a sharded checkpoint that are written once; the state is copied now."""
    listed = {kind: {name: list(shape) for name, shape in group.items()} for kind, group in shapes.items()}
    shards = {"ranks": ranks, "shapes": listed}
    about = {"format": _FORMAT, "step": step, "tensors": sorted(kinds), "state": dict(state)}
    return {_STATE: [strict_json.dump({**about, "shards": shards})]}


def _shard_name(kind: str, rank: int, ranks: int) -> str:
    return f"{kind}_{rank:05d}_of_{ranks:05d}"


def write_part(path: Path, contents: Contents) -> dict[str, str]:
    """Writes and syncs some files of a checkpoint; returns their SHA-256 by name.

    Raises:
        OSError: If they can't be written.
    """
    hashes = {name: files.write_file(path / name, parts) for name, parts in contents.items()}
    files.sync_folder(path)
    return hashes


def write_files(path: Path, contents: Contents, before: Mapping[str, str] | None = None) -> None:
    """Writes and syncs files, and finally the hashes of all files.

    Args:
        path: Folder, new and empty except for the files of `before`.
        contents: Contents by file name.
        before: SHA-256 of files that exist already.

    Raises:
        OSError: If they can't be written.
    """
    hashes = {name: files.write_file(path / name, parts) for name, parts in contents.items()}
    sums = [f"{digest}  {name}\n" for name, digest in {**(before or {}), **hashes}.items()]
    files.write_file(path / _SUMS, ["".join(sums).encode()])
    files.sync_folder(path)


def read(path: Path) -> Checkpoint:
    """Reads and verifies a checkpoint.

    Raises:
        Damaged: If a hash differs, or a file is missing or malformed.
        Unreadable: If the disk fails, or permissions are missing.
    """
    return _read(path, keep=True, advance=quietly)


def read_state(path: Path) -> dict[str, Any]:
    """Reads the JSON state of a checkpoint alone.

    Raises:
        Damaged: If it is damaged.
        Unreadable: If it can't be read now.
    """
    state: dict[str, Any] = _about_of(path)["state"]
    return state


def _about_of(path: Path) -> dict[str, Any]:
    with _reason("the folder"), files.opened_folder(path) as folder:
        return _read_about(folder, _read_sums(folder).get(_STATE, ""), quietly)


def read_slots(path: Path, name: str) -> list[tensor_file.Slot]:
    """Returns the slots of a checkpoint's tensors of one kind, from the headers alone.

    Sharded tensors have their whole shape, and the position of the first rank's rows.

    Raises:
        Damaged: If a file is missing or malformed.
        Unreadable: If it can't be read now.
    """
    shards = _about_of(path).get("shards")
    if shards is None:
        return _slots_of(path, name + _SUFFIX)
    shapes = shards["shapes"].get(name, {})
    slots = _slots_of(path, _shard_name(name, 0, shards["ranks"]) + _SUFFIX)
    return [slot._replace(shape=shapes.get(slot.name, slot.shape)) for slot in slots]


def _slots_of(path: Path, name: str) -> list[tensor_file.Slot]:
    """Returns the slots of one file, with byte positions from its start."""
    with _opened(path, name) as (file, size):
        start = 8 + tensor_file.header_size(files.read_at(file, 0, 8), size)
        slots = tensor_file.parse_header(files.read_at(file, 0, start)[8:], size - start)
    return [slot._replace(start=slot.start + start, stop=slot.stop + start) for slot in slots]


def odd_weights(file: Path) -> str | None:
    """Returns the reason why a file of weights can't be read, from its type and header; else None."""
    file = files.real_inside(file)
    try:
        _slots_of(file.parent.resolve(), file.name)
    except (Damaged, Unreadable) as error:
        return str(error)
    return None


def stored_in(path: Path, name: str) -> dict[str, Stored]:
    """Returns the tensors of a safetensors file in a folder, unread.

    Raises:
        Damaged: If it is missing or malformed.
        Unreadable: If it can't be read now.
    """
    return {
        slot.name: Stored(
            path,
            slot.dtype,
            torch.Size(slot.shape),
            ((name, slot.start, slot.shape[0] if slot.shape else 1),),
        )
        for slot in _slots_of(path, name)
    }


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """Reads a file of weights, whose path may have bytes that aren't UTF-8, unlike in safetensors' reader.

    Raises:
        Damaged, Unreadable: As `stored_in`.
    """
    file = files.real_inside(file)
    return {name: one[...] for name, one in stored_in(file.parent.resolve(), file.name).items()}


def look_up(path: Path, share: tuple[int, int] = (0, 1)) -> Checkpoint:
    """Opens a checkpoint with `Stored` tensors, whose rows are read when they are needed.

    Args:
        path: Folder of the checkpoint.
        share: Number of this reader, and the number of readers that verify the checkpoint together. Each
            verifies every n-th file; the checkpoint is intact if no reader finds damage.

    Raises:
        Damaged: If this reader found damage.
        Unreadable: If it can't be read now.
    """
    found = _read(path, keep=False, advance=quietly, share=share)
    about = _about_of(path)
    shards, tensors = about.get("shards"), dict[str, dict[str, Any]]()
    for kind in about["tensors"]:
        if shards is None:
            tensors[kind] = {**stored_in(path, kind + _SUFFIX)}
            continue
        names = [_shard_name(kind, rank, shards["ranks"]) + _SUFFIX for rank in range(shards["ranks"])]
        held = {name: stored_in(path, name) for name in names}
        tensors[kind] = {**_put_together(kind, held, shards["shapes"].get(kind, {}), _spread)}
    return found._replace(tensors=tensors)


_Piece = TypeVar("_Piece", torch.Tensor, Stored)


def _put_together(
    kind: str,
    held: Mapping[str, dict[str, _Piece]],
    shapes: Mapping[str, Sequence[int]],
    join: Callable[[list[_Piece], Sequence[int]], _Piece],
) -> dict[str, _Piece]:
    """Concatenates the rows in the ranks' files; each slice is freed once it is used.

    Args:
        kind: Kind of tensors, such as "model".
        held: Tensors of each file, by file and name.
        shapes: Whole shapes of the sharded tensors; the others are in the first file alone.
        join: Makes a tensor of this shape from its pieces.

    Raises:
        Damaged: If the pieces don't add up to the whole.
    """
    first, *others = held.values()
    whole = {}
    for name, one in list(first.items()):
        if (shape := shapes.get(name)) is None:
            whole[name] = one
            continue
        pieces = []
        for file, group in held.items():
            piece = group.pop(name, None)
            alike = piece is not None and piece.shape and piece.shape[1:] == torch.Size(shape[1:])
            if piece is None or not alike or piece.dtype != one.dtype:
                raise Damaged(f"{file} has no rows of '{name}'")
            pieces.append(piece)
        if sum(piece.shape[0] for piece in pieces) != shape[0]:
            raise Damaged(f"{kind}: the ranks' rows of '{name}' aren't {shape[0]} together")
        whole[name] = join(pieces, shape)
    if odd := [name for group in others for name in group] + [name for name in shapes if name not in whole]:
        raise Damaged(f"{kind}: '{odd[0]}' isn't in all files that {_STATE} says")
    return whole


def _spread(pieces: list[Stored], shape: Sequence[int]) -> Stored:
    parts = tuple(part for piece in pieces for part in piece.parts)
    return replace(pieces[0], shape=torch.Size(shape), parts=parts)


def sums_hash(path: Path) -> str:
    """Returns the SHA-256 of a checkpoint's list of hashes, hexadecimal, as its identity.

    Raises:
        Damaged: If there is no list.
        Unreadable: If it can't be read now.
    """
    with _opened(path, _SUMS) as (file, size):
        return hashlib.sha256(files.read_at(file, 0, min(size, _SUMS_BYTES))).hexdigest()


@contextlib.contextmanager
def _opened(path: Path, name: str) -> Iterator[tuple[int, int]]:
    """Opens a file of a checkpoint; yields its descriptor and size."""
    with (
        _reason("the folder"),
        files.opened_folder(path) as folder,
        _reason(name),
        files.opened_file(folder, name) as opened,
    ):
        yield opened


def verify_checkpoint(path: Path, advance: Callable[[int], object] = quietly) -> None:
    """Verifies a checkpoint as `read` does, without keeping the tensors in memory.

    Args:
        path: Folder of the checkpoint.
        advance: Called with numbers of bytes read, from several threads.

    Raises:
        Damaged: If the checkpoint is damaged.
        Unreadable: If it can't be read now.
    """
    _read(path, keep=False, advance=advance)


def _read(
    path: Path, keep: bool, advance: Callable[[int], object], share: tuple[int, int] = (0, 1)
) -> Checkpoint:
    with _reason("the folder"), files.opened_folder(path) as folder:
        sums = _read_sums(folder)
        about = _read_about(folder, sums.get(_STATE, ""), advance)
        kinds, shards = about["tensors"], about.get("shards")
        names = kinds
        if shards is not None:
            ranks = shards["ranks"]
            names = [_shard_name(kind, rank, ranks) for kind in kinds for rank in range(ranks)]
        if set(sums) != {_STATE, *(f"{name}{_SUFFIX}" for name in names)}:
            raise Damaged(f"{_SUMS} doesn't list the files that {_STATE} does")
        if (named := parse_name(path.name)) and named[0] != about["step"]:
            raise Damaged(f"{_STATE} is of step {about['step']}")
        one = partial(_read_tensors, folder, sums, keep=keep, advance=advance)
        names = names[share[0] :: share[1]]
        with ThreadPoolExecutor(4) as pool:  # hashing dominates, and releases the GIL
            tensors = dict(zip(names, pool.map(one, names), strict=True))
    if shards is not None and keep:
        for kind in kinds:
            files_of = [_shard_name(kind, rank, ranks) for rank in range(ranks)]
            held = {f"{name}{_SUFFIX}": tensors.pop(name) for name in files_of}
            shapes = shards["shapes"].get(kind, {})
            tensors[kind] = _put_together(kind, held, shapes, lambda pieces, _: torch.cat(pieces))
    return Checkpoint(about["step"], path, tensors, about["state"])


def _are_shards(shards: Any, kinds: Sequence[str]) -> bool:
    """True if this is a valid description of a checkpoint's shards."""
    return (
        isinstance(shards, dict)
        and set(shards) == {"ranks", "shapes"}
        and type(shards["ranks"]) is int
        and 0 < shards["ranks"] <= _MOST_RANKS
        and isinstance(shards["shapes"], dict)
        and set(shards["shapes"]) <= set(kinds)
        and all(isinstance(group, dict) for group in shards["shapes"].values())
        and all(
            isinstance(shape, list) and shape and all(type(size) is int and size >= 0 for size in shape)
            for group in shards["shapes"].values()
            for shape in group.values()
        )
    )


@contextlib.contextmanager
def _reason(name: str) -> Iterator[None]:
    """A context that turns errors of reading a file into `Damaged` or `Unreadable`."""
    try:
        yield
    except FileNotFoundError as error:
        raise Damaged(f"{name} is missing") from error
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            raise Damaged(f"{name}: {error.strerror}") from error
        raise Unreadable(f"{name} can't be read now ({error.strerror})") from error
    except ValueError as error:
        raise Damaged(f"{name}: {error}") from error


def _read_sums(folder: int) -> dict[str, str]:
    """Reads the SHA-256 of the files, by name."""
    with _reason(_SUMS), files.opened_file(folder, _SUMS) as (file, size):
        if size > _SUMS_BYTES:
            raise ValueError(f"larger than {_SUMS_BYTES >> 10} KiB")
        text = files.read_at(file, 0, size).decode("ascii", "replace")
        lines = [_SUM_LINE.fullmatch(line) for line in text.removesuffix("\n").split("\n")]
        sums = {line[2]: line[1] for line in lines if line}
        if not text.endswith("\n") or len(sums) < len(lines):
            raise ValueError("a line isn't a hash and the name of a file here, or stands there twice")
    return sums


def _read_about(folder: int, wanted: str, advance: Callable[[int], object]) -> dict[str, Any]:
    """Reads and checks state.json: the step, the names of the tensor files, the state."""
    with _reason(_STATE), files.opened_file(folder, _STATE) as (file, size):
        if size > strict_json.LARGEST:
            raise ValueError(f"larger than {strict_json.LARGEST >> 20} MiB")
        data = bytearray(size)
        _same(files.read_hashed(file, size, memoryview(data), advance), wanted)
        about = strict_json.parse(bytes(data))
        if not isinstance(about, dict) or about.get("format") != _FORMAT:
            raise ValueError(f"isn't a checkpoint of format {_FORMAT}")
        step, names, state = about.get("step"), about.get("tensors"), about.get("state")
        if not (
            set(about) - {"shards"} == {"format", "step", "tensors", "state"}
            and type(step) is int
            and isinstance(names, list)
            and all(isinstance(name, str) and _TENSORS.fullmatch(name) for name in names)
            and len(set(names)) == len(names)
            and isinstance(state, dict)
            and ("shards" not in about or _are_shards(about["shards"], names))
        ):
            raise ValueError("isn't the state of a checkpoint")
    return about


def _read_tensors(
    folder: int, sums: Mapping[str, str], name: str, keep: bool, advance: Callable[[int], object]
) -> dict[str, torch.Tensor]:
    """Reads and verifies a file; returns its tensors, {} if they aren't kept."""
    name += _SUFFIX
    with _reason(name), files.opened_file(folder, name) as (file, size):
        start = 8 + tensor_file.header_size(files.read_at(file, 0, 8), size)
        head = files.read_at(file, 0, start)
        slots = tensor_file.parse_header(head[8:], size - start)
        data = torch.empty(size if keep else 0, dtype=torch.uint8)
        into = tensor_file.bytes_view(data) if keep else None
        _same(files.read_hashed(file, size, into, advance), sums[name])
        if into is not None and into[:start] != head:
            raise ValueError("changed while it was read")
        return tensor_file.tensors_in(data[start:], slots) if keep else {}


def _same(digest: str, wanted: str) -> None:
    if digest != wanted:
        raise ValueError(f"its hash isn't the one in {_SUMS}")


def problem(path: Path, advance: Callable[[int], object] = quietly) -> str | None:
    """Returns the reason why a checkpoint is damaged or unreadable; None if it is intact."""
    try:
        verify_checkpoint(path, advance)
    except (Damaged, Unreadable) as damage:
        return str(damage)
    return None
