"""`trainer tune RECIPE`: writes the largest micro-batch that fits to tuned.yaml."""

import argparse
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from trainer.config.recipe_file import provisional
from trainer.config.sizes import GIB, MIB
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError, writing
from trainer.host.files import check_replaceable
from trainer.host.limits import read_limits
from trainer.host.memory_room import HEADROOM
from trainer.launch.signals import SignalReceiver
from trainer.observe.conditions import conditions
from trainer.observe.console import warn
from trainer.train.components.task import check_request, device_kind, make_task
from trainer.train.start.local_ranks import plan_local_ranks
from trainer.train.start.tune.job import KEY, Interrupted, Job, because, choice_line, find, run_probe, used
from trainer.train.start.tune.search import Probe, ProbeFailed, micro_batch_sizes
from trainer.train.start.tune.tuned import (
    TunedData,
    check_tuned,
    make_tuned,
    read_tuned,
    settings_of,
    write_tuned,
)
from trainer.version import __version__


def tune(options: argparse.Namespace) -> int:
    """Runs `trainer tune`.

    Returns:
    0 if it is done, or the recipe's micro-batch fits (--check); 1 if it doesn't, or a signal came.

    Raises:
        BadInputError: If nothing fits, or the request is wrong.
    """
    if not 0 < options.seconds < float("inf"):
        raise BadInputError(f"--seconds {options.seconds}: give a number above 0")
    if options.tuned is not None and not options.check:
        raise BadInputError("--tuned is for --check; to tune again leave it out")
    tuned = None if options.tuned is None else read_tuned(options.tuned)
    settings = [*(settings_of(tuned) if tuned else []), *options.set]
    recipe, auto = provisional(options.recipe, settings)
    local = plan_local_ranks(recipe, options.gpus, options.nproc_per_node)
    if tuned:
        check_tuned(tuned, options.tuned, recipe, local.ranks, device_kind(recipe))
    job = Job(recipe, local, options.seconds)
    try:
        if options.check:
            if auto:
                raise BadInputError(
                    f"--check: {KEY}=auto is chosen at each start, so there is nothing to check; give "
                    f"--set {KEY}=N, or --tuned tuned.yaml"
                )
            return _check(job)
        check_request(recipe, make_task(recipe), 1)  # not found by a probe, as a name of no model is
        return _tune(job, options.recipe, settings, options.out)
    except Interrupted as interrupted:
        warn(f"stopped by {interrupted}: nothing was chosen, and nothing is left behind")
        return EXIT_FAILED


def _check(job: Job) -> int:
    """Checks whether the recipe's own micro-batch fits; returns the exit code."""
    size = job.recipe.data.micro_batch_size
    check_request(job.recipe, make_task(job.recipe), job.ranks)
    with SignalReceiver() as receiver:
        try:
            one = run_probe(job, size, receiver)
        except ProbeFailed as failed:
            raise BadInputError(f"{KEY}={size}: the probe failed: {failed}") from failed
    spare = one.allowed_bytes - one.peak_bytes
    by = "" if spare == float("inf") else f", {abs(spare) / MIB:,.0f} MiB "
    bound = f" the {1 - HEADROOM:.0%} that may be used" if by else ""
    if one.fits:
        print(f"{KEY}={size} fits: {used(one)}{by}{'below' if by else ''}{bound}")
        return EXIT_DONE
    # A job that was ended for it wanted more than it was seen with.
    over = f"{', at least' if one.note else ','}{by.removeprefix(',')}above{bound}" if spare < 0 else ""
    print(f"{KEY}={size} doesn't fit: {used(one)}{over}{because(one)}; trainer tune finds one that does")
    return EXIT_FAILED


def _tune(job: Job, name: str, settings: list[str], out: Path) -> int:
    sizes = micro_batch_sizes(job.recipe, job.ranks)
    with writing(f"--out {out}"):
        check_replaceable(out)
    kind, console = device_kind(job.recipe), Console()
    print(
        f"{conditions()}\n{name}, {job.ranks} x {kind.upper()}: the largest of {len(sizes)} micro-batches, "
        f"{sizes[0]} to {sizes[-1]}, that leaves {HEADROOM:.0%} of the memory free, keeping "
        f"data.global_batch_size={job.recipe.data.global_batch_size}\n"
        "| micro-batch | fits | job's peak | others | limit | samples/s | seconds |\n" + "|---" * 7 + "|",
        flush=True,
    )

    def show(one: Probe) -> None:
        console.print(_row(one), highlight=False, markup=False, soft_wrap=True)

    with console.status("probing"):
        chosen, found = find(job, show)
    print(choice_line(chosen, found, job))
    limits = read_limits()
    evidence = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "conditions": conditions(),
        "trainer": __version__,
        "limits": {**asdict(limits), "sources": dict(limits.sources)},
        "threads": job.local.threads,
        "headroom": HEADROOM,
        "probes": [{key: _rounded(value) for key, value in asdict(one).items()} for one in found.probes],
        "untried": found.untried,
    }
    choice = TunedData(micro_batch_size=chosen.micro_batch_size)
    write_tuned(out, make_tuned(job.recipe, name, job.ranks, kind, choice, evidence))
    rest = [setting for setting in settings if setting.partition("=")[0] != KEY]
    print(f"  written to {out}: {shlex.join(['trainer', 'train', name, *rest, '--tuned', str(out)])}")
    return EXIT_DONE


def _row(one: Probe) -> str:
    sizes = " | ".join(
        f"{size / GIB:.2f} GiB" for size in (one.peak_bytes, one.others_bytes, one.limit_bytes)
    )
    speed = f"{one.samples_per_s:,.0f}" if one.samples_per_s else ""
    fits = "yes" if one.fits else "no"
    return f"| {one.micro_batch_size} | {fits} | {sizes} | {speed} | {one.seconds:.1f} | {one.note}".rstrip()


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value
