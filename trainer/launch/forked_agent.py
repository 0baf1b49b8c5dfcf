"""The agent without torchrun, on one host: `forked_agent FOLDER MODULE RANKS ADDRESS`.

It is a fork of the launcher and forks each rank, so that torch is imported once. As torchrun it holds the
store by which the ranks find each other, asks the others to end when one failed, and writes which one did.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing.connection import wait
from pathlib import Path

from trainer.errors import EXIT_FAILED
from trainer.host.files import write_whole
from trainer.launch.agent import store_on
from trainer.launch.exit_record import TORCHRUN, ExitRecord
from trainer.launch.folder import read_launch, write_launch
from trainer.launch.forked import ForkedRank
from trainer.launch.meeting import listen
from trainer.launch.worker import die_with_parent


def main(folder: Path, module: str, ranks: int, address: str) -> None:
    """Runs the ranks of one launch, all of them on this host, which finds itself by the address."""
    launch = read_launch(folder)
    die_with_parent(launch.parent)
    write_launch(folder, replace(launch, parent=os.getpid()))
    exits, record = dict[int, int](), None
    try:
        listening = listen(address)
        port = listening.getsockname()[1]
        started = [
            ForkedRank(
                [module, str(folder)],
                _variables(rank, ranks, address, port),
                launch.path,
                closed=listening.fileno(),
            )
            for rank in range(ranks)
        ]
        # Only now: its threads wouldn't come through a fork.
        store = store_on(listening, address)
        exits = _failed(started)
        del store
    except BaseException:
        record = asdict(ExitRecord(TORCHRUN, EXIT_FAILED, traceback=traceback.format_exc()))
    write_whole(folder / "torchrun.json", json.dumps({"exits": exits, "record": record}))


def _variables(rank: int, ranks: int, address: str, port: int) -> dict[str, str]:
    """Returns the environment variables that torchrun would set for a rank."""
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    store = {"MASTER_ADDR": address, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    elastic = {"TORCHELASTIC_RUN_ID": f"trainer-{os.getpid()}", "TORCHELASTIC_RESTART_COUNT": 0}
    return {name: str(value) for name, value in (local | store | elastic).items()}


def _failed(started: Sequence[ForkedRank]) -> dict[int, int]:
    """Waits for all ranks; returns the exit codes of those that failed. The first one ends the others."""
    left, exits = {process.sentinel: rank for rank, process in enumerate(started)}, dict[int, int]()
    while left:
        for ended in wait(list(left)):
            rank = left.pop(ended)  # type: ignore[arg-type]
            if code := started[rank].wait():
                for other in () if exits else left.values():
                    with suppress(OSError):
                        os.kill(started[other].pid, signal.SIGTERM)
                exits[rank] = code
    return exits


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
