"""Checkpoints written during training: staged to host memory, then written by a thread."""

import contextlib
import errno
import json
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer.checkpoint import store
from trainer.checkpoint.folder import Shapes, contents, shard_contents, shared_contents
from trainer.distributed.exchange import StoreExchange
from trainer.host.files import remove
from trainer.host.page_lock import page_lock
from trainer.observe.phases import heartbeat

_Tensors = Mapping[str, Mapping[str, torch.Tensor]]
_PAUSE_S = 0.02
_ALIGNMENT = 64


def make_room(tensors: _Tensors) -> torch.Tensor:
    """Allocates page-locked memory for one copy of the tensors on a GPU, uint8 (bytes,).

    It is allocated once, at the start of a run: page-locking takes about as long as copying, and a slow disk
    must not hold a second copy.

    Args:
        tensors: Tensors by file and name.
    """
    size = sum(_room_of(one) for group in tensors.values() for one in group.values() if _on_gpu(one))
    room = torch.empty(size, dtype=torch.uint8)
    if not size:
        return room
    cudart = torch.cuda.cudart()
    if page_lock(cudart, str(torch.version.cuda), room.data_ptr(), size):
        # Before the memory is freed; at the end of the process all of it is.
        weakref.finalize(room, cudart.cudaHostUnregister, room.data_ptr()).atexit = False
    return room


def stage(tensors: _Tensors, room: torch.Tensor | None = None) -> dict[str, dict[str, torch.Tensor]]:
    """Copies tensors to host memory, so that training may change them, and synchronizes.

    Args:
        tensors: Tensors by file and name; all keep their memory format.
        room: From `make_room`, for tensors on a GPU; it is overwritten. Tensors that don't fit are copied to
            pageable memory.
    """
    free, staged = room, dict[str, dict[str, torch.Tensor]]()
    for file, group in tensors.items():
        staged[file] = {}
        for name, tensor in group.items():
            one = tensor.detach()
            if free is None or not _on_gpu(one) or len(free) < _room_of(one):
                staged[file][name] = torch.empty_like(one, device="cpu").copy_(one)
                continue
            flat = free[: one.numel() * one.element_size()].view(one.dtype)
            copy = flat.as_strided(one.shape, torch.empty_like(one, device="meta").stride())
            staged[file][name] = copy.copy_(one, non_blocking=True)
            free = free[_room_of(one) :]
    for device in {one.device for group in tensors.values() for one in group.values() if _on_gpu(one)}:
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(device))
        copied.synchronize()
    return staged


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _room_of(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor, rounded up so that the next one is aligned for any dtype."""
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


class RankPart(NamedTuple):
    """This rank's part of a checkpoint that all ranks write together.

    Attributes:
        exchange: Messages with the writing threads of the other ranks.
        token: Number of this write, equal on all ranks.
        shapes: Whole shapes of the sharded tensors, by kind and name.
        seconds: Seconds that the first rank waits for the others, after its own part.
    """

    exchange: StoreExchange
    token: int
    shapes: Shapes
    seconds: float


class BackgroundWriter:
    """Writes checkpoints in a thread, one at a time, and removes old ones.

    A write that fails doesn't end the training: it is reported, and the next one tries again.

    Attributes:
        folder: Folder of the checkpoints.
        written: Last written step, None before the first; in a sharded run only on the first rank.
    """

    def __init__(
        self, folder: Path, keep_last: int, on_problem: Callable[[str], None], good: int | None = None
    ) -> None:
        """Starts no thread yet.

        Args:
            folder: Folder of the checkpoints; its parent must exist.
            keep_last: Number of intact checkpoints to keep, in addition to the best.
            on_problem: Takes a line for the user; called on the writing thread.
            good: Step of a checkpoint that was verified before.
        """
        self.written: int | None = None
        self.folder = folder
        self._keep_last = keep_last
        self._on_problem = on_problem
        self._known_good = set[int]() if good is None else {good}
        self._abandoned = threading.Event()
        self._thread: threading.Thread | None = None

    def submit(
        self,
        step: int,
        tensors: _Tensors,
        state: Mapping[str, Any],
        best: int | None = None,
        part: RankPart | None = None,
    ) -> float:
        """Starts writing a checkpoint, once the previous write has finished.

        Args:
            step: Step of the checkpoint.
            tensors: From `stage`; must not be changed any more.
            state: State for JSON; copied now.
            best: Step that is kept whatever its age.
            part: This rank's part of a sharded checkpoint; None: this rank writes all of it.

        Returns:
            Seconds of waiting for the previous write.

        Raises:
            ValueError: If the contents can't be saved exactly: a mistake in the caller.
        """
        commit = (
            self._alone(step, tensors, state) if part is None else self._shared(step, tensors, state, part)
        )
        started = time.monotonic()
        self.finish()
        waited = time.monotonic() - started
        # A daemon: a disk that hangs must not keep a process that wants to end.
        self._thread = threading.Thread(
            target=self._write, args=(step, commit, best), name="checkpoint", daemon=True
        )
        self._thread.start()
        return waited

    def finish(self) -> int | None:
        """Waits for the write under way.

        Returns:
            The last written step: the one submitted last, unless its write failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.written

    def newest(self) -> int | None:
        """Returns the step from which the next attempt would resume, from the checkpoints on the disk.

        It waits for the write under way. None if there is no checkpoint, or the folder can't be read.
        """
        try:
            return store.newest_step(self.folder, self._known_good, self.finish())
        except OSError:
            return None

    def abandon(self) -> None:
        """Stops the current write without waiting, for a process that must end now.

        An unfinished write leaves no checkpoint; an almost finished one may still complete.
        """
        self._abandoned.set()

    def _is_abandoned(self) -> bool:
        heartbeat()  # called for each tensor, so that a slow disk doesn't count as a hang
        return self._abandoned.is_set()

    def _alone(self, step: int, tensors: _Tensors, state: Mapping[str, Any]) -> Callable[[], bool]:
        files = contents(step, tensors, state)

        def commit() -> bool:
            store.commit(self.folder, step, files, self._is_abandoned)
            return True

        return commit

    def _shared(
        self, step: int, tensors: _Tensors, state: Mapping[str, Any], part: RankPart
    ) -> Callable[[], bool]:
        exchange, name = part.exchange, store.shared_name(step, part.token)
        files = shard_contents(tensors, part.shapes, exchange.rank, exchange.ranks)
        shared = shared_contents(step, tensors, part.shapes, exchange.ranks, state)

        def commit() -> bool:
            """Returns True on the rank that has completed the checkpoint, the first one."""
            try:
                beside = store.begin_shared(self.folder, name)
                hashes = store.commit_part(beside, files, self._is_abandoned)
                exchange.tell(name, json.dumps(hashes))
            except Exception as error:
                if not self._abandoned.is_set():
                    exchange.tell(name, json.dumps(_why(error)))
                if exchange.rank:  # the first rank reports it
                    return False
                raise
            if exchange.rank:
                return False
            try:
                hashes = self._all_hashes(name, part)
                store.commit_shared(beside, step, shared, hashes, self._is_abandoned)
            except Exception:
                with contextlib.suppress(OSError):
                    remove(beside)
                raise
            return True

        return commit

    def _all_hashes(self, name: str, part: RankPart) -> dict[str, str]:
        """Waits for all ranks; returns the SHA-256 of their files by name."""
        end, hashes = time.monotonic() + part.seconds, dict[str, str]()
        while (words := part.exchange.told(name)) is None:
            if self._is_abandoned():
                raise store.Abandoned
            if time.monotonic() > end:
                raise OSError(errno.ETIMEDOUT, f"not all ranks wrote their part within {part.seconds:.0f} s")
            time.sleep(_PAUSE_S)
        for rank, word in enumerate(words):
            message = json.loads(word)
            if isinstance(message, str):
                raise OSError(errno.EIO, f"rank {rank}: {message}")
            hashes |= message
        return hashes

    def _write(self, step: int, commit: Callable[[], bool], best: int | None) -> None:
        try:
            if not commit():
                return
        except store.Abandoned:
            return
        except Exception as error:
            before = (
                f"the last one is of step {self.written}" if self.written is not None else "there is none"
            )
            self._on_problem(f"the checkpoint of step {step} wasn't written ({_why(error)}); {before}")
            return
        self.written = step
        self._known_good.add(step)
        try:
            removed = store.prune(self.folder, self._keep_last, best, self._known_good)
            self._known_good.difference_update(removed)
        except Exception as error:
            self._on_problem(f"old checkpoints weren't removed ({_why(error)})")


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
