"""Entry point of a rank that the launcher starts: `trainer.train.start.rank_process LAUNCH-FOLDER`."""

import sys

from trainer.launch.forked import handed
from trainer.launch.worker import Worker


def main(folder: str) -> int:
    """Trains as a rank; returns the exit code."""
    with Worker(folder) as worker:  # before the slow imports, so that a signal finds a handler
        from trainer.train.components.task import make_task
        from trainer.train.request import from_json
        from trainer.train.start.rank import train_rank

        request = from_json(worker.request)
        worker.code = train_rank(request, make_task(request.recipe, handed[0].anew()) if handed else None)
    return worker.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
