"""Data parallelism: process group, DDP, and reductions over the ranks."""

import hashlib
import inspect
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple, TextIO

import torch
from torch import distributed as dist, nn
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from trainer.config.training import ParallelConfig
from trainer.errors import BadInputError
from trainer.host.gpus import gpu_of_rank
from trainer.host.interfaces import from_files_alone
from trainer.launch.worker import hold
from trainer.observe.phases import communicating, enter_phase
from trainer.observe.text import enumerated


@dataclass(frozen=True)
class World:
    """This rank among the others.

    Attributes:
        rank: Number of this rank, 0 to size - 1.
        size: Number of ranks.
        local_rank: Number of this rank on its host.
        device: Device of this rank.
        group: Process group; None for a single process.
        control: Process group for CPU tensors, for consensus; None for a single process.
        local_size: Number of ranks on this host.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    group: dist.ProcessGroup | None
    control: dist.ProcessGroup | None = None
    local_size: int = 1


class RankPlace(NamedTuple):
    """This rank's place in the job, by the variables that torchrun sets.

    Attributes:
        rank: RANK.
        size: WORLD_SIZE.
        local_rank: LOCAL_RANK.
        local_size: LOCAL_WORLD_SIZE.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int


def place_of(environ: Mapping[str, str]) -> RankPlace:
    """Returns this rank's place; a process without these variables is the only rank."""
    usual = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return RankPlace(*(int(environ.get(name, value)) for name, value in usual.items()))


def open_store(seconds: float) -> Any:
    """Opens the store over which the ranks of a job meet; None for a single rank.

    Without torchrun rank 0 holds it, and waits until all ranks have opened it.

    Args:
        seconds: Timeout of an answer, and of that wait.

    Raises:
        BadInputError: If the environment doesn't say where it is.
    """
    rank, size, *_ = place_of(os.environ)
    if size == 1:
        return None
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not re.fullmatch("[0-9]{1,5}", port):
        raise BadInputError(
            f"rank {rank} of {size}: MASTER_ADDR='{address}', MASTER_PORT='{port}' isn't where the ranks "
            "meet; start them by torchrun, which sets both"
        )
    with from_files_alone(address):
        store, *_ = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
    # torchrun's store stays when it starts the ranks again.
    return PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


@contextmanager
def joined_world(kind: Literal["cpu", "cuda"], timeout_s: float, store: Any = None) -> Iterator[World]:
    """A context within the process group of the ranks that have opened a store.

    The group is destroyed on errors, too: otherwise NCCL's threads can keep the process alive.

    Args:
        kind: Device of the ranks.
        timeout_s: Timeout of a collective.
        store: From `open_store`; None: it is opened here.
    """
    rank, size, local, here = place_of(os.environ)
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", gpu_of_rank(local, torch.cuda.device_count(), os.environ))
        torch.cuda.set_device(device)
    if size == 1:
        yield World(rank, size, local, device, None, local_size=here)
        return
    store = store or open_store(timeout_s)
    address = os.environ["MASTER_ADDR"]
    with from_files_alone(address), nullcontext() if kind == "cuda" else silenced(sys.stdout):
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo",
            store=PrefixStore("ranks", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if kind == "cuda" else None,
        )
        # A separate group on a CPU, too: its pending collectives must not interleave with gradients.
        control = dist.new_group(backend="gloo")
    hold_gloo(control)
    if kind == "cpu":
        hold_gloo(dist.group.WORLD)
    try:
        yield World(rank, size, local, device, dist.group.WORLD, control, here)
    except BaseException:
        # destroy would wait for NCCL kernels that wait for a rank which is gone.
        abort = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)
        (abort if kind == "cuda" else dist.destroy_process_group)()
        raise
    dist.destroy_process_group()


def hold_gloo(group: dist.ProcessGroup | None) -> None:
    """Holds a reference to a group's gloo backend until this rank exits, so that its destruction can't hang.

    Before torch 2.8 a group that Python frees waits for gloo's threads with the GIL held, which one of them
    may need to free a tensor. Freed without the GIL, as the last reference, the backend doesn't deadlock
    (https://github.com/pytorch/pytorch/pull/154976).
    """
    assert group is not None
    hold(group._get_backend(torch.device("cpu")))


@contextmanager
def silenced(stream: TextIO) -> Iterator[None]:
    """A context that discards output of C++ to a standard stream, such as gloo's line on each connection."""
    stream.flush()
    number = 2 if stream is sys.stderr else 1
    kept = os.dup(number)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    try:
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)
        os.close(nowhere)


def sum_hook(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Sums a bucket of gradients over the ranks; DDP's own hook would divide by their number.

    The loss is already divided by the step's total over all ranks.
    """
    return _summed(group, bucket, bucket.buffer())


def bf16_sum_hook(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Sums gradients rounded to bfloat16, which halves the bytes on the wire.

    torch's bf16_compress_hook divides by the number of ranks, see `sum_hook`.
    """
    buffer = bucket.buffer()
    summed = _summed(group, bucket, buffer.to(torch.bfloat16))
    restored: torch.futures.Future[torch.Tensor] = summed.then(lambda future: buffer.copy_(future.value()))
    return restored


def _summed(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
    values: torch.Tensor,
) -> torch.futures.Future[torch.Tensor]:
    enter_phase("communication")
    work = dist.all_reduce(values, group=group, async_op=True)
    # After the last bucket backward only waits for the other ranks.
    enter_phase("communication" if bucket.is_last() else "backward")
    summed: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
    return summed


# torch 2.13 renamed the argument, and keeps the broadcast at the start, of buffers that are equal anyway.
_WITHOUT_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}


def is_sharded(config: ParallelConfig, world: World) -> bool:
    """True if the model is sharded over several ranks."""
    return config.strategy != "ddp" and world.group is not None


def replicate(model: nn.Module, group: dist.ProcessGroup | None, config: ParallelConfig) -> nn.Module:
    """Wraps a model by DDP, so that backward sums its gradients over the ranks.

    On a single rank, if it is sharded, or with the tree reduction it isn't wrapped; with the latter all ranks
    get rank 0's tensors. Buffers aren't broadcast at each forward pass: `StepStatistics` keeps them equal.
    """
    if group is None or config.strategy != "ddp":
        return model
    if config.reduction == "tree":
        for tensor in (*model.parameters(), *model.buffers()):
            contiguous = tensor.detach().contiguous()
            dist.broadcast(contiguous, 0, group=group)
            tensor.detach().copy_(contiguous)
        return model
    replica = DistributedDataParallel(  # without device_ids: DDP would search each batch for tensors to move
        model,
        process_group=group,
        bucket_cap_mb=config.bucket_mb,
        gradient_as_bucket_view=True,
        find_unused_parameters=config.find_unused_parameters,
        **_WITHOUT_BUFFERS,
    )
    # Compiled code gives 1 x 1 kernels the strides of channels_last, which are the same layout.
    warnings.filterwarnings("ignore", r"Grad strides do not match(.|\n)*sizes\(\) = \[\d+, \d+, 1, 1\]")
    replica.register_comm_hook(group, bf16_sum_hook if config.compress == "bf16" else sum_hook)
    if not config.find_unused_parameters:
        _lay_out_buckets(replica)
    return replica


def _lay_out_buckets(replica: DistributedDataParallel) -> None:
    """Makes DDP lay out its buckets before the first step, so that a resumed run has the same ones.

    DDP sums its first backward pass in a single bucket, and all later ones in buckets by that pass's order of
    gradients (torch's reducer.cpp, rebuild_buckets). Over more than two ranks the order of a sum depends on
    the position in a bucket, so the first step after a resume would have other bits. A backward pass over
    zeros rebuilds the buckets first, in the reverse order of the parameters, which is nearly the real one.
    """
    parameters = [parameter for parameter in replica.parameters() if parameter.requires_grad]
    total = torch.zeros((), device=parameters[0].device)
    for parameter in parameters:  # backward goes through the sum from its end
        total = total + 0.0 * parameter.reshape(-1)[:1].sum().float()
    replica.reducer.prepare_for_backward([])
    total.backward()
    replica.reducer._rebuild_buckets()
    for parameter in parameters:
        parameter.grad = None
    enter_phase("start")


def check_reduced(model: nn.Module, rank: int) -> None:
    """Checks that backward gave every parameter a gradient, before the next collective.

    Raises:
        BadInputError: Naming the parameters without one, for which the other ranks wait.
    """
    if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters:
        return
    try:
        model.reducer._check_reducer_finalized()
    except RuntimeError as error:
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        names = [name for name, p in model.module.named_parameters() if p.requires_grad]
        unused = [names[int(number)] for number in found[1].split()] if found else ["(torch names none)"]
        unused = [name.removeprefix("model.").removeprefix("_orig_mod.") for name in unused]
        raise BadInputError(
            f"rank {rank}: a step's backward pass gave no gradient to the model's parameters "
            f"{enumerated(unused, 6)}; use "
            "parallel.find_unused_parameters=true or parallel.reduction=tree, or remove these parameters"
        ) from error


def unsynchronized(model: nn.Module) -> AbstractContextManager[None]:
    """Returns the context of every micro-batch of a step except the last: gradients only accumulate."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def check_agreement(
    text: str,
    world: World,
    what: str = "configurations, data or initial weights",
    remedy: str = "give every host the same recipe and the same files",
) -> None:
    """Checks that a text is equal on all ranks; collective.

    Args:
        text: Text to compare.
        world: The ranks.
        what: Description of the text, for the message.
        remedy: Remedy, for the message.

    Raises:
        BadInputError: If ranks differ, for example because hosts have different files.
    """
    if world.group is None:
        return
    mine = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    hashes = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    hashes[world.rank] = mine
    others = sum_over_ranks(hashes, world.group).tolist()
    odd = [rank for rank, other in enumerate(others) if other != mine]
    if odd:
        raise BadInputError(f"rank {world.rank} and rank {odd[0]} have different {what}: {remedy}")


def least_over_ranks(number: int, world: World) -> int:
    """Returns the smallest of the ranks' numbers; collective."""
    if world.group is None:
        return number
    least = torch.tensor([number], device=world.device)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=world.group)
    return int(least)


def words_of_ranks(word: str, world: World) -> list[str]:
    """Gathers a string from each rank, in the order of ranks; collective."""
    if world.group is None:
        return [word]
    data = torch.tensor([*word.encode()], dtype=torch.int64)
    lengths = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    lengths[world.rank] = len(data)
    sizes = [int(size) for size in sum_over_ranks(lengths, world.group).tolist()]
    table = torch.zeros(world.size, max(sizes), dtype=torch.int64, device=world.device)
    table[world.rank, : len(data)] = data
    rows = sum_over_ranks(table, world.group).tolist() if max(sizes) else [[]] * world.size
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def gather_rows(world: World, row: torch.Tensor) -> torch.Tensor:
    """Gathers a row from each rank, float64 (n,) on the host, to (ranks, n) on the device; collective."""
    table = torch.zeros(world.size, len(row), dtype=row.dtype, device=world.device)
    if world.device.type == "cuda":
        row = row.pin_memory()  # for an asynchronous copy
    table[world.rank].copy_(row, non_blocking=True)
    return sum_over_ranks(table, world.group)


def differs_over_ranks(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Marks the integers that differ between ranks, int64 (n,), 0 or 1; collective.

    Args:
        values: int64 (n,), on the device.
        group: The ranks; None: one rank.
    """
    both = torch.stack((values, ~values))  # the largest complement belongs to the smallest value
    if group is not None:
        before = communicating()
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
        enter_phase(before)
    return (both[0] != ~both[1]).to(torch.int64)


def sum_over_ranks(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sums a tensor over the ranks, in place."""
    if group is not None:
        before = communicating()
        dist.all_reduce(tensor, group=group)
        enter_phase(before)
    return tensor
