"""Evidence that the subject of a variant of `trainer check` happened.

Each function returns what was seen, for the table, and whether it is enough.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from trainer.commands.check.plain import StepTensors
from trainer.commands.check.training import Training


class Sight(NamedTuple):
    """Sight of a variant's subject.

    Attributes:
        enough: Whether it happened.
        what: What was seen, in a few words; "" if that goes without saying.
    """

    enough: bool
    what: str


class Evidence(NamedTuple):
    """Trainings to look at.

    Attributes:
        got: The variant's training.
        epochs: Number of epochs that its samples come from.
        micro_batches: Largest number of micro-batches with samples in a step.
        base: Gives the training of `plain`.
        wanted: Gives the steps of the plain loop, with the variant's settings or, if False, with those of
            `plain`, in the same task precision.
    """

    got: Training
    epochs: int
    micro_batches: int
    base: Callable[[], Training]
    wanted: Callable[[bool], Sequence[StepTensors]]


Needed = Callable[[Evidence], Sight]


def update_made(seen: Evidence) -> Sight:
    """An update was made, and a weight moved."""
    steps = [step for step in seen.got.steps if step]
    first, last = steps[0], steps[-1]
    if not int(last["updates"]):
        return Sight(False, "no update was made")
    weights = [name for name in last if name.startswith("model/")]
    moved = any(not torch.equal(first[name], last[name]) for name in weights)
    return Sight(moved, "" if moved else "no weight moved")


def epoch_crossed(seen: Evidence) -> Sight:
    """Samples of two epochs were trained on."""
    return Sight(seen.epochs > 1, f"{seen.epochs} epochs" if seen.epochs > 1 else "no epoch ended")


def micro_batches_added(seen: Evidence) -> Sight:
    """A step had several micro-batches with samples."""
    return Sight(
        seen.micro_batches > 1, "" if seen.micro_batches > 1 else "no step has 2 micro-batches with samples"
    )


def average_apart(seen: Evidence) -> Sight:
    """The average differs from the weights."""
    last = seen.got.steps[-1]
    names = [name.removeprefix("ema/") for name in last if name.startswith("ema/")]
    apart = any(not torch.equal(last[f"ema/{name}"], last[f"model/{name}"]) for name in names)
    measured = sum(any(name.startswith("metric/") for name in step) for step in seen.got.steps)
    what = f"{measured} evaluations of an average" if apart else "the average is equal to the weights"
    return Sight(apart and measured > 1, what)


def recomputed(seen: Evidence) -> Sight:
    """Modules were called again for the backward pass."""
    more = seen.got.did["calls"] - seen.base().did["calls"]
    return Sight(more > 0, f"{more} calls of modules repeated" if more > 0 else "nothing was recomputed")


def narrowed(seen: Evidence) -> Sight:
    """Autocast changed what was computed."""
    one, other = seen.wanted(True)[0], seen.wanted(False)[0]
    differs = any(name in other and not torch.equal(one[name], other[name]) for name in one)
    return Sight(differs, "" if differs else "autocast changes nothing of what this task computes")


def overflowed(seen: Evidence) -> Sight:
    """A step was skipped by an overflow, and a later one wasn't."""
    counts = [int(step["updates"]) for step in seen.wanted(True)]
    skipped = next(
        (n for n, (one, other) in enumerate(zip([0, *counts], counts, strict=False)) if one == other), None
    )
    enough = skipped is not None and counts[-1] > counts[skipped]
    total = f"{len(counts) - counts[-1]} of {len(counts)} updates skipped"
    return Sight(enough, total if enough else f"{total}: an overflow and an update after it are needed")


def loaded_by(workers: int) -> Needed:
    """At least so many loader workers ran: an evaluation has its own."""

    def look(seen: Evidence) -> Sight:
        found = seen.got.did["workers"]
        return Sight(found >= workers, "" if found >= workers else f"{found} loader workers ran")

    return look


def resumed_at(step: int) -> Needed:
    """The training began after so many steps, from a checkpoint."""

    def look(seen: Evidence) -> Sight:
        begun = seen.got.did["begun"]
        return Sight(begun == step, f"resumed after step {begun}" if begun else "nothing was resumed")

    return look


def on_two_ranks(seen: Evidence) -> Sight:
    """Two ranks trained, each with samples of its own in a step."""
    ranks = seen.got.did["ranks"]
    return Sight(ranks == 2 and seen.micro_batches > 1, "" if ranks == 2 else f"{ranks} rank trained")
