"""`trainer bench comm`: what an all-reduce takes, against the link's limit; and which link is slow or dead.

Time is the slowest rank's. Bus bandwidth is algorithm bandwidth (bytes of the message per second) times
2 (n - 1) / n, as nccl-tests defines it (doc/PERFORMANCE.md there; see `comm_fit.bus_factor`).
"""

import argparse
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.commands.bench.comm_fit import parsed_sizes
from trainer.commands.bench.comm_rank import RESULT, of_rank
from trainer.commands.bench.comm_show import ALONE, show
from trainer.errors import EXIT_DONE, EXIT_NOT_MEASURED, BadInputError
from trainer.launch.nodes.discover import Nodes, find_nodes, rank_variables
from trainer.launch.rank import is_rank, run_rank
from trainer.version import __version__

_RANK = "trainer.commands.bench.comm_rank"
_GRACE_SECONDS = 5.0
_JOIN_SECONDS = 120.0
_DTYPES = ("fp32", "bf16")


def bench_comm(options: argparse.Namespace) -> int:
    """Measures with the ranks of all nodes, or, as one of the ranks, with the others; prints on rank 0.

    Args:
        options: ranks, gpus, sizes, dtypes, backend, rounds, json, plot, limit, preflight, seconds, nodes,
            node_rank and master, as `trainer bench comm` has them.

    Returns:
        0; with a preflight 1 if a link is slow or dead, or a rank missing; 3 if nothing was measured.

    Raises:
        BadInputError: If the options can't be.
    """
    request = _checked(options)
    os.environ.update(rank_variables(os.environ))
    if is_rank(os.environ):
        return run_rank(lambda: _as_rank(request, options))
    nodes = find_nodes(os.environ, options.nodes, options.node_rank, options.master)
    if (
        options.preflight and nodes is not None
    ):  # no torchrun: it would wait for the very host that is missing
        return _meet(options, nodes)
    # Not before: a rank needs none of it, and a preflight is to be quick.
    from trainer.launch.launcher import launch
    from trainer.launch.rounds import launch_with_others

    ranks, threads, environment = _local_ranks(options, request["backend"])
    if ranks == 1 and nodes is None:
        print(f"nothing measured: {ALONE[request['backend']]}")
        return EXIT_NOT_MEASURED
    with tempfile.TemporaryDirectory(prefix="trainer-comm-", ignore_cleanup_errors=True) as folder:
        words = [json.dumps({**request, "folder": folder})]
        if nodes is None:
            code = launch(
                words,
                processes=ranks,
                threads=threads,
                environment=environment,
                grace_seconds=_GRACE_SECONDS,
                module=_RANK,
            )
        else:
            code = launch_with_others(
                words,
                nodes=nodes,
                folder=None,
                same={"trainer": __version__},
                processes=ranks,
                threads=threads,
                environment=environment,
                grace_seconds=_GRACE_SECONDS,
                join_seconds=_JOIN_SECONDS,
                module=_RANK,
            )
        if code != EXIT_DONE or (nodes is not None and nodes.number):
            return code
        told = json.loads((Path(folder) / RESULT).read_bytes())
    return show(told, options, request["backend"], shown=True)


def _as_rank(request: Mapping[str, Any], options: argparse.Namespace) -> int:
    told = of_rank(dict(request))
    return show(told, options, request["backend"], shown=os.environ["RANK"] == "0")


def _meet(options: argparse.Namespace, nodes: Nodes) -> int:
    """The preflight between several hosts, in this process: one end of links is enough on each host."""
    from trainer.commands.bench.preflight import Place, preflight

    first = nodes.number == 0
    told = preflight(Place(nodes.number, nodes.most, nodes.host, nodes.port, first), options.seconds)
    return show(told, options, "gloo", shown=first)


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
    from trainer.config.recipe import Recipe
    from trainer.train.local_ranks import plan_local_ranks

    values: dict[str, Any] = {"epochs": 1, "data": {}, "parallel": {"threads": 1}}
    recipe = Recipe.model_validate({**values, "device": "cpu" if backend == "gloo" else "cuda"})
    ranks = 2 if options.ranks is None and backend == "gloo" else options.ranks
    local = plan_local_ranks(recipe, options.gpus, ranks)
    return local.ranks, local.threads, local.environment
