"""`data.micro_batch_size=auto`: the largest micro-batch that fits on the GPUs, found before the ranks start.

The job's ranks are started as a trial (`micro_batch_rank`), which ends after a few steps. The trial begins
with the global batch over the ranks, and halves until all ranks leave some memory free. Imports no torch.
"""

import contextlib
import io
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL
from typing import Any, NamedTuple

from trainer.config.recipe import Recipe
from trainer.config.sizes import shares_a_tree
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, BadInputError
from trainer.host.memory_room import HEADROOM
from trainer.launch.launcher import LocalRanks, launch
from trainer.launch.signals import SignalReceiver
from trainer.observe.console import say
from trainer.observe.text import memory_size
from trainer.runs.manifest import Manifest

KEY = "data.micro_batch_size"
_MODULE = "trainer.train.start.micro_batch_rank"
_MOST_TRIALS = 8
_STEPS = 2  # at least; the first allocates the optimizer's state


class Interrupted(Exception):  # noqa: N818  (the outcome of a request)
    """End of a trial by a signal, which its text names."""


class Trial(NamedTuple):
    """Result of a trial.

    Attributes:
        fits: True if each rank left the headroom free.
        note: Memory of the fullest GPU, or who ran out.
    """

    fits: bool
    note: str


def stored_size(stored: Manifest | None) -> int | None:
    """Returns the micro-batch size that a run began with; None if there is none."""
    number = (stored.config.get("data") or {}).get("micro_batch_size") if stored is not None else None
    return number if isinstance(number, int) else None


def usual_size(recipe: Recipe, ranks: int, why: str) -> int:
    """Returns the recipe's own size, or the next smaller one that its ranks can share; says so.

    Args:
        recipe: The configuration, with the recipe's own size.
        ranks: Number of ranks.
        why: Why no size is tried, for the line.

    Raises:
        BadInputError: If there is none.
    """
    sizes = micro_batch_sizes(recipe, ranks)
    number = max([size for size in sizes if size <= recipe.data.micro_batch_size], default=sizes[0])
    say(f"{KEY}=auto: {number}, the recipe's own, as {why}")
    return number


def fitting_size(recipe: Recipe, local: LocalRanks) -> int:
    """Returns the largest size of which a trial fits on the GPUs, and says so; on a CPU the recipe's own.

    Raises:
        BadInputError: If none fits, or the recipe can't be trained here.
        Interrupted: After a signal.
    """
    if not local.gpus:
        return usual_size(recipe, local.ranks, "memory is measured on GPUs only")
    sizes = halved(micro_batch_sizes(recipe, local.ranks))
    say(f"{KEY}=auto: a trial with {sizes[0]} samples, then with half of them until all ranks have room")
    with SignalReceiver() as receiver:
        number = first_that_fits(sizes, lambda size: run_trial(recipe, local, size, receiver))
    accumulation = recipe.data.global_batch_size // (number * local.ranks)
    say(f"  {KEY}={number}, and {accumulation} micro-batches a step on each rank")
    return number


def first_that_fits(sizes: Sequence[int], attempt: Callable[[int], Trial]) -> int:
    """Returns the first size whose trial fits, and says of each trial how it ended.

    Raises:
        BadInputError: If none fits.
    """
    for size in sizes:
        trial = attempt(size)
        say(f"  {size} {'fits' if trial.fits else 'is too large'}: {trial.note}")
        if trial.fits:
            return size
    raise BadInputError(
        f"not even {KEY}={sizes[-1]} fits: {trial.note}; memory.checkpointing=blocks, precision.mode=bf16, "
        "optim.name=sgd or a smaller data.eval_batch_size need less"
    )


def halved(sizes: Sequence[int]) -> list[int]:
    """Returns the largest size, then each time the largest that is at most half of the one before.

    Example:
        >>> halved([1, 2, 3, 4, 6, 12])
        [12, 6, 3, 1]
    """
    chosen = [max(sizes)]
    while smaller := [size for size in sizes if size <= chosen[-1] // 2]:
        chosen.append(max(smaller))
    return chosen[:_MOST_TRIALS]


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
            f"no {KEY} suits data.global_batch_size={batch} on {ranks} rank{'s' * (ranks > 1)} with this "
            f"recipe; raise data.global_batch_size, or give {KEY}"
        )
    return sizes


def trial_recipe(recipe: Recipe, micro_batch_size: int, ranks: int) -> dict[str, Any]:
    """Returns the values of a recipe with the same peak memory in few steps.

    A step of two micro-batches has the same peak as one of many: gradients, and the activations of one. Only
    a tree of sums grows with the step.
    """
    values = recipe.model_dump(mode="json")
    accumulation = recipe.data.global_batch_size // (micro_batch_size * ranks)
    if recipe.parallel.reduction != "tree":
        accumulation = min(accumulation, 2)
    values["data"] |= {
        "micro_batch_size": micro_batch_size,
        "global_batch_size": micro_batch_size * ranks * accumulation,
        "last_batch": "weighted" if recipe.data.last_batch == "weighted" else "cross",
    }
    steps = max(_STEPS, recipe.compile.warm_up + 1)
    return values | {"epochs": 10**9, "max_steps": steps, "evaluation": {"every": "end"}}


def run_trial(recipe: Recipe, local: LocalRanks, micro_batch_size: int, receiver: SignalReceiver) -> Trial:
    """Starts the job's ranks for a few steps, and returns whether they fit.

    Raises:
        BadInputError: If the recipe can't be trained here.
        Interrupted: After a signal.
    """
    said = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="trainer-trial-", ignore_cleanup_errors=True) as folder:
        values = trial_recipe(recipe, micro_batch_size, local.ranks)
        request = {"recipe": values, "folder": folder, "threads": local.threads}
        # What ranks say that run out of memory isn't the user's concern.
        with contextlib.redirect_stderr(said):
            code, _ = launch(_MODULE, request, local, grace_seconds=5.0, output=DEVNULL, receiver=receiver)
        results = [_read(Path(folder, f"rank-{rank}.json")) for rank in range(local.ranks)]
    if receiver.received:
        raise Interrupted(receiver.received[0].name)
    if ran_out := next((one["ran_out"] for one in results if one.get("ran_out")), ""):
        return Trial(False, ran_out)
    if code == EXIT_BAD_INPUT:
        raise BadInputError(said.getvalue().strip().removeprefix("trainer: "))
    if code != EXIT_DONE:
        lines = [line.strip() for line in said.getvalue().splitlines() if line.strip()]
        what = " … ".join(dict.fromkeys((*lines[:1], *lines[-1:]))) or "it printed nothing"
        raise BadInputError(f"{KEY}={micro_batch_size}: the trial failed, but not for lack of memory: {what}")
    return judged(results)


def judged(results: Sequence[Mapping[str, Any]]) -> Trial:
    """Returns whether all ranks have room, by `used` and `total` bytes of their devices."""
    used, total = max(((one["used"], one["total"]) for one in results), key=lambda one: one[0] / one[1])
    note = f"{memory_size(used)} of {memory_size(total)} on the fullest GPU"
    return Trial(used <= (1 - HEADROOM) * total, note)


def _read(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_bytes())) if file.exists() else {}
