"""`trainer tune RECIPE`: the largest micro-batch that fits, with its evidence, in tuned.yaml."""

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trainer.config.recipe_file import load_recipe, provisional
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError
from trainer.host.limits import read_limits
from trainer.host.memory import HEADROOM
from trainer.launch.signals import Inbox
from trainer.observe.conditions import conditions
from trainer.observe.console import warn
from trainer.train.local_ranks import plan_local_ranks
from trainer.train.run import check_request, device_kind, make_task
from trainer.train.tune.auto import KEY, find, summary, used
from trainer.train.tune.job import Interrupted, Job, run_probe
from trainer.train.tune.loader import LoaderChoice, choose_loader
from trainer.train.tune.micro_batch_size import MOST_PROBES, Found, Probe, ProbeFailed, as_fast, sizes_of
from trainer.train.tune.tuned import TunedData, check_tuned, make_tuned, read_tuned, settings_of, write_tuned
from trainer.version import __version__

Say = Callable[[str], None]


def tune(options: argparse.Namespace) -> int:
    """Does what `trainer tune` was asked for.

    Returns:
        0 done, or the recipe's micro-batch fits (--check); 1 it doesn't, or a signal came.

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
    ranks, threads, environment = plan_local_ranks(recipe, options.gpus, options.ranks)
    if tuned:
        check_tuned(tuned, options.tuned, recipe, ranks, device_kind(recipe))
    job = Job(recipe, ranks, threads, environment, options.seconds)
    try:
        if options.check:
            if auto:
                raise BadInputError(
                    f"--check: {KEY}=auto is chosen anew at each start, so there is nothing to check; give "
                    f"--set {KEY}=N, or --tuned tuned.yaml"
                )
            return _check(job)
        check_request(recipe, make_task(recipe), 1)  # not found by a probe, as a name of no model is
        return _tune(job, options.recipe, settings, options.out)
    except Interrupted as interrupted:
        warn(f"stopped by {interrupted}: nothing was chosen, and nothing is left behind")
        return EXIT_FAILED


def _check(job: Job) -> int:
    """Whether the recipe's own micro-batch fits."""
    check_request(job.recipe, make_task(job.recipe), job.ranks)
    with Inbox() as inbox:
        try:
            one = run_probe(job, job.recipe.data.micro_batch_size, inbox)
        except ProbeFailed as failed:
            raise BadInputError(
                f"{KEY}={job.recipe.data.micro_batch_size}: the probe failed: {failed}"
            ) from failed
    spare = one.allowed_bytes - one.peak_bytes
    by = "" if spare == float("inf") else f", {abs(spare) / (1 << 20):,.0f} MiB "
    if one.fits:
        print(f"{KEY}={one.micro_batch_size} fits: {used(one)}{by}{'below' if by else ''}{_bound(by)}")
        return EXIT_DONE
    why = f" ({one.note})" if one.note else ""
    over = f"{', at least' if one.note else ','}{by.removeprefix(',')}above{_bound(by)}" if spare < 0 else ""
    print(
        f"{KEY}={one.micro_batch_size} doesn't fit: {used(one)}{over}{why}; trainer tune finds one that does"
    )
    return EXIT_FAILED


def _bound(by: str) -> str:
    return f" the {1 - HEADROOM:.0%} that may be used" if by else ""


def _tune(job: Job, name: str, settings: list[str], out: Path) -> int:
    sizes = sizes_of(job.recipe, job.ranks)
    if not (out.parent.is_dir() and os.access(out.parent, os.W_OK)):  # before minutes are spent
        raise BadInputError(f"--out {out}: can't be written; give a file in a folder that can be")
    kind = device_kind(job.recipe)
    print(
        f"{conditions()}\n{name}, {job.ranks} x {kind.upper()}: the largest of {len(sizes)} micro-batches, "
        f"{sizes[0]} to {sizes[-1]}, that leaves {HEADROOM:.0%} of the memory free, keeping "
        f"data.global_batch_size={job.recipe.data.global_batch_size}",
        flush=True,
    )
    with _progress() as (starting, done):
        found = find(job, starting, done)
    assert found.chosen is not None
    print(summary(found, job))
    if faster := as_fast(found):
        print(
            f"  {KEY}={faster.micro_batch_size} was as fast ({faster.samples_per_s:,.0f} samples/s against "
            f"{found.chosen.samples_per_s:,.0f}, each measured once)"
        )
    choice = TunedData(micro_batch_size=found.chosen.micro_batch_size)
    evidence = _evidence(job, found)
    settings = [*settings, f"{KEY}={found.chosen.micro_batch_size}"]
    loader: LoaderChoice | None = choose_loader(load_recipe(name, settings), name, settings, job.ranks)
    if loader:
        choice = TunedData(
            micro_batch_size=found.chosen.micro_batch_size, workers=loader.workers, prefetch=loader.prefetch
        )
        evidence["loader"] = loader.evidence
        print("\n".join(f"  {line}" for line in loader.evidence))
    write_tuned(out, make_tuned(job.recipe, name, job.ranks, kind, choice, evidence))
    print(f"  written to {out}: trainer train {name} --tuned {out}")
    return EXIT_DONE


@contextlib.contextmanager
def _progress() -> Iterator[tuple[Callable[[int, int], None], Callable[[Probe], None]]]:
    """Tells of a probe that starts, and of one that is done: a bar and a table, or a table alone."""
    console = Console()
    print("| micro-batch | fits | job's peak | others | limit | samples/s | seconds |\n" + "|---" * 7 + "|")

    def row(one: Probe) -> str:
        sizes = " | ".join(
            f"{size / (1 << 30):.2f} GiB" for size in (one.peak_bytes, one.others_bytes, one.limit_bytes)
        )
        speed = f"{one.samples_per_s:,.0f}" if one.samples_per_s else ""
        text = (
            f"| {one.micro_batch_size} | {'yes' if one.fits else 'no'} | {sizes} | {speed} | "
            f"{one.seconds:.1f} |"
        )
        return text + (f" {one.note}" if one.note else "")

    if not console.is_terminal:
        yield lambda _, __: None, lambda one: print(row(one), flush=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
    ) as bar:
        task = bar.add_task("probes", total=MOST_PROBES)

        def done(one: Probe) -> None:
            bar.console.print(row(one), highlight=False, markup=False, soft_wrap=True)
            bar.advance(task)

        yield lambda _, size: bar.update(task, description=f"micro-batch {size}"), done


def _evidence(job: Job, found: Found) -> dict[str, Any]:
    limits = read_limits()
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "conditions": conditions(),
        "trainer": __version__,
        "limits": {
            "cpus": limits.cpus,
            "memory_bytes": limits.memory_bytes,
            "shm_bytes": limits.shm_bytes,
            "sources": dict(limits.sources),
        },
        "threads": job.threads,
        "headroom": HEADROOM,
        "probes": [
            {
                key: round(value, 3) if isinstance(value, float) else value
                for key, value in asdict(one).items()
            }
            for one in found.probes
        ],
        "untried": found.untried,
    }
