"""`trainer bench comm`: what an all-reduce takes, against the link's limit; and which link is slow or dead.

Time is the slowest rank's. Bus bandwidth is algorithm bandwidth (bytes of the message per second) times
2 (n - 1) / n, as nccl-tests defines it (doc/PERFORMANCE.md there; see `comm_fit.bus_factor`).
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from trainer.commands.bench.comm_fit import parsed_sizes
from trainer.commands.bench.comm_rank import RESULT, of_rank
from trainer.commands.bench.comm_show import ALONE, show
from trainer.errors import EXIT_DONE, EXIT_NOT_MEASURED, BadInputError
from trainer.launch.launcher import LocalRanks
from trainer.launch.nodes.discover import Nodes, find_nodes
from trainer.version import __version__

_RANK = "trainer.commands.bench.comm_rank"
_GRACE_SECONDS = 5.0
_JOIN_SECONDS = 120.0
_DTYPES = ("fp32", "bf16")


def bench_comm(options: argparse.Namespace) -> int:
    """Measures with the ranks of all nodes; prints on node 0.

    Args:
        options: nproc_per_node, gpus, sizes, dtypes, backend, rounds, json, limit, preflight,
            seconds, nnodes, node_rank, master_addr and master_port, as `trainer bench comm` has them.

    Returns:
        0; with a preflight 1 if a link is slow or dead, or a rank missing; 3 if nothing was measured.

    Raises:
        BadInputError: If the options can't be.
    """
    request = _checked(options)
    nodes = find_nodes(
        os.environ, options.nnodes, options.node_rank, options.master_addr, options.master_port
    )
    if (
        options.preflight and nodes is not None
    ):  # no torchrun: it would wait for the very host that is missing
        return _meet(options, nodes)
    # Not before: a preflight is to be quick.
    from trainer.launch.launcher import launch
    from trainer.launch.rounds import launch_with_others

    local = _local_ranks(options, request["backend"])
    if local.ranks == 1 and nodes is None:
        print(f"nothing measured: {ALONE[request['backend']]}")
        return EXIT_NOT_MEASURED
    with tempfile.TemporaryDirectory(prefix="trainer-comm-", ignore_cleanup_errors=True) as folder:
        request["folder"] = folder
        if nodes is None:
            code = launch(_RANK, request, local, grace_seconds=_GRACE_SECONDS)
        else:
            code = launch_with_others(
                _RANK,
                request,
                local,
                nodes=nodes,
                folder=None,
                same={"trainer": __version__},
                grace_seconds=_GRACE_SECONDS,
                join_seconds=_JOIN_SECONDS,
            )
        if code != EXIT_DONE or (nodes is not None and nodes.number):
            return code
        told = json.loads((Path(folder) / RESULT).read_bytes())
    return show(told, options, request["backend"], shown=True)


def comm_without_launcher(options: argparse.Namespace) -> int:
    """Does the part of a rank that torchrun or Slurm started; rank 0 prints."""
    request = _checked(options)
    told = of_rank(request)
    return show(told, options, request["backend"], shown=os.environ["RANK"] == "0")


def _meet(options: argparse.Namespace, nodes: Nodes) -> int:
    """The preflight between several hosts, in this process: one end of links is enough on each host."""
    from trainer.commands.bench.preflight import RankPlace, preflight

    first = nodes.number == 0
    told = preflight(RankPlace(nodes.number, nodes.most, nodes.host, nodes.port, first), options.seconds)
    return show(told, options, "gloo", shown=first)


def _checked(options: argparse.Namespace) -> dict[str, Any]:
    """What the ranks are asked for."""
    if options.nproc_per_node is not None and options.nproc_per_node < 1:
        raise BadInputError(f"--nproc-per-node {options.nproc_per_node}: give a number from 1 on")
    if options.rounds < 1:
        raise BadInputError(f"--rounds {options.rounds}: give a number from 1 on")
    if not 0 < options.seconds <= 3600:
        raise BadInputError(f"--seconds {options.seconds:g}: give a number of seconds above 0")
    if options.limit is not None and not 0 < options.limit < 1e6:
        raise BadInputError(f"--limit {options.limit:g}: give Gbit/s, above 0")
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


def _local_ranks(options: argparse.Namespace, backend: str) -> LocalRanks:
    """As many ranks as a training would have here, on the same CPUs; without GPUs two."""
    if options.preflight:  # they only talk: no GPU, no share of the CPUs
        return LocalRanks(options.nproc_per_node or 2, 1)
    from trainer.config.recipe import Recipe
    from trainer.train.local_ranks import plan_local_ranks

    values: dict[str, Any] = {"epochs": 1, "data": {}, "parallel": {"threads": 1}}
    recipe = Recipe.model_validate({**values, "device": "cpu" if backend == "gloo" else "cuda"})
    ranks = 2 if options.nproc_per_node is None and backend == "gloo" else options.nproc_per_node
    return plan_local_ranks(recipe, options.gpus, ranks)
