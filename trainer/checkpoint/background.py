"""Checkpoints written during training: staged to host memory, then written by a thread."""

import contextlib
import errno
import json
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from trainer.checkpoint import store
from trainer.checkpoint.folder import Shapes, contents, shard_contents, shared_contents
from trainer.host.files import remove
from trainer.host.page_lock import page_lock
from trainer.observe.phases import heartbeat

_Tensors = Mapping[str, Mapping[str, torch.Tensor]]
_PAUSE_S = 0.02
_ALIGNMENT = 64


def make_room(tensors: _Tensors) -> torch.Tensor:
    """Page-locked memory for one copy of those tensors that are on a GPU, uint8 (bytes,).

    Made at the start of a run: page-locking takes about as long as copying, and what a slow disk still
    writes from is not to be there a second time.

    Args:
        tensors: By file and by name.
    """
    size = sum(_room_of(one) for group in tensors.values() for one in group.values() if _on_gpu(one))
    room = torch.empty(size, dtype=torch.uint8)
    if not size:
        return room
    cudart = torch.cuda.cudart()
    if page_lock(cudart, str(torch.version.cuda), room.data_ptr(), size):
        # Before the memory is given back; at the end of the process all of it is.
        weakref.finalize(room, cudart.cudaHostUnregister, room.data_ptr()).atexit = False
    return room


def stage(tensors: _Tensors, room: torch.Tensor | None = None) -> dict[str, dict[str, torch.Tensor]]:
    """Copies tensors to host memory, so that training may change them; waits until they are there.

    Args:
        tensors: By file and by name; all keep their memory format.
        room: From `make_room`, for those on a GPU: what was staged in it before is overwritten. What finds
            no more room there is copied to memory that isn't page-locked.
    """
    free, staged = room, dict[str, dict[str, torch.Tensor]]()
    for file, group in tensors.items():
        staged[file] = {}
        for name, tensor in group.items():
            one = tensor.detach()
            if free is None or not _on_gpu(one) or len(free) < _room_of(one):
                staged[file][name] = torch.empty_like(one, device="cpu").copy_(one)
                continue
            place = free[: one.numel() * one.element_size()].view(one.dtype)
            place = place.as_strided(one.shape, torch.empty_like(one, device="meta").stride())
            staged[file][name] = place.copy_(one, non_blocking=True)
            free = free[_room_of(one) :]
    for device in {one.device for group in tensors.values() for one in group.values() if _on_gpu(one)}:
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(device))
        copied.synchronize()
    return staged


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _room_of(tensor: torch.Tensor) -> int:
    """Bytes, up to where the next tensor's numbers are aligned, whatever their type."""
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


class Exchange(Protocol):
    """Messages between the writing threads of ranks that share a model, on their progress.

    Attributes:
        rank: This rank's number among them.
        ranks: How many they are.
    """

    rank: int
    ranks: int

    def tell(self, topic: str, word: str) -> None:
        """Publishes a message on a topic to all ranks."""
        ...

    def told(self, topic: str) -> list[str] | None:
        """Returns the message of each rank on a topic; None until all have sent one."""
        ...


class RankPart(NamedTuple):
    """This rank's part of a checkpoint that all ranks write together.

    Attributes:
        exchange: With the others.
        token: A number that is the same on all ranks, and no other write's.
        shapes: Of the whole tensors, by kind and name, of those that are sharded.
        seconds: How long the first rank waits for the others, after its own part.
    """

    exchange: Exchange
    token: int
    shapes: Shapes
    seconds: float


class BackgroundWriter:
    """Writes checkpoints in a thread, one at a time, and removes old ones.

    A write that fails doesn't end the training: it is reported, and the next one tries again.

    Attributes:
        folder: Of the checkpoints.
        written: The last step that was written, None before the first; of a sharded run on the first rank.
    """

    def __init__(
        self, folder: Path, keep_last: int, on_problem: Callable[[str], None], good: int | None = None
    ) -> None:
        """Starts nothing yet.

        Args:
            folder: Of the checkpoints; its parent must exist.
            keep_last: Number of good checkpoints to keep, in addition to the best.
            on_problem: Takes a line for people; called on the writing thread.
            good: A step that was read already and found good.
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
        """Starts writing a checkpoint and returns, once the one before is done.

        Args:
            step: Its step.
            tensors: From `stage`; must not be changed any more.
            state: What JSON keeps; taken as it is now.
            best: The step to keep whatever its age.
            part: Of a checkpoint that all ranks write together; None: this one writes it alone.

        Returns:
            Seconds of waiting for the one before.

        Raises:
            ValueError: If the contents can't be read back as they are: a mistake in the caller.
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
            The last step that was written: the one submitted last, unless its write failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.written

    def newest(self) -> int | None:
        """Returns the step from which the next attempt would resume, by what is on the disk now.

        Waits for the write under way. None if there is none, or the folder can't be read.
        """
        try:
            return store.newest_step(self.folder, self._known_good, self.finish())
        except OSError:
            return None

    def abandon(self) -> None:
        """Stops the current write without waiting, for a process that must end now.

        Nothing half-written can be taken for a checkpoint; one that was all but done may still appear, whole.
        """
        self._abandoned.set()

    def _is_abandoned(self) -> bool:
        heartbeat()  # it is asked for each tensor: a disk that is slow does not hang
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
            """Returns whether this rank has made a checkpoint of the parts: the first one does."""
            try:
                beside = store.begin_shared(self.folder, name)
                hashes = store.commit_part(beside, files, self._is_abandoned)
                exchange.tell(name, json.dumps(hashes))
            except Exception as error:
                if not self._abandoned.is_set():
                    exchange.tell(name, json.dumps(_why(error)))
                if exchange.rank:  # the first one says it
                    return False
                raise
            if exchange.rank:
                return False
            try:
                everyones = self._of_all(name, part)
                store.commit_shared(beside, step, shared, everyones, self._is_abandoned)
            except Exception:
                with contextlib.suppress(OSError):
                    remove(beside)
                raise
            return True

        return commit

    def _of_all(self, name: str, part: RankPart) -> dict[str, str]:
        """The hashes of all ranks' files, once they are on the disk."""
        end, hashes = time.monotonic() + part.seconds, dict[str, str]()
        while (words := part.exchange.told(name)) is None:
            if self._is_abandoned():
                raise store.Abandoned
            if time.monotonic() > end:
                raise OSError(errno.ETIMEDOUT, f"not all ranks wrote their part within {part.seconds:.0f} s")
            time.sleep(_PAUSE_S)
        for rank, word in enumerate(words):
            told = json.loads(word)
            if isinstance(told, str):
                raise OSError(errno.EIO, f"rank {rank}: {told}")
            hashes |= told
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
