"""Ranks over gloo on this host, in processes of their own, and the bytes that they send."""

import multiprocessing
import os
import queue
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch

from trainer.distributed.parallel import World, joined_world
from trainer.errors import BadInputError


def on_ranks(size: int, work: Callable[[World], Any], method: str = "fork", limit_s: float = 600.0) -> Any:
    """Does the same in so many processes of one thread; returns what the first one's work returned.

    Args:
        size: Number of ranks.
        work: Given the rank's world; what is to be spawned is pickled.
        method: fork, where nothing was computed here yet, or spawn.
        limit_s: Seconds within which the first rank must answer.

    Raises:
        BadInputError: If it doesn't, or a rank fails.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context: Any = multiprocessing.get_context(method)
    answers: Queue[Any] = context.Queue()
    own = [(rank, size, port, limit_s, work, answers) for rank in range(size)]
    ranks = [context.Process(target=_rank, args=arguments) for arguments in own]
    for process in ranks:
        process.start()
    try:
        answer = _answer(answers, ranks, limit_s)
        for process in ranks:
            process.join(5)
        return answer
    finally:
        for process in ranks:
            process.kill()


def _answer(answers: "Queue[Any]", ranks: Sequence[Any], limit_s: float) -> Any:
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        with suppress(queue.Empty):
            return answers.get(timeout=0.1)
        if any(process.exitcode for process in ranks):  # the others would wait for it
            raise BadInputError("one of the ranks over gloo failed: see above")
    raise BadInputError(f"{len(ranks)} ranks over gloo gave nothing within {limit_s:g} s")


def _rank(
    rank: int, size: int, port: int, limit_s: float, work: Callable[[World], Any], answers: "Queue[Any]"
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with joined_world("cpu", limit_s) as world:
        answer = work(world)
    if rank == 0:
        answers.put(answer)


def received(world: World) -> int:
    """Bytes that came over the loopback of this host so far."""
    if world.group is None or not (table := Path("/proc/net/dev")).exists():
        return 0
    (line,) = (line for line in table.read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[0])
