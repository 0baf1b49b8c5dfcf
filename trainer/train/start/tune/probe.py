"""Entry point of a probe's rank: `trainer.train.start.tune.probe LAUNCH-FOLDER`; writes its result there."""

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from trainer.errors import EXIT_FAILED, OutOfMemory
from trainer.host.files import write_whole
from trainer.launch.worker import Worker


def main(request: dict[str, Any]) -> int:
    """Trains a rank of a probe; returns the exit code. Results so far stay if it fails or is killed."""
    rank, folder = int(os.environ["RANK"]), Path(request["folder"])
    os.dup2(os.open(folder / f"rank-{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    write_whole(folder / f"rank-{rank}.pid", str(os.getpid()))
    result: dict[str, Any] = {"ran_out": ""}

    def report(metrics: dict[str, Any]) -> None:
        result.update(metrics)
        write_whole(folder / f"rank-{rank}.json", json.dumps(result))

    # After the signals have a handler: it imports torch.
    from trainer.train.start.tune.trial import train_some

    with contextlib.suppress(ImportError):
        import torch.distributed.nn  # noqa: F401  (makes a folder, which a rank that is killed would leave)

    # In the usual temporary folder, so that compiled code is kept.
    tempfile.tempdir = request["temporary"]
    os.environ["TMPDIR"] = request["temporary"]
    try:
        return train_some(request, report)
    except OutOfMemory as error:
        report({"ran_out": str(error)})
    except (RuntimeError, MemoryError, OSError) as error:
        from trainer.observe.oom import is_out_of_memory

        if not is_out_of_memory(error, probing=True):
            raise
        report({"ran_out": (str(error).splitlines() or [type(error).__name__])[0][:300]})
    return EXIT_FAILED


if __name__ == "__main__":
    with Worker(sys.argv[1]) as worker:
        worker.code = main(worker.request)
    sys.exit(worker.exit_code)
