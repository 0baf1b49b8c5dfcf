"""Histories of runs whose number of ranks changes again and again; for `make chaos`.

With parallel.reduction=tree each must end with the bits of the run that one rank did alone.
"""

import mmap
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from tests import chaos
from tests.helpers.late import import_late
from tests.helpers.ports import free_port
from trainer.config.recipe import Recipe
from trainer.distributed import consensus
from trainer.errors import EXIT_FAILED, EXIT_REQUEUE

_MOST_CHANGES = 4


def kinds() -> list[dict[str, Any]]:
    """Returns kinds like `chaos.kinds`, with steps that four ranks can divide."""
    return [
        {**kind, "gradient_accumulation_steps": 4 << number % 2} for number, kind in enumerate(chaos.kinds())
    ]


def recipe_of(kind: dict[str, Any]) -> Recipe:
    """Returns the recipe of `chaos.recipe_of`, with the tree reduction."""
    recipe = chaos.recipe_of(kind)
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"reduction": "tree"})})


def history(recipe: Recipe, folder: Path, seconds: float, random_: random.Random) -> list[str]:
    """Trains a run to its end on changing numbers of ranks; returns each number and how it was left."""
    told, last = list[str](), 0
    while True:
        last = random_.choice([size for size in (1, 2, 4) if size != last])
        cutting = len(told) < _MOST_CHANGES
        number = signal.SIGKILL if random_.random() < 0.3 else signal.SIGTERM
        left = attempt(recipe, folder, last, seconds * last, random_, number if cutting else None)
        told.append(f"{last}{'!' if left.place and number == signal.SIGKILL else ''}")
        if left.finished:
            return told


class Left(NamedTuple):
    """End of an attempt: whether it was through, and its phase when it was cut, or ""."""

    finished: bool
    place: str


def attempt(
    recipe: Recipe,
    folder: Path,
    size: int,
    seconds: float,
    random_: random.Random,
    number: signal.Signals | None,
) -> Left:
    """Trains on so many ranks; sends `number` at a random moment, SIGKILL to all, another to any one of them.

    Args:
        seconds: What the training takes about.

    Raises:
        AssertionError: If a rank ended as none should.
    """
    phases = [mmap.mmap(-1, 1) for _ in range(size)]
    resumes, port, place = any((folder / "checkpoints").glob("step-*")), free_port(), ""
    ranks = [chaos.start(recipe, folder, phases[rank], (rank, size, port)) for rank in range(size)]
    watched, reached = random_.randrange(size), list[BaseProcess]()
    if number is not None:
        # A kill ends all, as when a machine is lost; a request reaches any one of them.
        chaos.wait_for(ranks[watched], phases[watched], random_, seconds)
        if ranks[watched].exitcode is None:
            reached = ranks if number == signal.SIGKILL else [random_.choice(ranks)]
            phase = phases[watched][0]
            place = "resume" if resumes and not phase else chaos.PHASES[phase]
    for rank in reached:
        assert rank.pid is not None and number is not None
        # Python takes SIGINT from its first moment on.
        while rank.exitcode is None and not (number == signal.SIGINT or chaos.takes(rank.pid, number)):
            time.sleep(0.005)
        with suppress(ProcessLookupError):
            os.kill(rank.pid, number)
    for rank in reached:
        rank.join(300)
    for rank in ranks:
        if any(one.exitcode == EXIT_FAILED for one in reached):
            rank.kill()  # as the launcher does: it would wait for one that left before it began
        rank.join(300)
    codes = {rank.exitcode for rank in ranks}
    # 1: stopped before there was a checkpoint; the others of a rank that was killed.
    if codes - ({0, 1, EXIT_REQUEUE, -signal.SIGKILL} if place else {0}):
        raise AssertionError(f"{size} ranks, {number and number.name} in {place or 'no phase'}: {codes}")
    return Left(codes == {0}, place)


def topologies(count: int, seed: int, tally: chaos.Tally) -> str:
    """Judges so many histories, all different; returns a line about them."""
    random_, changes = random.Random(seed), Counter[str]()
    consensus._SECONDS_BETWEEN = 0.02  # a run here is over in a second
    import_late()
    recipes = [recipe_of(kind) for kind in kinds()]
    wanted: dict[int, tuple[chaos.Ending, float]] = {}
    with tempfile.TemporaryDirectory(prefix="topologies-") as root:
        for number in range(count):
            which = number % len(recipes)
            if which not in wanted:
                whole = Path(root, f"whole-{which}")
                whole.mkdir()
                wanted[which] = chaos.undisturbed(recipes[which], whole, mmap.mmap(-1, 1))
            end, seconds = wanted[which]
            folder = Path(root, str(number))
            folder.mkdir()
            told = history(recipes[which], folder, seconds, random_)
            changes.update({"changes": len(told) - 1, "kills": sum("!" in part for part in told)})
            tally.judge(f"ranks {' '.join(told)} ({kinds()[which]})", folder, end)
            shutil.rmtree(folder)
    return (
        f"{count} histories of 1, 2 and 4 ranks with parallel.reduction=tree: {changes['changes']} changes "
        f"of their number, {changes['kills']} of them after a kill"
    )
