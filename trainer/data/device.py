"""Copies of batches to the GPU on a side stream, one batch ahead of the computation."""

import functools
from collections import deque
from collections.abc import Iterator
from typing import TypeVar

import torch

from trainer.observe.phases import PHASE_TIMER, enter_phase

_Count = TypeVar("_Count")

_BATCHES_AHEAD = 4


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the device's one stream for copies: the caching allocator reuses memory per stream."""
    return torch.cuda.Stream(device)


def copied_ahead(
    slots: Iterator[tuple[torch.Tensor, _Count]], device: torch.device, staged: bool
) -> Iterator[tuple[torch.Tensor, _Count]]:
    """Copies slots to a CUDA device while the previous batch is being computed.

    Before the next slot is requested, the copy of the second last one has completed, so that its slot may be
    overwritten (`RingLoader` has two spare slots for this). That copy began two batches ago, so the wait is
    nearly always over at once.

    Args:
        slots: uint8 host tensors (slot_bytes,), each with the items of its batch.
        device: A CUDA device.
        staged: True if the slots aren't page-locked: they are copied through two page-locked buffers.

    Yields:
        The slot on the device, safe to use on the current stream, and its items.
    """
    side = _side_stream(device)
    under_way: deque[torch.cuda.Event] = deque()
    in_use: deque[torch.cuda.Event] = deque()
    buffers: list[torch.Tensor] = []
    ready: tuple[torch.Tensor, _Count, torch.cuda.Event] | None = None
    while True:
        while len(under_way) > 1:
            under_way.popleft().synchronize()
        source = next(slots, None)
        ahead = None
        if source is not None:
            slot, num_items = source
            if staged:
                buffers.append(
                    buffers.pop(0) if len(buffers) > 1 else torch.empty_like(slot, pin_memory=True)
                )
                slot = buffers[-1].copy_(slot)
            with torch.cuda.stream(side):
                copy = slot.to(device, non_blocking=True)
                done = torch.cuda.Event()
                done.record(side)
            under_way.append(done)
            ahead = (copy, num_items, done)
        if ready is not None:
            copy, num_items, done = ready
            current = torch.cuda.current_stream(device)
            if PHASE_TIMER.phase == "data":  # and not in an evaluation
                enter_phase("copy")
            current.wait_event(done)
            copy.record_stream(current)
            yield copy, num_items
            used = torch.cuda.Event()
            used.record(current)
            in_use.append(used)
            # Bounds how far the host runs ahead: each batch holds its memory until it is computed.
            if len(in_use) > _BATCHES_AHEAD:
                in_use.popleft().synchronize()
        if ahead is None:
            return
        ready = ahead
