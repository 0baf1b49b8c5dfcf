"""Plan of this host's ranks: number, GPUs, CPUs, threads and environment variables. Imports no torch."""

import math
import os
from collections.abc import Mapping

from trainer.config.recipe import Recipe
from trainer.errors import BadInputError
from trainer.host.affinity import CpuShares, gpu_nodes, limits_within, read_topology, share_cpus
from trainer.host.allocator import CUBLAS_WORKSPACE, allocator_variables
from trainer.host.gpus import chosen_gpus
from trainer.host.limits import Limits, compilers_per_rank, read_limits, threads_per_rank
from trainer.host.nvml import bus_ids
from trainer.host.torch_build import NO_GPU, count_gpus, torch_build
from trainer.launch.launcher import LocalRanks

# Accepted with any number of CPUs: results depend on it, so those of a larger machine may need it.
_BEARABLE_THREADS = 64
_COMPILERS = "TORCHINDUCTOR_COMPILE_THREADS"  # processes, in spite of its name


def plan_local_ranks(recipe: Recipe, gpus: str | None, ranks: int | None) -> LocalRanks:
    """Plans the ranks of this host.

    Args:
        recipe: The configuration.
        gpus: The flag --gpus: a number or a list, or None for all.
        ranks: The flag --nproc-per-node, or None.

    Raises:
        BadInputError: If flags and devices don't fit.
    """
    there = gpus_for(recipe)
    count, environment = _devices(recipe, there, gpus, ranks)
    environment |= allocator_variables(recipe.memory.allocator, os.environ, torch_build().version)
    shares = _cpus(recipe, count, {**os.environ, **environment} if there else None)
    limits = limits_within(read_limits(), shares)
    environment[_COMPILERS] = os.environ.get(_COMPILERS, str(compilers_per_rank(limits, count)))
    if there:
        environment["NCCL_DEBUG"] = os.environ.get("NCCL_DEBUG", "WARN")
        if recipe.deterministic:
            name, value = CUBLAS_WORKSPACE
            environment[name] = os.environ.get(name, value)
    environment["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
    threads = recipe.parallel.threads
    each = threads_per_rank(limits, count) if threads == "auto" else threads
    return LocalRanks(count, each, environment, shares, count if there else 0)


def gpus_for(recipe: Recipe) -> int:
    """Returns the number of GPUs here on which a recipe may train; 0: it trains on a CPU.

    Raises:
        BadInputError: If the recipe asks for CUDA and there is no usable GPU.
    """
    count = 0 if recipe.device == "cpu" else count_gpus(os.environ)
    if recipe.device == "cuda" and not count:
        raise BadInputError(NO_GPU)
    return count


def check_threads(threads: int, limits: Limits, *, known: bool) -> str:
    """Returns a warning if a rank has more threads than CPUs; "" if not.

    Args:
        threads: Threads of a rank.
        limits: CPUs of this container.
        known: True for a run that was begun with so many threads: its results depend on them, so any number
            is accepted.

    Raises:
        BadInputError: If there are more than 64 threads, and more than CPUs.
    """
    most = max(1, math.ceil(limits.cpus))
    if threads <= most:
        return ""
    granted = f"this container has {limits.cpus:g} CPUs ({limits.sources.get('cpus', 'unknown')})"
    if threads > _BEARABLE_THREADS and not known:
        raise BadInputError(
            f"parallel.threads={threads}: {granted}; give {most} or fewer, or auto (results depend on the "
            f"number of threads: to have those of a larger machine, up to {max(most, _BEARABLE_THREADS)} are "
            "taken, slowly)"
        )
    return f"parallel.threads={threads}: {granted}, so the threads of a rank take turns, which is slow"


def _devices(recipe: Recipe, there: int, gpus: str | None, ranks: int | None) -> tuple[int, dict[str, str]]:
    """Returns the number of ranks, and the environment that gives them their GPUs."""
    if not there:
        if gpus is not None:
            why = "device=cpu is set" if recipe.device == "cpu" else "no usable GPU was found"
            raise BadInputError(
                f"--gpus {gpus}: {why}; leave it out, or use --nproc-per-node N for N CPU processes"
            )
        if ranks is not None and ranks < 1:
            raise BadInputError(f"--nproc-per-node {ranks}: give a number from 1 on")
        return ranks or 1, {}
    if ranks is not None:
        raise BadInputError("--nproc-per-node is for machines without GPUs; use --gpus N")
    if gpus is None:
        return there, {}
    # Indices count what CUDA_VISIBLE_DEVICES leaves, and never widen it.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(there)))).split(",")[:there]
    chosen = chosen_gpus(gpus, visible)
    return len(chosen), {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}


def _cpus(recipe: Recipe, ranks: int, environ: Mapping[str, str] | None) -> CpuShares:
    """Returns the CPUs that each rank is bound to; `environ`: of ranks on GPUs."""
    places: list[int | None] = [None] * ranks
    if environ is not None:
        found = gpu_nodes(bus_ids(environ, ranks))
        places[: len(found)] = found
    return share_cpus(recipe.parallel.cpu_binding, read_topology(), places)
