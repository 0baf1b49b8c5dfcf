"""The order of samples that lie in pieces of which only a few are on this machine at a time.

An epoch's pieces are permuted and cut into blocks of `together` pieces; the samples of a block are
permuted among themselves. So a piece is needed in one stretch of the epoch, and everything is still looked
up from (seed, epoch, position).
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from trainer.rng import Ints, Purpose, key, permuted


class _Epoch(NamedTuple):
    """One epoch's pieces.

    Attributes:
        first: int64 (pieces,), the number of a piece's first sample, in the order of the epoch.
        ends: int64 (pieces + 1,), samples of the epoch's pieces up to each, from 0 on.
        blocks: int64 (blocks + 1,), samples of the epoch's blocks up to each, from 0 on.
    """

    first: Ints
    ends: Ints
    blocks: Ints


@lru_cache(maxsize=4)
def _epoch(seed: int, epoch: int, pieces: tuple[int, ...], together: int) -> _Epoch:
    sizes, count = np.array(pieces, dtype=np.int64), len(pieces)
    order = permuted(key(seed, Purpose.PIECES), np.full(count, epoch), np.arange(count), count)
    ends = np.concatenate(([0], np.cumsum(sizes[order])))
    blocks = ends[[*range(0, count, together), count]]
    return _Epoch((np.cumsum(sizes) - sizes)[order], ends, blocks)


def in_blocks(seed: int, epoch: Ints, position: Ints, pieces: tuple[int, ...], together: int) -> Ints:
    """The sample at a position of an epoch's order.

    Args:
        seed: The run's seed.
        epoch: int64, any shape.
        position: int64, same shape, each in [0, sum(pieces)).
        pieces: Number of samples in each piece; those of a piece have consecutive numbers.
        together: Pieces in a block, from 1 on.

    Returns:
        int64, same shape: for each epoch a permutation of range(sum(pieces)).
    """
    found = np.array(position, dtype=np.int64)
    for number in np.unique(epoch).tolist():
        order = _epoch(seed, number, pieces, together)
        here = np.asarray(epoch) == number
        found[here] = _of_epoch(seed, number, found[here], order)
    return found


def _of_epoch(seed: int, epoch: int, position: Ints, order: _Epoch) -> Ints:
    block = np.searchsorted(order.blocks, position, side="right") - 1
    place = np.empty_like(position)
    for number in np.unique(block).tolist():
        here = block == number
        start, end = order.blocks[number : number + 2].tolist()
        each = key(seed, Purpose.BLOCK, number)
        inside = position[here] - start
        place[here] = start + permuted(each, np.full(len(inside), epoch), inside, end - start)
    piece = np.searchsorted(order.ends, place, side="right") - 1
    samples: Ints = order.first[piece] + place - order.ends[piece]
    return samples
