"""Probes: jobs of as many ranks as the run will have, in processes of their own that leave nothing behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.config.recipe import Recipe
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, BadInputError
from trainer.host.memory import Room, Watch, read_room
from trainer.launch.launcher import launch
from trainer.launch.signals import Inbox
from trainer.observe.memory import MIB
from trainer.train.tune.micro_batch_size import MOST_PROBES, Found, Probe, ProbeFailed, search, sizes_of
from trainer.train.tune.trial import probe_recipe

_MODULE = "trainer.train.tune.probe"
_GRACE_SECONDS = 5.0
_LEAST_SECONDS = 120.0  # for a probe that has begun: it imports torch, and may compile
_PATIENCE = 4.0  # times the longest so far
BUDGET_SECONDS = 600.0


class Interrupted(Exception):  # noqa: N818  (the outcome of a request)
    """A signal ended the search."""


@dataclass(frozen=True)
class Job:
    """What is to be probed, and how.

    Attributes:
        recipe: With any micro-batch.
        ranks: As many as the run will have.
        threads: Of each rank.
        environment: For the ranks.
        budget_seconds: After so long no larger size is tried.
        room: Tells the memory of the container.
    """

    recipe: Recipe
    ranks: int
    threads: int
    environment: Mapping[str, str] = field(default_factory=dict)
    budget_seconds: float = BUDGET_SECONDS
    room: Callable[[], Room] = read_room


def choose(job: Job, starting: Callable[[int, int], object], done: Callable[[Probe], object]) -> Found:
    """Finds the largest micro-batch that fits.

    Args:
        job: The run.
        starting: Told the number of the probe, from 1 on, and its micro-batch.
        done: Told what it showed.

    Raises:
        BadInputError: If the recipe can't be trained here, whatever the micro-batch.
        ProbeFailed: If a probe failed for another reason than memory.
        Interrupted: After a signal.
    """
    began, count, longest = time.monotonic(), 0, 0.0
    with Inbox() as inbox:

        def one(size: int) -> Probe:
            nonlocal count, longest
            count += 1
            starting(count, size)
            left = job.budget_seconds - (time.monotonic() - began)
            found = run_probe(job, size, inbox, max(left, _LEAST_SECONDS, _PATIENCE * longest))
            longest = max(longest, found.seconds)
            done(found)
            return found

        def affordable(size: int, probes: Sequence[Probe]) -> bool:
            spent = time.monotonic() - began
            known = [probe for probe in probes if probe.fits]
            # At worst the time of a probe grows as the size does.
            expected = known[-1].seconds * max(1.0, size / known[-1].micro_batch_size)
            started = known[0].seconds
            expected = min(expected, started + _samples(job, size) / max(known[-1].samples_per_s, 1e-9))
            return spent + expected <= job.budget_seconds

        return search(sizes_of(job.recipe, job.ranks), one, affordable, MOST_PROBES)


def _samples(job: Job, size: int) -> int:
    data = probe_recipe(job.recipe, size, job.ranks)
    return int(data["data"]["global_batch_size"]) * int(data["max_steps"])


def run_probe(job: Job, micro_batch_size: int, inbox: Inbox, seconds: float = BUDGET_SECONDS) -> Probe:
    """Trains a few micro-batches, and tells whether memory was enough for them.

    Raises:
        BadInputError: If the recipe can't be trained here.
        ProbeFailed: If it failed for another reason than memory.
        Interrupted: After a signal.
    """
    if inbox.received:
        raise Interrupted(inbox.received[0].name)
    began, room = time.monotonic(), job.room()
    allowed = Probe(micro_batch_size, True, 0, room.limit_bytes, room.others_bytes).allowed_bytes
    with tempfile.TemporaryDirectory(prefix="trainer-tune-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        request = {
            "recipe": probe_recipe(job.recipe, micro_batch_size, job.ranks),
            "threads": job.threads,
            "temporary": tempfile.gettempdir(),
            "room": 0 if allowed == float("inf") else max(1, int(allowed)),
        }
        (folder / "request.json").write_text(json.dumps(request))
        nowhere, said = os.open(os.devnull, os.O_WRONLY), io.StringIO()
        try:
            # What a rank that ran out of memory says is kept for the end.
            with (
                contextlib.redirect_stderr(said),
                Watch(lambda: _pids(folder), allowed, seconds) as watch,
            ):
                code = launch(
                    [str(folder)],
                    processes=job.ranks,
                    threads=job.threads,
                    environment={**job.environment, "TMPDIR": temporary},
                    grace_seconds=_GRACE_SECONDS,
                    module=_MODULE,
                    output=nowhere,
                    inbox=inbox,
                )
        finally:
            os.close(nowhere)
        told = [_told(folder, rank) for rank in range(job.ranks)]
    if inbox.received:
        raise Interrupted(inbox.received[0].name)
    took = time.monotonic() - began
    why = next((one["ran_out"] for one in told if one.get("ran_out")), "")
    if not why and watch.killed:
        why = watch.killed + _held(told)
    if not why and "killed by SIGKILL" in said.getvalue():  # by the kernel, or whoever watches the container
        why = "a rank was killed (out of memory?)"
    text = said.getvalue().strip()
    if code == EXIT_BAD_INPUT:
        raise BadInputError(text.removeprefix("trainer: "))
    if code != EXIT_DONE and not why:
        raise ProbeFailed(text)
    speed = min((one.get("samples_per_s", 0.0) for one in told), default=0.0)
    looked = [
        replace(one, samples_per_s=speed, seconds=took) for one in _peaks(micro_batch_size, told, watch, room)
    ]
    tightest = max(looked, key=lambda one: (one.peak_bytes + one.others_bytes) / max(one.limit_bytes, 1))
    if why:
        return replace(tightest, fits=False, note=why)
    return tightest


def _held(told: Sequence[Mapping[str, Any]]) -> str:
    """Who holds memory, as far as a rank can name it; the rest are activations, the loader, and Python."""
    held = {name: size for one in told for name, size in one.get("held", {}).items() if size >= MIB}
    names = sorted(held, key=lambda name: -held[name])
    shares = ", ".join(f"{name} {held[name] / MIB:,.0f} MiB" for name in names)
    return f"; each rank has {shares}" if shares else ""


def _peaks(
    micro_batch_size: int, told: Sequence[Mapping[str, Any]], watch: Watch, room: Room
) -> Iterator[Probe]:
    """For each memory what was in use."""
    # The kernel keeps a rank's own peak, which lies between two looks; files that ranks map are the same.
    own = sum(one.get("resident", 0) - one.get("files", 0) for one in told)
    files = max((one.get("files", 0) for one in told), default=0)
    job = max(watch.peak_bytes, own + files + watch.rest_bytes)
    yield _judged(micro_batch_size, job, room.limit_bytes, room.others_bytes, f"memory ({room.source})")
    for rank, one in enumerate(told):
        if "device" in one:
            yield _judged(micro_batch_size, one["device"], one["device_total"], 0, f"GPU of rank {rank}")


def _judged(micro_batch_size: int, peak: int, limit: int, others: int, where: str) -> Probe:
    one = Probe(micro_batch_size, True, peak, limit, others, where)
    return replace(one, fits=peak <= one.allowed_bytes)


def _told(folder: Path, rank: int) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads((folder / f"rank-{rank}.json").read_bytes())
    except OSError:
        return {}
    return told


def _pids(folder: Path) -> list[int]:
    pids = []
    for file in folder.glob("rank-*.pid"):
        with contextlib.suppress(OSError, ValueError):
            pids.append(int(file.read_text()))
    return pids
