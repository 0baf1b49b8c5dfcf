"""Probes: jobs with as many ranks as the run will have, and the micro-batch size that they choose."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.recipe import Recipe
from trainer.config.sizes import MIB
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, BadInputError
from trainer.host.memory_room import MemoryGuard, Room, read_room
from trainer.launch.launcher import LocalRanks, launch
from trainer.launch.signals import SignalReceiver
from trainer.observe.console import say
from trainer.observe.text import memory_size
from trainer.runs.manifest import Manifest
from trainer.train.start.tune.search import (
    MOST_PROBES,
    Probe,
    ProbeFailed,
    SizeSearchResult,
    micro_batch_sizes,
    search,
)
from trainer.train.start.tune.trial import probe_recipe

_MODULE = "trainer.train.start.tune.probe"
_GRACE_SECONDS = 5.0
_LEAST_SECONDS = 120.0  # for each probe, which imports torch and may compile
_PATIENCE = 4.0  # times the longest so far
BUDGET_SECONDS = 600.0


class Interrupted(Exception):  # noqa: N818  (the outcome of a request)
    """End of a search by a signal, which its text names."""


@dataclass(frozen=True)
class Job:
    """Configuration, ranks and limits of probes.

    Attributes:
        recipe: The configuration; its micro-batch doesn't matter.
        local: Plan of the run's ranks on this host.
        budget_seconds: Seconds after which no larger size is tried.
        room: Reads the memory of the container.
    """

    recipe: Recipe
    local: LocalRanks
    budget_seconds: float = BUDGET_SECONDS
    room: Callable[[], Room] = read_room

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.local.ranks


def choose(job: Job, done: Callable[[Probe], object]) -> SizeSearchResult:
    """Finds the largest micro-batch that fits.

    Args:
        job: Configuration and ranks.
        done: Called with each probe.

    Raises:
        BadInputError: If the recipe can't be trained here, whatever the micro-batch.
        ProbeFailed: If a probe failed for another reason than memory.
        Interrupted: After a signal.
    """
    began, longest = time.monotonic(), 0.0
    with SignalReceiver() as receiver:

        def one(size: int) -> Probe:
            nonlocal longest
            left = job.budget_seconds - (time.monotonic() - began)
            found = run_probe(job, size, receiver, max(left, _LEAST_SECONDS, _PATIENCE * longest))
            longest = max(longest, found.seconds)
            done(found)
            return found

        def affordable(size: int, probes: Sequence[Probe]) -> bool:
            known = [probe for probe in probes if probe.fits]
            data = probe_recipe(job.recipe, size, job.ranks)
            samples = int(data["data"]["global_batch_size"]) * int(data["max_steps"])
            # Speed grows with the size, so time grows at most in proportion to the size.
            by_speed = known[0].seconds + samples / max(known[-1].samples_per_s, 1e-9)
            by_size = known[-1].seconds * size / known[-1].micro_batch_size
            return time.monotonic() - began + min(by_speed, by_size) <= job.budget_seconds

        return search(micro_batch_sizes(job.recipe, job.ranks), one, affordable, MOST_PROBES)


def run_probe(
    job: Job, micro_batch_size: int, receiver: SignalReceiver, seconds: float = BUDGET_SECONDS
) -> Probe:
    """Trains a few micro-batches of a size, and measures their memory and speed.

    Raises:
        BadInputError: If the recipe can't be trained here.
        ProbeFailed: If it failed for another reason than memory.
        Interrupted: After a signal.
    """
    room = job.room()
    ended = _run(job, probe_recipe(job.recipe, micro_batch_size, job.ranks), room, receiver, seconds)
    speed = min((one.get("samples_per_s", 0.0) for one in ended.results), default=0.0)
    looked = [
        replace(one, samples_per_s=speed, seconds=ended.seconds)
        for one in _peaks(micro_batch_size, ended.results, ended.watch, room)
    ]
    tightest = max(looked, key=lambda one: (one.peak_bytes + one.others_bytes) / max(one.limit_bytes, 1))
    return replace(tightest, fits=False, note=ended.why) if ended.why else tightest


class _Ended(NamedTuple):
    """End of a job.

    Attributes:
        results: Results of each rank.
        watch: Measured memory of the job.
        why: Reason why memory or time didn't suffice, or "".
        seconds: Duration, start included.
    """

    results: list[dict[str, Any]]
    watch: MemoryGuard
    why: str
    seconds: float


def _run(
    job: Job,
    recipe: dict[str, Any],
    room: Room,
    receiver: SignalReceiver,
    seconds: float,
) -> _Ended:
    if receiver.received:
        raise Interrupted(receiver.received[0].name)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trainer-tune-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        request = {
            "recipe": recipe,
            "folder": temporary,
            "threads": job.local.threads,
            "temporary": tempfile.gettempdir(),
            "room": max(1, int(room.spare_bytes)) if room.limit_bytes else 0,
        }
        nowhere, stderr = os.open(os.devnull, os.O_WRONLY), io.StringIO()
        try:
            # Output of a rank that ran out of memory is kept for the end.
            with (
                contextlib.redirect_stderr(stderr),
                MemoryGuard(lambda: _pids(folder), room.spare_bytes, seconds) as watch,
            ):
                code = launch(
                    _MODULE,
                    request,
                    job.local._replace(environment={**job.local.environment, "TMPDIR": temporary}),
                    grace_seconds=_GRACE_SECONDS,
                    output=nowhere,
                    receiver=receiver,
                )
        finally:
            os.close(nowhere)
        results = [_result(folder, rank) for rank in range(job.ranks)]
    if receiver.received:
        raise Interrupted(receiver.received[0].name)
    why = next((one["ran_out"] for one in results if one.get("ran_out")), "")
    if not why and watch.killed:
        why = watch.killed + _held(results)
    if not why and "killed by SIGKILL" in stderr.getvalue():  # by the kernel, or the container's supervisor
        why = "a rank was killed (out of memory?)"
    text = stderr.getvalue().strip()
    if code == EXIT_BAD_INPUT:
        raise BadInputError(text.removeprefix("trainer: "))
    if code != EXIT_DONE and not why:
        raise ProbeFailed(text)
    return _Ended(results, watch, why, time.monotonic() - began)


def _held(results: Sequence[Mapping[str, Any]]) -> str:
    """Lists the known holders of memory: all but activations, the loader and Python."""
    held = {name: size for one in results for name, size in one.get("held", {}).items() if size >= MIB}
    names = sorted(held, key=lambda name: -held[name])
    sizes = ", ".join(f"{name} {held[name] / MIB:,.0f} MiB" for name in names)
    return f"; each rank has {sizes}" if sizes else ""


def _peaks(
    micro_batch_size: int, results: Sequence[Mapping[str, Any]], watch: MemoryGuard, room: Room
) -> Iterator[Probe]:
    """Yields a probe's result for the host's memory and each GPU."""

    def judged(peak: int, limit: int, others: int, where: str) -> Probe:
        one = Probe(micro_batch_size, True, peak, limit, others, where)
        return replace(one, fits=peak <= one.allowed_bytes)

    # The kernel records each rank's peak, also between two readings; files that ranks map count once.
    own = sum(one.get("resident", 0) - one.get("files", 0) for one in results)
    files = max((one.get("files", 0) for one in results), default=0)
    peak = max(watch.peak_bytes, own + files + watch.rest_bytes)
    yield judged(peak, room.limit_bytes, room.others_bytes, f"memory ({room.source})")
    for rank, one in enumerate(results):
        if "device" in one:
            yield judged(one["device"], one["device_total"], 0, f"GPU of rank {rank}")


def _result(folder: Path, rank: int) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads((folder / f"rank-{rank}.json").read_bytes())
    except OSError:
        return {}
    return result


def _pids(folder: Path) -> list[int]:
    pids = []
    for file in folder.glob("rank-*.pid"):
        with contextlib.suppress(OSError, ValueError):
            pids.append(int(file.read_text()))
    return pids


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
