"""Choice among measurements: the largest micro-batch that fits, the setting of the loader.

Nothing here knows how a probe is made.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trainer.config.recipe import Recipe
from trainer.distributed.tree import shares_a_tree
from trainer.errors import BadInputError
from trainer.host.memory_room import HEADROOM

MOST_PROBES = 10
_FIRST_JUMP = 8  # from the first probe to the second; from there on the growth is known
_AS_FAST = 0.95  # of the highest speed: what lies between may be noise


@dataclass(frozen=True)
class Probe:
    """Result of training a few micro-batches of one size.

    Attributes:
        micro_batch_size: Samples in each.
        fits: Whether memory stayed within the limit less the headroom, on every rank.
        peak_bytes: The most that the job had where memory is tightest (of a GPU: that all had); 0: not known.
        limit_bytes: All there is of it; 0: not known.
        others_bytes: What others had of it before.
        where: Which memory that is.
        samples_per_s: Speed of the whole job, 0 if it did not come so far.
        seconds: What the probe took, start included.
        note: Why it doesn't fit, where that needs words.
    """

    micro_batch_size: int
    fits: bool
    peak_bytes: int = 0
    limit_bytes: int = 0
    others_bytes: int = 0
    where: str = ""
    samples_per_s: float = 0.0
    seconds: float = 0.0
    note: str = ""

    @property
    def allowed_bytes(self) -> float:
        """Returns the limit less headroom and others' use; infinite without a limit."""
        if not self.limit_bytes:
            return math.inf
        return (1 - HEADROOM) * self.limit_bytes - self.others_bytes


class ProbeFailed(Exception):  # noqa: N818  (what the probe said is the error)
    """A probe ended for a reason that isn't memory; the text is what it said."""


@dataclass
class SizeSearchResult:
    """The end of a search.

    Attributes:
        chosen: The probe of the largest size that fits, or None.
        probes: All of them, in their order.
        untried: Larger sizes that would have taken too long.
    """

    chosen: Probe | None = None
    probes: list[Probe] = field(default_factory=list)
    untried: list[int] = field(default_factory=list)


def micro_batch_sizes(recipe: Recipe, ranks: int) -> list[int]:
    """The micro-batches that keep the global batch by whole steps of accumulation, smallest first.

    Raises:
        BadInputError: If there is none for so many ranks.
    """
    batch = recipe.data.global_batch_size
    each, rest = divmod(batch, ranks)
    if rest:
        raise BadInputError(
            f"data.global_batch_size={batch} can't be shared by {ranks} ranks: change it or the number of "
            "ranks"
        )
    low = [size for size in range(1, math.isqrt(each) + 1) if each % size == 0]
    sizes = sorted({*low, *(each // size for size in low)})
    if recipe.parallel.static_graph:  # which doesn't go with accumulation
        sizes = [each]
    if recipe.parallel.reduction == "tree":
        sizes = [size for size in sizes if shares_a_tree(batch // size, ranks)]
    if recipe.regularization.mixup or recipe.regularization.cutmix:
        sizes = [size for size in sizes if size > 1]
    if not sizes:
        raise BadInputError(
            f"no data.micro_batch_size suits data.global_batch_size={batch} on {ranks} "
            f"rank{'s' * (ranks > 1)} with "
            "this recipe; raise data.global_batch_size, or give data.micro_batch_size"
        )
    return sizes


def search(
    sizes: Sequence[int],
    probe: Callable[[int], Probe],
    affordable: Callable[[int, Sequence[Probe]], bool] = lambda _, __: True,
    most: int = MOST_PROBES,
) -> SizeSearchResult:
    """Finds the largest size whose probe fits, if memory grows with the size.

    Bisection, but not from the middle: a probe far too large is slow, and what the smaller ones took tells
    where the limit lies. A guess never costs so much that bisection could not end within `most` probes. A
    size is chosen only if its own probe fitted, whatever the others did.

    Args:
        sizes: In ascending order.
        probe: Tries one.
        affordable: Whether there is time for a larger one, after these probes.
        most: Probes at most; enough for 2 ** most - 1 sizes.

    Raises:
        ProbeFailed: What a probe raised, but for a first one of a single sample, from which some models
            (BatchNorm over one pixel) can't learn.
    """
    found = SizeSearchResult()
    low, high = -1, len(sizes)  # up to low they fit, from high on they don't
    while high - low > 1 and len(found.probes) < most:
        index = _guess(sizes, low, high, found.probes, most)
        if low >= 0:
            while index > low and not affordable(sizes[index], found.probes):
                index -= 1
            if index == low:
                found.untried = list(sizes[low + 1 : high])
                break
        try:
            one = probe(sizes[index])
        except ProbeFailed as failed:
            if found.probes or sizes[index] != 1 or len(sizes) == 1:
                raise
            found.probes.append(Probe(1, False, note=f"can't be trained: {failed}"))
            sizes, high = sizes[1:], high - 1
            continue
        found.probes.append(one)
        if one.fits:
            low, found.chosen = index, one
        else:
            high = index
    return found


def _guess(sizes: Sequence[int], low: int, high: int, probes: Sequence[Probe], most: int) -> int:
    """The index to try next: where memory should just fit, growing as it did."""
    fitting = sorted((one for one in probes if one.fits), key=lambda one: one.micro_batch_size)
    target: float = 0
    if len(fitting) == 1:
        target = fitting[0].micro_batch_size * _FIRST_JUMP
    elif fitting:
        before, last = fitting[-2:]
        growth = (last.peak_bytes - before.peak_bytes) / (last.micro_batch_size - before.micro_batch_size)
        room = last.allowed_bytes - last.peak_bytes
        target = last.micro_batch_size + room / growth if growth > 0 else math.inf
    index = max([low + 1, *(n for n in range(low + 1, high) if sizes[n] <= target)])
    # As many sizes as the probes that are left after this one can tell apart, on either side.
    either = 2 ** (most - len(probes) - 1) - 1
    first, last_one = high - 1 - either, low + 1 + either
    return min(max(index, first), last_one) if first <= last_one else (low + high) // 2


def fastest(speeds: Sequence[Sequence[float]]) -> int:
    """The index of the setting with the highest median speed; 0, the rule's, if that is about as fast.

    Args:
        speeds: Of each setting, turn by turn, the rule's first; as many of each.
    """
    if len(speeds[0]) < 2:  # one turn has no spread
        return 0
    medians = [statistics.median(series) for series in speeds]
    best = max(range(len(medians)), key=medians.__getitem__)
    return 0 if medians[0] >= _AS_FAST * medians[best] else best
