"""Promise: workers and prefetch fit the box."""

import pytest

from trainer.data.workers import Loading, Sizes, by_rule, bytes_needed, memory_budget, prefetch_by_size
from trainer.host.limits import Limits

GIB = 1 << 30
IMAGE = 224 * 224 * 3


def box(cpus: float = 16, memory: int = 64 * GIB, pids: int | None = None) -> Limits:
    return Limits(cpus, memory, 1 << 26, pids)


@pytest.mark.parametrize(
    ("sample", "micro_batch_size", "prefetch"),
    [(64, 64, 4), (IMAGE, 64, 3), (IMAGE, 256, 2), (16 * IMAGE, 1, 1)],
)
def test_prefetch_by_the_size_of_a_sample(sample: int, micro_batch_size: int, prefetch: int) -> None:
    assert prefetch_by_size(Sizes(sample, sample * micro_batch_size)) == prefetch


@pytest.mark.parametrize(
    ("limits", "ranks", "expected"),
    [
        (box(16), 1, Loading(12, 3)),
        (box(16), 4, Loading(3, 3)),
        (box(2), 1, Loading(1, 3)),
        (box(0.5), 1, Loading(0, 3)),
        (box(16, pids=96), 1, Loading(8, 3)),
        # 512 MiB: spare slots, evaluation and processes leave room for one batch of each of six workers.
        (box(16, 2 * GIB), 1, Loading(6, 1)),
        (box(16, 256 << 20), 1, Loading(0, 1)),
        (box(16, 0), 1, Loading(12, 3)),  # nobody tells the memory
    ],
)
def test_the_rule_keeps_within_cpus_memory_and_pids(limits: Limits, ranks: int, expected: Loading) -> None:
    sizes = Sizes(IMAGE, 64 * IMAGE, 64 * IMAGE)
    setting = by_rule("auto", "auto", sizes, limits, ranks)
    assert setting == expected
    if setting.workers:
        assert bytes_needed(setting, sizes) <= memory_budget(limits, ranks)


def test_what_was_given_stays() -> None:
    sizes = Sizes(IMAGE, 64 * IMAGE, 64 * IMAGE)
    assert by_rule(12, 4, sizes, box(2, GIB), 1) == (12, 4)
    assert by_rule(2, "auto", sizes, box(2, GIB), 1) == (2, 1)
    assert by_rule("auto", 8, sizes, box(8), 1) == (6, 8)
