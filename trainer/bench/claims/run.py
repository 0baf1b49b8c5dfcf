"""Measures claims, one ablation after another, for as long as there is time."""

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from trainer.bench.claims.catalogue import ABLATIONS, CLAIMS, in_turn
from trainer.bench.claims.claim import Claim, Row, compare
from trainer.bench.claims.measuring import Measurement, Size
from trainer.bench.claims.needs import first_missing
from trainer.errors import BadInputError
from trainer.suggest import nearest


class Extent(NamedTuple):
    """How much is measured: `Size` without a folder, the seconds of all, and the part of an ablation's."""

    rounds: int
    turn_s: float
    images: int
    limit_s: float
    part: float


FULL = Extent(rounds=11, turn_s=0.3, images=256, limit_s=570.0, part=1.0)
QUICK = Extent(rounds=6, turn_s=0.02, images=48, limit_s=55.0, part=1 / 6)


def select(only: str) -> list[Claim]:
    """The claims that a comma-separated list names, by themselves or by their ablation; all if it is empty.

    Raises:
        BadInputError: For a name that is neither.
    """
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    known = [*(claim.name for claim in CLAIMS), *ABLATIONS]
    for name in wanted:
        if name not in known:
            raise BadInputError(
                f"--only: no claim is called '{name}'{nearest(name, known)} (there are: "
                f"{', '.join(claim.name for claim in CLAIMS)})"
            )
    return [claim for claim in CLAIMS if not wanted or claim.name in wanted or claim.ablation in wanted]


def run_claims(
    claims: Sequence[Claim], quick: bool, scratch: Path, say: Callable[[str], object]
) -> list[Row]:
    """Measures what can be measured here.

    Args:
        claims: Which.
        quick: A tenth of the work; what takes long by its nature is left out.
        scratch: An empty folder.
        say: Is told which ablation comes next.

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
        why = ""
        if quick and not ablation.quick:
            why = "takes longer than --quick allows"
        elif time.monotonic() - began + ablation.seconds * extent.part > extent.limit_s and len(rows) > 0:
            why = f"no time was left of {extent.limit_s:g} s: --only {name}"
        found: Measurement | str = why
        if possible and not why:
            say(f"{name} ({time.monotonic() - began:.0f} s so far)")
            found = _measured(name, {side for claim in possible for side in (claim.base, claim.tried)}, size)
        for claim in own:
            rows[claim.name] = _row(claim, reasons[claim.name] or found)
    return [rows[claim.name] for claim in claims]


def _measured(name: str, sides: Collection[str], size: Size) -> Measurement | str:
    """What an ablation found, or why it found nothing."""
    try:
        return ABLATIONS[name].measure(sorted(sides), size)
    except (BadInputError, RuntimeError, OSError) as error:  # torch.OutOfMemoryError is a RuntimeError
        return f"failed: {(str(error) or type(error).__name__).splitlines()[0]}"
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _row(claim: Claim, found: Measurement | str) -> Row:
    if isinstance(found, str):
        return Row(claim, reason=found)
    if claim.quantity not in found.series:
        return Row(claim, found.conditions, reason=f"no figure of {claim.quantity} on this machine")
    measured = compare(found.series[claim.quantity], claim.base, claim.tried)
    return Row(claim, found.conditions, measured)
