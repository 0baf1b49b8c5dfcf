"""Search for the largest micro-batch that fits, by probes that are passed in as a function."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trainer.config.recipe import Recipe
from trainer.distributed.tree import shares_a_tree
from trainer.errors import BadInputError
from trainer.host.memory_room import HEADROOM

MOST_PROBES = 10
_FIRST_JUMP = 8  # factor from the first size to the second; after that the growth of memory is known


@dataclass(frozen=True)
class Probe:
    """Result of training a few micro-batches of one size.

    Attributes:
        micro_batch_size: Samples in each micro-batch.
        fits: True if memory stayed within the limit less the headroom, on every rank.
        peak_bytes: Peak of the job in the tightest memory (on a GPU, of all processes); 0 if unknown.
        limit_bytes: Size of that memory; 0 if unknown.
        others_bytes: Use of it by other processes before.
        where: Name of that memory.
        samples_per_s: Speed of the whole job; 0 if it wasn't measured.
        seconds: Duration of the probe, start included.
        note: Reason why it doesn't fit, other than the peak; or "".
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
        """Limit less headroom and use by others; infinite without a limit."""
        if not self.limit_bytes:
            return math.inf
        return (1 - HEADROOM) * self.limit_bytes - self.others_bytes


class ProbeFailed(Exception):  # noqa: N818  (its text is the probe's output)
    """Failure of a probe for another reason than memory; its text is the probe's output."""


@dataclass
class SizeSearchResult:
    """Result of a search.

    Attributes:
        chosen: The probe of the largest size that fits, or None.
        probes: All probes, in their order.
        untried: Larger sizes that would have taken too long.
    """

    chosen: Probe | None = None
    probes: list[Probe] = field(default_factory=list)
    untried: list[int] = field(default_factory=list)


def micro_batch_sizes(recipe: Recipe, ranks: int) -> list[int]:
    """Returns the micro-batch sizes that divide the global batch on these ranks, smallest first.

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
    """Finds the largest size whose probe fits, assuming that memory grows with the size.

    It bisects, but not at the middle: a probe far too large is slow, and the peaks of smaller ones predict
    the limit. A guess leaves so few sizes on either side that bisection can end within `most` probes. A size
    is chosen only if its own probe fits.

    Args:
        sizes: Sizes in ascending order.
        probe: Tries a size.
        affordable: Returns True if there is time for a size after these probes.
        most: Most probes; enough for 2 ** most - 1 sizes.

    Raises:
        ProbeFailed: If a probe raised it; except for the first probe with one sample, as some models
            (BatchNorm over one pixel) can't train on that.
    """
    found = SizeSearchResult()
    low, high = -1, len(sizes)  # sizes up to low fit, sizes from high on don't
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
    """Returns the index to try next: the largest size that should fit by the growth of memory so far."""
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
    # On either side at most as many sizes as the remaining probes can bisect.
    either = 2 ** (most - len(probes) - 1) - 1
    first, last_one = high - 1 - either, low + 1 + either
    return min(max(index, first), last_one) if first <= last_one else (low + high) // 2
