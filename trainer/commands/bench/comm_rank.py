"""A rank of `trainer bench comm`, `trainer.commands.bench.comm_rank FOLDER-OF-THE-LAUNCH`: times all-reduces.

Each size is a turn, and rounds take the turns in a rotating order, so that whatever else the hosts do falls
on all sizes. A turn is as many all-reduces as fill a twentieth of a second; they are waited for together on a
GPU, so that small ones are timed as a training has them: one behind the other.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from trainer.host.files import write_whole
from trainer.launch.worker import Worker

_TURN_SECONDS = 0.05
_MOST_REPEATS = 2000
_TIMEOUT_SECONDS = 120.0
RESULT = "result.json"


def main(request: dict[str, Any]) -> int:
    """Does a rank's part; the first rank of each host leaves the result in the folder, if there is one."""
    told = of_rank(request)
    if request.get("folder") and os.environ.get("LOCAL_RANK", "0") == "0":
        write_whole(Path(request["folder"]) / RESULT, json.dumps(told))
    return 0


def of_rank(request: dict[str, Any]) -> dict[str, Any]:
    """What all ranks found together, the same on each of them; see `trainer.commands.bench.comm`.

    Raises:
        SystemExit: With a line for people, if the ranks can't do it.
    """
    if request["preflight"]:
        from trainer.commands.bench.preflight import as_rank

        return as_rank(float(request["seconds"]))
    try:
        return _all_reduces(request)
    except RuntimeError as error:
        line = str(error).splitlines()[0]
        raise SystemExit(
            f"the all-reduce failed: {line[:300]}; trainer bench comm --preflight names a dead link"
        ) from error


def _all_reduces(request: dict[str, Any]) -> dict[str, Any]:
    import torch

    from trainer.commands.bench.comm_fit import parsed_sizes
    from trainer.commands.bench.paired import interleaved, median_interval
    from trainer.distributed.parallel import gather_rows, joined_world
    from trainer.observe.conditions import conditions

    kind: Literal["cpu", "cuda"] = "cuda" if request["backend"] == "nccl" else "cpu"
    sizes = parsed_sizes(request["sizes"], cpu=kind == "cpu")
    with joined_world(kind, _TIMEOUT_SECONDS) as world:
        if world.group is None:
            return {"ranks": 1, "conditions": conditions()}
        found: dict[str, Any] = {}
        for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
            if name not in request["dtypes"]:
                continue
            buffer = torch.empty(sizes[-1] // dtype.itemsize, dtype=dtype, device=world.device)
            turns = [_turn(buffer[: size // dtype.itemsize], world) for size in sizes]
            seconds = interleaved(turns, request["rounds"], shown=False)
            # The slowest rank's time is the all-reduce's: a step goes on when all have the sum.
            row = torch.tensor([value for series in seconds for value in series], dtype=torch.float64)
            slowest = gather_rows(world, row).cpu().amax(0).view(len(sizes), -1).tolist()
            found[name] = [
                (size, *median_interval(series)) for size, series in zip(sizes, slowest, strict=True)
            ]
            del buffer, turns
        own = own_limit(request["backend"], world.size, world.local_rank)
        limits = gather_rows(world, torch.tensor([own[0] or 0.0], dtype=torch.float64)).flatten().tolist()
    return {
        "ranks": world.size,
        "hosts": _hosts(world.size),
        "conditions": conditions(),
        "timed": found,
        "limit": least_limit(own, limits),
    }


def _hosts(size: int) -> int:
    return -(-size // int(os.environ.get("LOCAL_WORLD_SIZE", size)))


def own_limit(backend: str, size: int, local_rank: int) -> tuple[float | None, str]:
    """This rank's limit, in bytes per second, and what it is or why it isn't known."""
    from trainer.commands.bench.link_limit import host_limit, local_limit

    if _hosts(size) > 1:
        return host_limit(backend, os.environ["MASTER_ADDR"])
    return local_limit(backend, local_rank)


def least_limit(own: tuple[float | None, str], limits: Sequence[float]) -> tuple[float | None, str]:
    """The slowest rank's limit: a ring is as fast as its slowest link.

    Args:
        own: Of rank 0.
        limits: Of each rank, in bytes per second; 0 where it isn't known.
    """
    unknown = [rank for rank, limit in enumerate(limits) if not limit]
    if own[0] is None or (not unknown and min(limits) >= own[0]):
        return own
    if unknown:
        return None, f"unknown, because rank {unknown[0]} doesn't know its own"
    slowest = min(limits)
    return slowest, f"the link of rank {limits.index(slowest)}, which is slower than rank 0's ({own[1]})"


def _turn(part: Any, world: Any) -> Callable[[], float]:
    """What does some all-reduces of a tensor and returns the seconds of one."""
    import torch
    from torch import distributed as dist

    def wait() -> None:
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)

    def turn(repeats: int) -> float:
        dist.barrier(world.control)
        began = time.perf_counter()
        for _ in range(repeats):
            dist.all_reduce(part, group=world.group)
        wait()
        return (time.perf_counter() - began) / repeats

    part.fill_(world.rank + 1)
    dist.all_reduce(part, group=world.group)
    wait()
    right = world.size * (world.size + 1) / 2
    if not bool((part == right).all()):
        raise SystemExit(f"wrong: an all-reduce of {part.nbytes} bytes isn't the sum of the ranks' values")
    part.zero_()  # sums of it stay what they are, whatever the number of all-reduces
    first = torch.tensor([statistics.median(turn(1) for _ in range(3))], dtype=torch.float64)
    dist.all_reduce(first, op=dist.ReduceOp.MAX, group=world.control)
    repeats = max(1, min(_MOST_REPEATS, round(_TURN_SECONDS / max(float(first), 1e-9))))
    return partial(turn, repeats)


if __name__ == "__main__":
    with Worker(sys.argv[1]) as worker:
        worker.code = main(worker.request)
    sys.exit(worker.exit_code)
