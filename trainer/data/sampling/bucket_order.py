"""The order of samples of unequal length: the samples of a shard are from one bucket of similar lengths.

Each epoch permutes the samples of every bucket, cuts them into shards, and permutes these over all buckets.
Everything is looked up from (seed, epoch, position). What is left over at the ends of the buckets is mixed,
and stands where an epoch doesn't begin or end with a shard.
"""

import numpy as np

from trainer.rng import Ints, Purpose, key, permuted


def in_buckets(
    seed: int, epoch: Ints, position: Ints, buckets: tuple[int, ...], shard: int, cross: bool
) -> Ints:
    """The sample at a position of an epoch's order.

    Args:
        seed: The run's seed.
        epoch: int64, any shape.
        position: int64, same shape, each in [0, sum(buckets)).
        buckets: Number of samples in each bucket; those of a bucket have consecutive numbers.
        shard: Samples in a shard.
        cross: Whether shards are counted through the run, so that an epoch may begin within one.

    Returns:
        int64, same shape: for each epoch a permutation of range(sum(buckets)).
    """
    sizes = np.array(buckets, dtype=np.int64)
    samples = int(sizes.sum())
    shards = sizes // shard
    all_shards = int(shards.sum())
    # The first shard may begin up to shard - 1 positions late, and these must come from the rest.
    aligned = max(0, min(all_shards, (samples - shard + 1) // shard)) * shard
    late = -epoch * samples % shard if cross else np.zeros_like(epoch)
    behind = position - late
    rest = np.where(behind < 0, position + aligned, position)
    place = np.where((behind >= 0) & (behind < aligned), behind, rest)
    # In shards of one bucket up to here, then what is left of each.
    inside = place < all_shards * shard
    number, offset = np.divmod(place, shard)
    if all_shards:
        each = key(seed, Purpose.PIECES)
        number = np.where(inside, permuted(each, epoch, np.where(inside, number, 0), all_shards), 0)
    shard_ends, rest_ends = np.cumsum(shards), np.cumsum(sizes - shards * shard)
    left = np.where(inside, 0, place - all_shards * shard)
    bucket = np.where(
        inside, np.searchsorted(shard_ends, number, "right"), np.searchsorted(rest_ends, left, "right")
    )
    of_shard = (number - (shard_ends - shards)[bucket]) * shard + offset
    of_rest = shards[bucket] * shard + left - (rest_ends - (sizes - shards * shard))[bucket]
    index = np.where(inside, of_shard, of_rest)
    found = np.empty_like(index)
    for one in np.unique(bucket).tolist():
        here = bucket == one
        each = key(seed, Purpose.BLOCK, one)
        found[here] = permuted(each, epoch[here], index[here], int(sizes[one]))
    result: Ints = (np.cumsum(sizes) - sizes)[bucket] + found
    return result
