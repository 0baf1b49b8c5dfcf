"""Orders in which samples that belong together come together; pure functions of (seed, epoch, position).

Blocks: of shards of which only a few fit on this machine at a time. The shards are permuted each epoch and
divided into blocks of `shards_per_block` shards; samples are permuted within a block. So a shard is needed
during one part of the epoch only.

Buckets: of samples of similar length; all samples of a micro-batch come from one. Each epoch permutes the
samples of every bucket, divides them into micro-batches, and permutes the micro-batches of all buckets.
Samples left over at the ends of buckets are mixed; they fill the incomplete micro-batches at the start and
end of an epoch.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from trainer.rng import Ints, Purpose, key, permuted


class _Epoch(NamedTuple):
    """Order of the shards in one epoch.

    Attributes:
        first: int64 (shards,), number of each shard's first sample, in the order of the epoch.
        ends: int64 (shards + 1,), positions at which shards begin and end, from 0.
        blocks: int64 (blocks + 1,), positions at which blocks begin and end, from 0.
    """

    first: Ints
    ends: Ints
    blocks: Ints


@lru_cache(maxsize=4)
def _epoch(seed: int, epoch: int, shards: tuple[int, ...], shards_per_block: int) -> _Epoch:
    sizes, count = np.array(shards, dtype=np.int64), len(shards)
    order = permuted(key(seed, Purpose.SHARDS), np.full(count, epoch), np.arange(count), count)
    ends = np.concatenate(([0], np.cumsum(sizes[order])))
    blocks = ends[[*range(0, count, shards_per_block), count]]
    return _Epoch((np.cumsum(sizes) - sizes)[order], ends, blocks)


def in_blocks(seed: int, epoch: Ints, position: Ints, shards: tuple[int, ...], shards_per_block: int) -> Ints:
    """Returns the sample at a position of an epoch's order.

    Args:
        seed: The run's seed.
        epoch: int64, any shape.
        position: int64, same shape, each in [0, sum(shards)).
        shards: Number of samples in each shard; samples are numbered shard by shard.
        shards_per_block: Shards in a block, at least 1.

    Returns:
        int64, same shape: for each epoch a permutation of range(sum(shards)).
    """
    samples = np.array(position, dtype=np.int64)
    for number in np.unique(epoch).tolist():
        order = _epoch(seed, number, shards, shards_per_block)
        chosen = np.asarray(epoch) == number
        samples[chosen] = _of_epoch(seed, number, samples[chosen], order)
    return samples


def _of_epoch(seed: int, epoch: int, position: Ints, order: _Epoch) -> Ints:
    block = np.searchsorted(order.blocks, position, side="right") - 1
    slot = np.empty_like(position)
    for number in np.unique(block).tolist():
        chosen = block == number
        start, end = order.blocks[number : number + 2].tolist()
        each = key(seed, Purpose.BLOCK, number)
        inside = position[chosen] - start
        slot[chosen] = start + permuted(each, np.full(len(inside), epoch), inside, end - start)
    shard = np.searchsorted(order.ends, slot, side="right") - 1
    samples: Ints = order.first[shard] + slot - order.ends[shard]
    return samples


def in_buckets(
    seed: int, epoch: Ints, position: Ints, buckets: tuple[int, ...], micro_batch_size: int, cross: bool
) -> Ints:
    """Returns the sample at a position of an epoch's order.

    Args:
        seed: The run's seed.
        epoch: int64, any shape.
        position: int64, same shape, each in [0, sum(buckets)).
        buckets: Number of samples in each bucket; samples are numbered bucket by bucket.
        micro_batch_size: Samples in a micro-batch.
        cross: True if micro-batches are counted through the run, so that an epoch may begin within one.

    Returns:
        int64, same shape: for each epoch a permutation of range(sum(buckets)).
    """
    sizes = np.array(buckets, dtype=np.int64)
    samples = int(sizes.sum())
    micro_batches = sizes // micro_batch_size
    all_micro_batches = int(micro_batches.sum())
    # The first micro-batch may begin up to micro-batch - 1 positions late, and these must come from the rest.
    aligned = (
        max(0, min(all_micro_batches, (samples - micro_batch_size + 1) // micro_batch_size))
        * micro_batch_size
    )
    late = -epoch * samples % micro_batch_size if cross else np.zeros_like(epoch)
    behind = position - late
    rest = np.where(behind < 0, position + aligned, position)
    slot = np.where((behind >= 0) & (behind < aligned), behind, rest)
    # First the micro-batches of single buckets, then the samples left over.
    inside = slot < all_micro_batches * micro_batch_size
    number, offset = np.divmod(slot, micro_batch_size)
    if all_micro_batches:
        each = key(seed, Purpose.SHARDS)
        number = np.where(inside, permuted(each, epoch, np.where(inside, number, 0), all_micro_batches), 0)
    micro_batch_ends, rest_ends = (
        np.cumsum(micro_batches),
        np.cumsum(sizes - micro_batches * micro_batch_size),
    )
    left = np.where(inside, 0, slot - all_micro_batches * micro_batch_size)
    bucket = np.where(
        inside, np.searchsorted(micro_batch_ends, number, "right"), np.searchsorted(rest_ends, left, "right")
    )
    of_micro_batch = (number - (micro_batch_ends - micro_batches)[bucket]) * micro_batch_size + offset
    of_rest = (
        micro_batches[bucket] * micro_batch_size
        + left
        - (rest_ends - (sizes - micro_batches * micro_batch_size))[bucket]
    )
    index = np.where(inside, of_micro_batch, of_rest)
    in_bucket = np.empty_like(index)
    for one in np.unique(bucket).tolist():
        chosen = bucket == one
        each = key(seed, Purpose.BLOCK, one)
        in_bucket[chosen] = permuted(each, epoch[chosen], index[chosen], int(sizes[one]))
    result: Ints = (np.cumsum(sizes) - sizes)[bucket] + in_bucket
    return result
