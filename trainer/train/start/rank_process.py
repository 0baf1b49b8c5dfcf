"""Entry point of a rank that the launcher starts: `trainer.train.start.rank_process LAUNCH-FOLDER`."""

import sys

from trainer.launch.worker import Worker


def main(folder: str) -> int:
    """Trains as a rank; returns the exit code."""
    with Worker(folder) as worker:  # before torch's import, so that a signal finds a handler
        from trainer.runs.folder import has_checkpoint
        from trainer.train.request import Request, from_json

        request = from_json(Request, worker.request)
        worker.prepares(lambda: has_checkpoint(request.folder, False, request.name))
        from trainer.train.start.rank import train_rank

        worker.code = train_rank(request).code
    return worker.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
