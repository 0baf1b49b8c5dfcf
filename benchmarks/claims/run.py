"""Measures claims, one ablation after another, until the time is up."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.claims.catalogue import ABLATIONS, CLAIMS, in_turn
from benchmarks.claims.claim import Claim, Row, compare
from benchmarks.claims.measuring import Measurement, Size
from benchmarks.claims.needs import first_missing
from benchmarks.options import picked
from trainer.errors import BadInputError

_LEAST_S = 20.0  # for one ablation, however late it is
_ENDS_WITHIN = 5.0  # seconds, after it has answered

Measure = Callable[[str, Collection[str], Size, float], Measurement | str]


class Extent(NamedTuple):
    """Extent of a run: `Size` without a folder, the seconds in total, and an ablation's part of them."""

    rounds: int
    turn_s: float
    images: int
    limit_s: float
    part: float


FULL = Extent(rounds=11, turn_s=0.3, images=128, limit_s=570.0, part=1.0)
QUICK = Extent(rounds=6, turn_s=0.02, images=32, limit_s=55.0, part=1 / 6)


def select(only: str) -> list[Claim]:
    """The claims that a comma-separated list names, by themselves or by their ablation; all if it is empty.

    Raises:
        BadInputError: For a name that is neither.
    """
    known = dict.fromkeys([*(claim.name for claim in CLAIMS), *ABLATIONS])
    wanted = picked(only, known, "--only", "claim or ablation")
    return [claim for claim in CLAIMS if not wanted or claim.name in wanted or claim.ablation in wanted]


def measured_apart(name: str, sides: Collection[str], size: Size, within: float) -> Measurement | str:
    """Measures an ablation in a process of its own; returns the reason if there is no result within its
    seconds.

    In a process where nothing has been computed yet workers can be forked, as a rank's are, and what one
    ablation leaves behind (threads, memory, caches) is none of the next one's business.
    """
    # A fork has imported all this already; it can't be had of a process that has touched a GPU.
    touched = torch.cuda.is_initialized() or sys.platform != "linux"
    context = multiprocessing.get_context("spawn" if touched else "fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(  # type: ignore[attr-defined]
        target=_measure, args=(theirs, name, sorted(sides), size), name=name
    )
    process.start()
    theirs.close()
    try:
        if not ours.poll(within):
            return f"did not end within {within:.0f} s"
        found: Measurement | str = ours.recv()
    except EOFError:
        process.join(_ENDS_WITHIN)
        return f"failed: its process ended with code {process.exitcode}"
    else:
        process.join(_ENDS_WITHIN)
        return found
    finally:
        if process.is_alive() and process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # it may not have had the time to lead a group
            process.join()


def _measure(answer: Connection, name: str, sides: Sequence[str], size: Size) -> None:
    os.setpgid(0, 0)  # whatever it starts can be ended with it
    try:
        answer.send(ABLATIONS[name].measure(sides, size))
    except Exception as error:
        words = (str(error) or type(error).__name__).splitlines()[0]
        known = isinstance(error, BadInputError | RuntimeError | OSError)
        answer.send(f"failed: {words}" if known else f"failed: {type(error).__name__}: {words}")


def run_claims(
    claims: Sequence[Claim],
    quick: bool,
    scratch: Path,
    say: Callable[[str], object],
    measure: Measure = measured_apart,
) -> list[Row]:
    """Measures what can be measured here.

    Args:
        claims: Which.
        quick: A tenth of the work; what takes long by its nature is left out.
        scratch: An empty folder.
        say: Is told which ablation comes next.
        measure: Measures one.

    Returns:
        A row for each claim, in their order.
    """
    extent, began = QUICK if quick else FULL, time.monotonic()
    size = Size(extent.rounds, extent.turn_s, extent.images, scratch)
    rows: dict[str, Row] = {}
    for name in in_turn({claim.ablation for claim in claims}):
        ablation, own = ABLATIONS[name], [claim for claim in claims if claim.ablation == name]
        reasons = {claim.name: first_missing((*ablation.needs, *claim.needs)) for claim in own}
        possible = [claim for claim in own if not reasons[claim.name]]
        spent = time.monotonic() - began
        found: Measurement | str = ""
        if quick and not ablation.quick:
            found = "takes longer than --quick allows"
        elif rows and spent + ablation.seconds * extent.part > extent.limit_s:
            found = f"no time was left of {extent.limit_s:g} s: --only {name}"
        elif possible:
            say(f"{name} ({spent:.0f} s so far)")
            sides = {side for claim in possible for side in (claim.base, claim.tried)}
            found = measure(name, sides, size, max(extent.limit_s - spent, _LEAST_S))
        for claim in own:
            rows[claim.name] = _row(claim, reasons[claim.name] or found)
    return [rows[claim.name] for claim in claims]


def _row(claim: Claim, found: Measurement | str) -> Row:
    if isinstance(found, str):
        return Row(claim, reason=found)
    if claim.quantity not in found.series:
        return Row(claim, found.conditions, reason=f"no figure of {claim.quantity} on this machine")
    measured = compare(found.series[claim.quantity], claim.base, claim.tried)
    return Row(claim, found.conditions, measured)
