"""`trainer bench comm`: what an all-reduce takes, against the link's limit; and which link is slow or dead.

Time is the slowest rank's. Bus bandwidth is algorithm bandwidth (bytes of the message per second) times
2 (n - 1) / n, as nccl-tests defines it (doc/PERFORMANCE.md there; see `trainer.bench.comm_fit.bus_factor`).
"""

import argparse
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.bench.comm_fit import parsed_sizes
from trainer.bench.comm_rank import RESULT, of_rank
from trainer.bench.comm_show import ALONE, show
from trainer.errors import EXIT_DONE, EXIT_NOT_MEASURED, BadInputError
from trainer.rank import is_rank, run_rank

_GRACE_SECONDS = 5.0
_DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class Nodes:
    """Where this host is among several: how many there are, its number, and `host:port` of node 0."""

    count: int = 1
    rank: int = 0
    master: str = ""


def bench_comm(options: argparse.Namespace, nodes: Nodes | None = None) -> int:
    """Measures with ranks of this host, or, as one of the ranks, with all of them; prints on rank 0.

    Args:
        options: ranks, gpus, sizes, dtypes, backend, rounds, json, plot, limit, preflight and seconds, as
            `trainer bench comm` has them.
        nodes: Where this host is, if it starts its part of a job of several.

    Returns:
        0; with a preflight 1 if a link is slow or dead, or a rank missing; 3 if nothing was measured.

    Raises:
        BadInputError: If the options can't be.
    """
    nodes = nodes or Nodes()
    request = _checked(options)
    if is_rank(os.environ):
        return run_rank(lambda: _as_rank(request, options))
    if options.preflight and nodes.count > 1:  # no torchrun: it would wait for the very host that is missing
        return _meet(options, nodes)
    from trainer.launch import launch  # not before: a rank needs none of it, and a preflight is to be quick

    ranks, threads, environment = _local_ranks(options, request["backend"])
    if ranks * nodes.count == 1:
        print(f"nothing measured: {ALONE[request['backend']]}")
        return EXIT_NOT_MEASURED
    with tempfile.TemporaryDirectory(prefix="trainer-comm-", ignore_cleanup_errors=True) as folder:
        code = launch(
            [json.dumps({**request, "folder": folder})],
            processes=ranks,
            threads=threads,
            environment=environment,
            nodes=nodes.count,
            node_rank=nodes.rank,
            master=nodes.master,
            grace_seconds=_GRACE_SECONDS,
            module="trainer.bench.comm_rank",
        )
        if code != EXIT_DONE:
            return code
        told = json.loads((Path(folder) / RESULT).read_bytes())
    return show(told, options, request["backend"], shown=nodes.rank == 0)


def _as_rank(request: Mapping[str, Any], options: argparse.Namespace) -> int:
    told = of_rank(dict(request))
    return show(told, options, request["backend"], shown=os.environ["RANK"] == "0")


def _meet(options: argparse.Namespace, nodes: Nodes) -> int:
    """The preflight between several hosts, in this process: one end of links is enough on each host."""
    from trainer.bench.preflight import Place, preflight

    host, _, port = nodes.master.rpartition(":")
    if not host or not port.isdecimal():
        raise BadInputError(f"--master {nodes.master}: give host:port of node 0")
    place = Place(nodes.rank, nodes.count, host, int(port), nodes.rank == 0)
    told = preflight(place, options.seconds)
    return show(told, options, "gloo", shown=nodes.rank == 0)


def _checked(options: argparse.Namespace) -> dict[str, Any]:
    """What the ranks are asked for."""
    if options.ranks is not None and options.ranks < 1:
        raise BadInputError(f"--ranks {options.ranks}: give a number from 1 on")
    if options.rounds < 1:
        raise BadInputError(f"--rounds {options.rounds}: give a number from 1 on")
    if not 0 < options.seconds <= 3600:
        raise BadInputError(f"--seconds {options.seconds:g}: give a number of seconds above 0")
    if options.limit is not None and not 0 < options.limit < 1e6:
        raise BadInputError(f"--limit {options.limit:g}: give Gbit/s, above 0")
    if options.plot is not None and options.plot.suffix != ".svg":
        raise BadInputError(f"--plot {options.plot}: give a file name that ends in .svg")
    dtypes = [word.strip() for word in options.dtypes.split(",")]
    if unknown := [word for word in dtypes if word not in _DTYPES]:
        raise BadInputError(f"--dtypes {unknown[0]}: give fp32, bf16 or both: fp32,bf16")
    backend = _backend(options)
    parsed_sizes(options.sizes, cpu=backend == "gloo")
    return {
        **{"backend": backend, "sizes": options.sizes, "dtypes": dtypes, "rounds": options.rounds},
        **{"preflight": options.preflight, "seconds": options.seconds},
    }


def _backend(options: argparse.Namespace) -> str:
    if options.preflight:  # it is the hosts' alone: no GPU has a part in it
        return "gloo"
    import torch

    cuda = torch.cuda.is_available()
    if options.backend == "nccl" and not cuda:
        raise BadInputError("--backend nccl: no usable GPU was found; gloo needs none")
    return {"auto": "nccl" if cuda else "gloo"}.get(options.backend, str(options.backend))


def _local_ranks(options: argparse.Namespace, backend: str) -> tuple[int, int, dict[str, str]]:
    """As many ranks as a training would have here, on the same CPUs; without GPUs two."""
    if options.preflight:  # they only talk: no GPU, no share of the CPUs
        return options.ranks or 2, 1, {}
    from trainer.local_ranks import plan_local_ranks
    from trainer.recipe import Recipe

    values: dict[str, Any] = {"epochs": 1, "data": {}, "parallel": {"threads": 1}}
    recipe = Recipe.model_validate({**values, "device": "cpu" if backend == "gloo" else "cuda"})
    ranks = 2 if options.ranks is None and backend == "gloo" else options.ranks
    local = plan_local_ranks(recipe, options.gpus, ranks)
    return local.ranks, local.threads, local.environment
