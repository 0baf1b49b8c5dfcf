"""`data.micro_batch_size: auto`: the micro-batch size is chosen by probes before the ranks start."""

from collections.abc import Callable

from trainer.errors import BadInputError
from trainer.observe.console import say
from trainer.observe.text import memory_size
from trainer.runs.manifest import Manifest
from trainer.train.start.tune.job import Job, choose
from trainer.train.start.tune.search import Probe, ProbeFailed, SizeSearchResult

KEY = "data.micro_batch_size"


def stored_setting(stored: Manifest | None) -> str | None:
    """Returns the micro-batch size that a run began with, as an argument of --set.

    Args:
        stored: Manifest of the run; None if there is none yet.

    Returns:
        None without a run, or if its manifest has no number.
    """
    number = (stored.config.get("data") or {}).get("micro_batch_size") if stored is not None else None
    return f"{KEY}={number}" if isinstance(number, int) else None


def for_ranks(stored: Manifest | None) -> str:
    """Returns the micro-batch size that a run began with, for ranks that torchrun started.

    Raises:
        BadInputError: If there is no run whose size could be taken: a rank can't probe.
    """
    found = stored_setting(stored)
    if found is None:
        raise BadInputError(
            f"{KEY}=auto is chosen before ranks start, and torchrun has started them already: use `trainer "
            "train` without it, or `trainer tune RECIPE` and then --tuned tuned.yaml"
        )
    return found


def chosen_setting(job: Job) -> str:
    """Finds the largest micro-batch that fits in memory, prints it, and returns it as an argument of --set.

    Raises:
        BadInputError: If nothing fits, or the recipe can't be trained here.
        Interrupted: After a signal.
    """
    say(f"{KEY}=auto: training a few micro-batches of each size, to see what fits")
    chosen, found = find(job, lambda _: None)
    say(f"  {choice_line(chosen, found, job)}")
    return f"{KEY}={chosen.micro_batch_size}"


def find(job: Job, done: Callable[[Probe], object]) -> tuple[Probe, SizeSearchResult]:
    """Finds the largest micro-batch that fits in memory; returns its probe, and the result of the search.

    Args:
        job: The ranks and configuration to probe with.
        done: Called with each probe when it is done.

    Raises:
        BadInputError: If nothing fits, or the recipe can't be trained here.
        Interrupted: After a signal.
    """
    try:
        found = choose(job, done)
    except ProbeFailed as failed:
        lines = [line.strip() for line in str(failed).splitlines() if line.strip()]
        output = " … ".join(dict.fromkeys((*lines[:1], *lines[-1:]))) or "it printed nothing"
        raise BadInputError(f"{KEY}: a probe failed, but not for lack of memory: {output}") from failed
    if found.chosen is None:
        smallest = found.probes[-1]
        raise BadInputError(
            f"not even {KEY}={smallest.micro_batch_size} fits: {used(smallest)}{because(smallest)}; "
            "memory.checkpointing=blocks, precision.mode=bf16, optim.name=sgd, fewer data.workers or a "
            "smaller data.eval_batch_size need less"
        )
    return found.chosen, found


def choice_line(chosen: Probe, found: SizeSearchResult, job: Job) -> str:
    """Returns a line with the chosen size, its memory and accumulation, and the cost of the search."""
    batch = job.recipe.data.global_batch_size
    accumulation = batch // (chosen.micro_batch_size * job.ranks)
    probes = f"{len(found.probes)} probe{'s' if len(found.probes) > 1 else ''}"
    took = sum(probe.seconds for probe in found.probes)
    text = (
        f"{KEY}={chosen.micro_batch_size}: {used(chosen)}; accumulation {accumulation} keeps "
        f"data.global_batch_size={batch} ({probes}, {took:.0f} s)"
    )
    if found.untried:
        one = f"{found.untried[0]} was not tried: it"
        several = f"{found.untried[0]} and more were not tried: they"
        text += f"; {one if len(found.untried) == 1 else several} would have taken too long"
    return text


def used(probe: Probe) -> str:
    """Describes a probe's memory: its peak, the use of other processes before it, and the limit."""
    if not probe.limit_bytes:
        return f"{memory_size(probe.peak_bytes)} (no limit is known here)"
    others = f" beside {memory_size(probe.others_bytes)} of others" if probe.others_bytes else ""
    return f"{memory_size(probe.peak_bytes)}{others}, of {memory_size(probe.limit_bytes)} of {probe.where}"


def because(probe: Probe) -> str:
    """Returns a probe's note, why it doesn't fit other than by its peak, in brackets; "" without one."""
    return f" ({probe.note})" if probe.note else ""
