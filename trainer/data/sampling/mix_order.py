"""The order of samples of several sets that are mixed by weight, each gone through again and again.

Of so many draws in a row, a block, each set has its share exactly; which are whose is a permutation of the
block, and the nth draw of a set is a position of its own epochs. All is looked up from (seed, position).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

import numpy as np

from trainer.errors import BadInputError
from trainer.rng import Ints, Purpose, key, permuted

_FINEST = 1000  # draws of a block, at most


@dataclass(frozen=True)
class MixDraws:
    """Sets that are mixed.

    Attributes:
        names: Of the sets.
        sizes: Samples of each; these are numbered on from set to set.
        shares: Draws of each in a block.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    shares: tuple[int, ...]

    def fingerprint(self) -> str:
        """Returns a text that differs with sizes and shares."""
        digest = hashlib.sha256(repr((self.sizes, self.shares)).encode())
        return f"mixed {digest.hexdigest()[:16]}"

    def told(self) -> str:
        """Describes an epoch: draws and samples of each set, in a line."""
        block, samples = sum(self.shares), sum(self.sizes)
        each = ", ".join(
            f"{share} of {name} ({size:,} samples, {share * samples / block / size:.3g} times an epoch)"
            for name, size, share in zip(self.names, self.sizes, self.shares, strict=True)
        )
        return f"data.mix: an epoch is {samples:,} draws; of {block:,} in a row are {each}"

    def drawn(self, seed: int, epoch: Ints, position: Ints) -> Ints:
        """The sample at a position of an epoch's order: int64, any shape."""
        shares, sizes = (np.array(one, np.int64) for one in (self.shares, self.sizes))
        ends, block = np.cumsum(shares), int(sum(self.shares))
        number, offset = np.divmod(epoch * int(sizes.sum()) + position, block)
        place = permuted(key(seed, Purpose.DRAW), number, offset, block)
        part = np.searchsorted(ends, place, side="right")
        nth = number * shares[part] + place - (ends - shares)[part]
        found = np.empty_like(nth)
        for one, size in enumerate(self.sizes):
            here = part == one
            epochs, places = np.divmod(nth[here], size)
            found[here] = permuted(key(seed, Purpose.BLOCK, one), epochs, places, size)
        samples: Ints = (np.cumsum(sizes) - sizes)[part] + found
        return samples


def mixed(names: Sequence[str], sizes: Sequence[int], weights: Sequence[float]) -> MixDraws:
    """Makes the order of sets from their weights: shares as small whole numbers, or thousandths.

    Raises:
        BadInputError: If a weight is below a thousandth of all, or a set has no samples.
    """
    if not all(sizes):
        raise BadInputError(f"data.mix: {names[list(sizes).index(0)]} has no samples; leave it out")
    parts = [Fraction(weight).limit_denominator(_FINEST) for weight in weights]
    whole = [int(part * lcm(*(one.denominator for one in parts))) for part in parts]
    shares = [one // (gcd(*whole) or 1) for one in whole]
    if sum(shares) > _FINEST or not all(shares):
        exact = [weight / sum(weights) * _FINEST for weight in weights]
        shares = [int(one) for one in exact]
        behind = sorted(range(len(exact)), key=lambda at: shares[at] - exact[at])
        for at in behind[: _FINEST - sum(shares)]:
            shares[at] += 1
        shares = [one // gcd(*shares) for one in shares]
    if not all(shares):
        name = names[shares.index(0)]
        raise BadInputError(f"data.mix: {name} has less than a thousandth of the weight; leave it out")
    return MixDraws(tuple(names), tuple(sizes), tuple(shares))
