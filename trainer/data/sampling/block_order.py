"""Order of samples in shards of which only a few fit on this machine at a time.

The shards are permuted each epoch and divided into blocks of `shards_per_block` shards; samples are permuted
within a block. So a shard is needed during one part of the epoch only, and the order is still a pure function
of (seed, epoch, position).
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
