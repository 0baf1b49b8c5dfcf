"""Promise: batches cross to a GPU ahead of the computation, and none is written over or freed too early."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.helpers.cuda_stub import GPU, Cuda, stubbed_cuda
from trainer.data import device
from trainer.data.device import copied_ahead


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    streams: Any = getattr(device, "_side_stream", functools.cache(int))  # one for each device of a process
    with stubbed_cuda() as stub:
        streams.cache_clear()
        yield stub
        streams.cache_clear()


def slots_of(cuda: Cuda, batches: int, slots: int) -> Iterator[tuple[torch.Tensor, int]]:
    """A ring whose slots are written anew as soon as `copied_ahead` promises that they may be."""
    ring, written = torch.zeros(slots, 16, dtype=torch.uint8), 0
    for batch in range(batches):
        while written < min(batch + slots - 1, batches):  # as a DataLoader, which asks for one more with each
            cuda.host_writes(ring[written % slots])
            ring[written % slots].fill_(written)
            written += 1
        yield ring[batch % slots], batch


def a_pass(cuda: Cuda, batches: int, staged: bool, slots: int) -> list[int]:
    seen = []
    for batch, number in copied_ahead(slots_of(cuda, batches, slots), GPU, staged):
        cuda.computes(batch)
        assert int(batch[0]) == number
        seen.append(number)
        del batch
    return seen


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("slots", [3, 4, 7])
def test_no_slot_is_written_and_no_batch_used_too_early(cuda: Cuda, staged: bool, slots: int) -> None:
    assert a_pass(cuda, 12, staged, slots) == list(range(12)) and cuda.problems == []


def test_passes_share_one_stream(cuda: Cuda) -> None:
    """What a stream's copies leave in the allocator no other stream can take: each would hold its own."""
    for _ in range(3):
        a_pass(cuda, 3, staged=False, slots=4)
    assert len(cuda.streams) == 1
