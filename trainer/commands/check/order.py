"""Looks at the order of a run's samples: three epochs of the true size, by the run's own plan."""

import math
from collections.abc import Iterator

import numpy as np

from trainer.data.sampling.class_order import ClassDraws
from trainer.data.sampling.mix_order import MixDraws
from trainer.data.sampling.plan import Plan
from trainer.rng import Ints

EPOCHS = 3
_AT_ONCE = 1 << 15  # samples that are read at once
_FEW = 10  # samples; of fewer a shuffled order may be that of the data by chance
_SOME = 20  # samples from which two orders are compared as a whole
_NEIGHBORS = 0.75  # fraction of samples that keep their neighbor
_ALIKE = 0.95  # correlation of two orders
_SIGMAS = 6
_CHANCE = 1e-6  # below, what is seen is no chance


def odd_order(plan: Plan) -> str:
    """Returns what is wrong with the order of the samples in three epochs; "" if nothing is.

    In each epoch each sample comes once (`drop`: at most once). No two epochs have the same order, and none
    has the order of the data, unless shuffling is off. Samples that are drawn by weight come as often as
    their class or set is to be drawn, to 6 standard deviations.
    """
    epochs = [*read_epochs(plan)]
    if plan.draws is not None:
        return next(filter(None, (_odd_draws(plan, order) for order in epochs)), "") or _alike(epochs, plan)
    for number, order in enumerate(epochs):
        if odd := _odd_counts(plan, order, number):
            return odd
    if not plan.shuffle or plan.samples < _FEW:
        return ""
    if plan.last == "drop" and (never := _left_out(epochs, plan)):
        return never
    for number, order in enumerate(epochs):
        if _follows(order, np.arange(plan.samples), plan):
            return f"epoch {number}: not shuffled, the samples come in the order of the data"
    return _alike(epochs, plan)


def told_order(plan: Plan) -> str:
    """Describes what `odd_order` has seen, for the table."""
    if plan.draws is not None:
        by = "class_weights" if isinstance(plan.draws, ClassDraws) else "data.mix"
        return (
            f"{EPOCHS} epochs of {plan.samples:,} draws by {by}, each class or set as often as it should be"
        )
    once = "at most once" if plan.last == "drop" else "once"
    each = f"{EPOCHS} epochs of {plan.samples:,} samples: each sample {once} in each"
    if not plan.shuffle:
        return f"{each}; not shuffled"
    if plan.samples < _FEW:
        return f"{each}; too few samples to see whether they are shuffled"
    return f"{each}, no two orders alike, none that of the data"


def read_epochs(plan: Plan) -> Iterator[Ints]:
    """Yields the samples of each of three epochs in their order, without padding."""
    if plan.last == "cross":
        steps = -(-plan.samples * EPOCHS // plan.global_batch_size)
    else:
        steps = plan.steps_per_epoch * EPOCHS
    micro_batches = steps * plan.micro_batches
    per_epoch = max(1, plan.samples)
    parts: list[list[Ints]] = [[] for _ in range(EPOCHS)]
    at_once = max(1, _AT_ONCE // plan.micro_batch_size)
    for start in range(0, micro_batches, at_once):
        epoch, sample, weight = plan.read(np.arange(start, min(start + at_once, micro_batches)))
        epoch = epoch // per_epoch if plan.draws is not None else epoch  # there it is the number of the draw
        for number in range(EPOCHS):
            parts[number].append(sample[(weight > 0) & (epoch == number)])
    for each in parts:
        yield np.concatenate(each)


def _odd_counts(plan: Plan, order: Ints, number: int) -> str:
    counts = np.bincount(order, minlength=plan.samples)
    if len(counts) > plan.samples:
        return f"epoch {number}: there is no sample {len(counts) - 1}"
    most = int(counts.argmax())
    if counts[most] > 1:
        return f"epoch {number}: sample {most} comes {counts[most]} times"
    left_out = plan.samples % plan.global_batch_size if plan.last == "drop" else 0
    if (missing := int((counts == 0).sum())) != left_out:
        return f"epoch {number}: sample {int(counts.argmin())} doesn't come ({missing} don't)"
    return ""


def _left_out(epochs: list[Ints], plan: Plan) -> str:
    """Returns a sample that each epoch drops; "" if epochs drop different ones, or may be alike by chance."""
    missing = [np.setdiff1d(np.arange(plan.samples), order) for order in epochs]
    if any(not np.array_equal(one, missing[0]) for one in missing[1:]):
        return ""
    chance = math.comb(plan.samples, len(missing[0])) ** (1 - EPOCHS)
    return f"sample {missing[0][0]} never comes: each epoch drops the same" if chance < _CHANCE else ""


def _odd_draws(plan: Plan, order: Ints) -> str:
    """Returns the class or set that is drawn too often or too seldom, or ""."""
    match plan.draws:
        case ClassDraws(names=names, counts=counts, chances=chances, by_class=by_class):
            kind = np.empty(plan.samples, np.int64)
            kind[by_class] = np.repeat(np.arange(len(counts)), counts)
            spread = np.sqrt(len(order) * chances * (1 - chances))
        case MixDraws(names=names, sizes=sizes, shares=shares):
            kind = np.repeat(np.arange(len(sizes)), sizes)
            chances = np.array(shares) / sum(shares)
            spread = np.full(len(sizes), sum(shares) / _SIGMAS)  # exact in each block of draws
        case _:
            return ""
    drawn = np.bincount(kind[order], minlength=len(chances))
    apart = np.abs(drawn - len(order) * chances)
    odd = np.flatnonzero((apart > _SIGMAS * spread + 1e-9) | ((chances == 0) & (drawn > 0)))
    if not len(odd):
        return ""
    worst = int(odd[0])
    return f"{names[worst]} is drawn {drawn[worst]} times in {len(order)}, at {chances[worst]:.3g} each"


def _alike(epochs: list[Ints], plan: Plan) -> str:
    for one in range(EPOCHS):
        for other in range(one + 1, EPOCHS):
            if len(epochs[one]) >= _FEW and _follows(epochs[one], epochs[other], plan):
                return f"epochs {one} and {other} have the same order"
    return ""


def _follows(order: Ints, given: Ints, plan: Plan) -> bool:
    """Returns True if an order is another one, or nearly: shifted, turned around, or shuffled a little."""
    if np.array_equal(order, given):
        return True
    # Shards and buckets are shuffled as a whole, and a few of them may come in their own order by chance.
    if plan.draws is not None or plan.shards_per_block or plan.buckets:
        return False
    place = np.full(plan.samples, -1, np.int64)
    place[given] = np.arange(len(given))
    found = place[order]
    found = found[found >= 0]  # with `drop` each epoch leaves other samples out
    if len(found) < _SOME:
        return False
    neighbors = float((np.abs(np.diff(found)) == 1).mean())
    correlation = float(np.corrcoef(found, np.arange(len(found)))[0, 1])
    return neighbors > _NEIGHBORS or abs(correlation) > _ALIKE
