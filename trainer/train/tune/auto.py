"""`data.micro_batch_size: auto`: a number in its place, before there are ranks."""

from typing import Any

from trainer.errors import BadInputError
from trainer.train.resume import Stored
from trainer.train.tune.job import Job, choose
from trainer.train.tune.micro_batch_size import Found, Probe, ProbeFailed

KEY = "data.micro_batch_size"


def setting(micro_batch_size: int) -> str:
    """As an argument of --set."""
    return f"{KEY}={micro_batch_size}"


def stored_setting(stored: Stored | None) -> str | None:
    """What a run was begun with, as an argument of --set; None if there is no run."""
    number = (stored.config.get("data") or {}).get("micro_batch_size") if stored is not None else None
    return setting(number) if isinstance(number, int) else None


def for_ranks(stored: Stored | None) -> str:
    """The same for a rank that nobody chose for.

    Raises:
        BadInputError: If there is no run.
    """
    found = stored_setting(stored)
    if found is None:
        raise BadInputError(
            f"{KEY}=auto is chosen before there are ranks, which torchrun has started here: use `trainer "
            "train` alone, or `trainer tune RECIPE` and then --tuned tuned.yaml"
        )
    return found


def chosen_setting(job: Job) -> str:
    """Probes what fits, says so, and returns it as an argument of --set.

    Raises:
        BadInputError: If nothing fits, or the recipe can't be trained here.
        Interrupted: After a signal.
    """
    print(f"{KEY}=auto: training a few of each size, to see what fits", flush=True)
    found = find(job)
    print(f"  {summary(found, job)}", flush=True)
    assert found.chosen is not None
    return setting(found.chosen.micro_batch_size)


def find(job: Job, *watchers: Any) -> Found:
    """Probes what fits.

    Args:
        job: The run.
        watchers: As `choose` takes them.

    Raises:
        BadInputError: If nothing fits, or the recipe can't be trained here.
        Interrupted: After a signal.
    """
    starting, done = watchers or (lambda *_: None, lambda *_: None)
    try:
        found = choose(job, starting, done)
    except ProbeFailed as failed:
        raise BadInputError(f"{KEY}: a probe failed, and not for memory: {_end(str(failed))}") from failed
    if found.chosen is None:
        raise BadInputError(nothing_fits(found.probes[-1]))
    return found


def nothing_fits(smallest: Probe) -> str:
    """What to do about it."""
    return (
        f"not even {KEY}={smallest.micro_batch_size} fits: {used(smallest)}{_because(smallest)}; "
        "memory.checkpointing=blocks, precision.mode=bf16, optim.name=sgd, fewer data.workers or a smaller "
        "data.eval_batch_size need less"
    )


def summary(found: Found, job: Job) -> str:
    """The choice and why, as one line."""
    one = found.chosen
    assert one is not None
    steps = job.recipe.data.global_batch_size // (one.micro_batch_size * job.ranks)
    probes = f"{len(found.probes)} probe{'s' if len(found.probes) > 1 else ''}"
    took = sum(probe.seconds for probe in found.probes)
    text = (
        f"{KEY}={one.micro_batch_size}: {used(one)}; accumulation {steps} keeps data.global_batch_size="
        f"{job.recipe.data.global_batch_size} ({probes}, {took:.0f} s)"
    )
    if found.untried:
        text += f"; {found.untried[0]} and more were not tried: they would have taken too long"
    return text


def used(probe: Probe) -> str:
    """How full the memory was."""
    if not probe.limit_bytes:
        return f"{_size(probe.peak_bytes)} (no limit is known here)"
    others = f" beside {_size(probe.others_bytes)} of others" if probe.others_bytes else ""
    return f"{_size(probe.peak_bytes)}{others}, of {_size(probe.limit_bytes)} of {probe.where}"


def _because(probe: Probe) -> str:
    return f" ({probe.note})" if probe.note else ""


def _size(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"


def _end(text: str) -> str:
    """The first and the last line of what a job said."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " … ".join(dict.fromkeys((*lines[:1], *lines[-1:]))) or "it said nothing"
