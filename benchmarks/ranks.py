"""Ranks over gloo on this host, in processes of their own, and the bytes that they send."""

import multiprocessing
import os
import queue
import socket
from collections.abc import Callable
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
        BadInputError: If it doesn't.
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
    grace = 0.0
    try:
        answer = answers.get(timeout=limit_s)
        grace = 5.0
    except queue.Empty:
        raise BadInputError(f"{size} ranks over gloo gave nothing within {limit_s:g} s") from None
    finally:
        for process in ranks:
            process.join(grace)
            process.kill()
    return answer


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
