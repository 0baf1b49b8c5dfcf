"""Real gloo ranks for tests: four processes, forked once, that run functions in worlds of 1, 2 or 4."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed as dist

from tests.helpers.late import import_optimizers
from tests.helpers.ports import free_port
from trainer.distributed.parallel import World

SIZES = (1, 2, 4)
_LARGEST = max(SIZES)


class Ranks:
    """Processes that stay for the whole test session; forked, so that none imports torch again."""

    def __init__(self) -> None:
        import_optimizers()
        port = free_port()
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(_LARGEST):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, port, theirs), daemon=False)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls `function(world, *arguments)` on `size` ranks; returns what each returned."""
        for pipe in self._pipes[:size]:
            pipe.send((size, function, arguments))
        answers = [pipe.recv() for pipe in self._pipes[:size]]
        for failed, answer in answers:
            if failed:
                raise AssertionError(answer)
        return [answer for _, answer in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            with suppress(OSError):  # of a rank that is gone; the others must end all the same
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()


def _serve(rank: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=_LARGEST)
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    while (request := pipe.recv()) is not None:
        size, function, arguments = request
        group = None if size == 1 else groups[size]
        try:
            pipe.send((False, function(World(rank, size, rank, torch.device("cpu"), group), *arguments)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))
    dist.destroy_process_group()
