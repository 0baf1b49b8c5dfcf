"""How many workers and how much prefetch: by rule, from the size of a sample, the CPUs and the memory."""

import math
from typing import Literal, NamedTuple

from trainer.data.dataset import Dataset
from trainer.host.limits import Limits, workers_per_rank
from trainer.observe.text import megabytes

Given = int | Literal["auto"]

# A sample of tokens, audio or a small picture; an image (224 x 224 has 150 kB, 512 x 512 has 786 kB); video.
_SMALL_BYTES = 32 << 10
_VIDEO_BYTES = 2 << 20
_LARGE_BATCH_BYTES = 16 << 20
# Of the container's memory, for what loads: the rest is for weights, activations and the page cache.
_SHARE_OF_MEMORY = 0.25
# What a loader process adds to the PSS of all, decoding included: 31 to 49 MiB were seen where it is forked,
# 380 where it is started anew and so imports torch (photographs; torch 2.9.1, see docs/results/tune.md).
_FORKED_BYTES = 48 << 20
_STARTED_BYTES = 384 << 20
# The batch in use and the one that is being copied, besides those that workers prepare.
SPARE_SLOTS = 2
_EVALUATION_WORKERS = 2


class Loading(NamedTuple):
    """How batches are made ready: loader processes of a rank, and batches that each prepares ahead."""

    workers: int
    prefetch: int

    def __str__(self) -> str:
        """In words."""
        if not self.workers:
            return "no workers"
        return f"{self.workers} worker{'s' * (self.workers > 1)} x prefetch {self.prefetch}"


class Sizes(NamedTuple):
    """Bytes of what is loaded: a sample, a micro-batch, a batch of the evaluation."""

    sample: int
    batch: int
    eval_batch_size: int = 0


def sizes_of(dataset: Dataset, micro_batch_size: int, eval_batch_size: int = 0) -> Sizes:
    """Sizes of a data set's batches, as they lie in the ring."""
    sample = sum(math.prod(field.shape) * field.dtype.itemsize for field in dataset.fields.values())
    return Sizes(sample, sample * micro_batch_size, sample * eval_batch_size)


def prefetch_by_size(sizes: Sizes) -> int:
    """Batches for each worker to prepare ahead: many of what is small, few of what is large.

    4 for samples below 32 KiB (tokens, sounds, small pictures); for images, below 2 MiB, 3 while a
    micro-batch is below 16 MiB and else 2; 1 for larger samples (video): one batch is much already.
    """
    if sizes.sample < _SMALL_BYTES:
        return 4
    if sizes.sample < _VIDEO_BYTES:
        return 3 if sizes.batch < _LARGE_BATCH_BYTES else 2
    return 1


def bytes_needed(setting: Loading, sizes: Sizes, forked: bool = True) -> int:
    """Memory of a rank's loaders: both rings with their spare slots, and the processes."""
    measuring = min(setting.workers, _EVALUATION_WORKERS)
    rings = sum(
        (workers * setting.prefetch + SPARE_SLOTS) * size
        for workers, size in ((setting.workers, sizes.batch), (measuring, sizes.eval_batch_size))
    )
    return rings + (setting.workers + measuring) * (_FORKED_BYTES if forked else _STARTED_BYTES)


def memory_budget(limits: Limits, ranks: int) -> float:
    """Bytes that the loaders of one rank may take: its part of a quarter of the container's memory."""
    return limits.memory_bytes * _SHARE_OF_MEMORY / ranks if limits.memory_bytes else math.inf


def fits(setting: Loading, sizes: Sizes, limits: Limits, ranks: int, forked: bool = True) -> bool:
    """Whether a rank may load so: within the memory budget, its share of the CPUs, and the limit of pids."""
    room = bytes_needed(setting, sizes, forked) <= memory_budget(limits, ranks)
    return room and setting.workers <= workers_per_rank(limits, ranks, quarters=4)


def by_rule(
    workers: Given, prefetch: Given, sizes: Sizes, limits: Limits, ranks: int, forked: bool = True
) -> Loading:
    """What `auto` stands for without measuring; a number that was given stays.

    Workers from 75 % of the rank's share of the CPUs, prefetch by the size of a sample; where both together
    would take more than the memory budget, less prefetch, down to 1, and then fewer workers.

    Args:
        workers: As configured.
        prefetch: As configured.
        sizes: Of what is loaded.
        limits: What the ranks share.
        ranks: In this container.
        forked: Whether workers are forked, which is cheaper.
    """
    chosen = Loading(
        workers_per_rank(limits, ranks) if workers == "auto" else workers,
        prefetch_by_size(sizes) if prefetch == "auto" else prefetch,
    )
    budget = memory_budget(limits, ranks)
    while bytes_needed(chosen, sizes, forked) > budget:
        if prefetch == "auto" and chosen.prefetch > 1:
            chosen = chosen._replace(prefetch=chosen.prefetch - 1)
        elif workers == "auto" and chosen.workers:
            chosen = chosen._replace(workers=chosen.workers - 1)
        else:
            break
    return chosen


def estimate(setting: Loading, sizes: Sizes, limits: Limits, ranks: int, forked: bool = True) -> str:
    """What a setting takes, for people: "3 workers x prefetch 3 x 9.6 MB = 87 MB, …"."""
    whole, budget = bytes_needed(setting, sizes, forked), memory_budget(limits, ranks)
    of = "" if budget == math.inf else f" of the {megabytes(budget)} that they may take"
    text = f"{setting}"
    if setting.workers:
        ahead = setting.workers * setting.prefetch * sizes.batch
        text += f" x {megabytes(sizes.batch)} = {megabytes(ahead)}"
    return f"{text}; with spare slots, evaluation and processes {megabytes(whole)}{of}"
