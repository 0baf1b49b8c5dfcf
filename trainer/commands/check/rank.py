"""A process of `trainer check`, `trainer.commands.check.rank FOLDER-OF-THE-LAUNCH`: trains variants."""

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from trainer.launch.worker import Worker


def main(request: dict[str, Any], fault: AbstractContextManager[object] | None = None) -> int:
    """Trains the variants one after another; the first rank writes the result of each to a file.

    Args:
        fault: Context of the trainings, which benchmarks/check_faults breaks.
    """
    rank, folder = int(os.environ["RANK"]), Path(request["folder"])
    os.dup2(os.open(folder / f"rank-{rank}.err", os.O_WRONLY | os.O_CREAT), 2)

    from trainer.commands.check.exchange import leave
    from trainer.commands.check.training import open_subject, train_steps
    from trainer.config.recipe import Recipe
    from trainer.config.section import validated
    from trainer.distributed.parallel import joined_world
    from trainer.errors import BadInputError

    recipe = validated(Recipe, request["recipe"], request["name"])
    subject = open_subject(request["name"], recipe, double=request["double"])
    with fault or nullcontext(), joined_world("cpu", recipe.parallel.timeout_s) as world:
        for variant in request["variants"]:
            stopped = folder / variant["name"] if variant["stop_after"] else None
            try:
                found = train_steps(subject, variant["edits"], world, stopped)
            except Exception as error:
                refused = isinstance(error, BadInputError)
                line = f"{'' if refused else f'crash: {type(error).__name__}: '}{error}"
                leave(folder, variant["name"], " ".join(line.split())[:400])
                if world.size > 1:  # the other rank waits for this one
                    raise
            else:
                if rank == 0:
                    leave(folder, variant["name"], found)
    return 0


if __name__ == "__main__":
    with Worker(sys.argv[1]) as worker:
        worker.code = main(worker.request)
    sys.exit(worker.exit_code)
