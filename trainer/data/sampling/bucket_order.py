"""Order of samples of unequal length: all samples of a micro-batch come from one bucket of similar lengths.

Each epoch permutes the samples of every bucket, divides them into micro-batches, and permutes the
micro-batches of all buckets. The order is a pure function of (seed, epoch, position). Samples left over at
the ends of buckets are mixed; they fill the incomplete micro-batches at the start and end of an epoch.
"""

import numpy as np

from trainer.rng import Ints, Purpose, key, permuted


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
