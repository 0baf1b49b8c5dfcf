"""Sharding by torch's FSDP2: each rank keeps its own rows of every parameter.

FSDP gathers the parameters of a block before it computes, frees them after it, and gives each rank the summed
gradients of its rows. Optimizer, average, clipping and checkpoints work with these rows as plain tensors in
the same memory, see `weights` and `own_rows`, without FSDP; norms and whole tensors are computed by `Rows`.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist, nn

from trainer.config.training import ParallelConfig
from trainer.distributed.overlap import first_names, sharing
from trainer.distributed.parallel import World, hold_gloo, silenced
from trainer.errors import BadInputError
from trainer.observe.phases import communicating, enter_phase

_OWN = "own_rows"  # attribute of a sharded parameter


@dataclass(frozen=True)
class Rows:
    """This rank's rows of each sharded tensor: those of torch.chunk over the ranks.

    Attributes:
        rank: This rank's number among those that share a model.
        ranks: Number of these ranks.
        group: Their process group; with HSDP there are several, with equal contents.
        first: True if this rank is in the first of these groups.
        note: Line for the user.
    """

    rank: int
    ranks: int
    group: dist.ProcessGroup
    first: bool = True
    note: str = ""

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's rows of a tensor, a view; none if there are fewer rows than ranks."""
        start, stop = self.between(len(whole))
        return whole[start:stop]

    def between(self, rows: int) -> tuple[int, int]:
        """Returns the range of this rank's rows out of so many."""
        each = -(-rows // self.ranks)
        return min(self.rank * each, rows), min((self.rank + 1) * each, rows)

    def shape_of(self, whole: Sequence[int]) -> torch.Size:
        """Returns the shape of this rank's rows of a tensor of such a shape."""
        start, stop = self.between(whole[0])
        return torch.Size((stop - start, *whole[1:]))

    def gather(self, own: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
        """Gathers the whole tensor of a shape in the first rank's host memory; None on others; collective.

        Each rank holds it on its device for a moment.
        """
        each = -(-shape[0] // self.ranks)
        padded = own.new_zeros((each, *shape[1:]))
        padded[: len(own)].copy_(own)
        together = own.new_empty((each * self.ranks, *shape[1:]))
        dist.all_gather_into_tensor(together, padded, group=self.group)
        return together[: shape[0]].cpu() if self.rank == 0 and self.first else None

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks that share a model, in place; collective."""
        dist.all_reduce(values, group=self.group)
        return values

    def norm(self, own: torch.Tensor) -> torch.Tensor:
        """Returns the joint 2-norm of all ranks' rows, from this rank's, float (); collective."""
        return self.sum(own.double().square()).sqrt().to(own.dtype)


def check_sharding(config: ParallelConfig, model: nn.Module, ranks: int, own_optimizer: bool = False) -> None:
    """Rejects models and settings that can't be sharded, before the ranks start.

    Args:
        config: Strategy and number of shards.
        model: The model; it may be on the meta device.
        ranks: Number of ranks of the run.
        own_optimizer: True if the task has its own optimizer.

    Raises:
        BadInputError: Naming the setting or tensor, and the remedy.
    """
    if config.strategy == "ddp":
        return
    word = f"parallel.strategy={config.strategy}"
    if not _is_known_to_torch():
        raise BadInputError(f"{word} needs torch 2.9 or newer (this is {torch.__version__}); use ddp")
    if config.shard and (ranks % config.shard or ranks == config.shard):
        raise BadInputError(
            f"parallel.shard={config.shard}: {ranks} rank{'s' * (ranks > 1)} aren't several groups of "
            f"{config.shard}; change the number of ranks or of parallel.shard, or use parallel.strategy=fsdp"
        )
    if own_optimizer:
        raise BadInputError(
            f"{word}: the task's own optimizer may need whole parameters, and each rank has its rows only; "
            "use parallel.strategy=ddp, or an optimizer of optim.name"
        )
    parameters = dict(model.named_parameters())
    if together := sharing({**parameters, **dict(model.named_buffers())}):
        raise BadInputError(
            f"{word}: {first_names(together)} share memory, and each rank would have its own rows of both; "
            "give both modules one Parameter, clone one of them, or use parallel.strategy=ddp"
        )
    if scalars := [name for name, parameter in parameters.items() if not parameter.ndim]:
        raise BadInputError(f"{word}: the parameter '{scalars[0]}' has no rows; give it the shape (1,)")
    if len(kinds := {p.dtype for p in parameters.values()}) > 1:
        several = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        raise BadInputError(f"{word} gathers parameters of one type of number, and the model has {several}")


def _is_known_to_torch() -> bool:
    try:
        from torch.distributed.fsdp import FSDPModule  # imported for seconds
    except ImportError:
        return False
    return hasattr(FSDPModule, "set_force_sum_reduction_for_comms")


def shard(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    world: World,
    config: ParallelConfig,
    of_blocks: torch.dtype | None = None,
) -> Rows:
    """Shards a model over the ranks, in place: each block separately, and all other modules together.

    All ranks get rank 0's parameters and buffers. Names, shapes and class names stay.

    Args:
        model: Model on the ranks' device, or on the CPU: then it is moved to the device block by block.
        blocks: Modules of the model, none within another. One that shares a parameter with another module
            isn't sharded separately.
        world: The ranks.
        config: Strategy and number of shards.
        of_blocks: Dtype in which the blocks' parameters are gathered; None: their own. Gradients are summed
            in the parameters' dtype.

    Returns:
        This rank's rows.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # imported for seconds

    assert world.group is not None
    for tensor in (*model.parameters(), *model.buffers()):
        received = tensor.detach().to(world.device).contiguous()
        dist.broadcast(received, 0, group=world.group)
        tensor.detach().copy_(received)
    mesh, rows = _mesh(world, config)
    kind = next(model.parameters()).dtype
    separate = list(_unshared(model, blocks))
    for block in separate:
        policy = MixedPrecisionPolicy(of_blocks, kind, cast_forward_inputs=False)
        fully_shard(block, mesh=mesh, mp_policy=policy)
        _keep_name(block)
    root: Any = fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    _keep_name(root)
    for module in root.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            # The loss is already divided by the step's total over all ranks.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
            if (
                world.device.type == "cpu"
            ):  # on a GPU they are asynchronous, and the host doesn't wait in them
                module.set_custom_all_gather(_AllGather())
                module.set_custom_reduce_scatter(_ReduceScatter())
            # Before it gathers for the first time, FSDP may replace a parameter's memory.
            module.unshard()
            module.reshard()
    for parameter in root.parameters():
        own = own_rows(parameter.detach())
        setattr(parameter, _OWN, nn.Parameter(own, requires_grad=parameter.requires_grad))
    low = "" if of_blocks is None else f", in {str(of_blocks).removeprefix('torch.')}"
    groups = f" in each of {world.size // rows.ranks} groups" if config.shard else ""
    note = (
        f"sharded over {rows.ranks} ranks{groups}: {len(separate)} blocks are gathered one by one{low}, the "
        "rest of the model together"
    )
    return replace(rows, note=note)


class _Allocates:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Allocates):
    """FSDP's all-gather within the phase communication, by which the watchdog finds a rank that hangs."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        before = communicating()
        work = dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        enter_phase(before)
        return work


class _ReduceScatter(_Allocates):
    """FSDP's reduce-scatter within the phase communication."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        before = communicating()
        work = dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        enter_phase(before)
        return work


def _mesh(world: World, config: ParallelConfig) -> tuple[Any, Rows]:
    """Returns torch's mesh of the ranks, and this rank's rows."""
    from torch.distributed.device_mesh import DeviceMesh

    kind = world.device.type
    if not config.shard:
        assert world.group is not None
        mesh = DeviceMesh.from_group(world.group, kind, mesh_dim_names=("shard",))
        return mesh, Rows(world.rank, world.size, world.group)
    numbers = torch.arange(world.size).view(-1, config.shard)
    # Groups created by a mesh would have torch's timeout, not the run's.
    timeout, groups = timedelta(seconds=config.timeout_s), list[dist.ProcessGroup]()
    for ranks in (numbers.T.tolist(), numbers.tolist()):
        with nullcontext() if kind == "cuda" else silenced(sys.stdout):
            group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout)
        groups.append(group)
        if kind == "cpu":
            hold_gloo(group)
    mesh = DeviceMesh.from_group(groups, kind, mesh=numbers, mesh_dim_names=("replicate", "shard"))
    return mesh, Rows(world.rank % config.shard, config.shard, groups[1], world.rank < config.shard)


def _unshared(model: nn.Module, blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yields the blocks whose parameters belong to no other module."""
    owners = _owners(model)
    for block in blocks:
        inside = _owners(block)
        if inside and block is not model and all(owners[one] == times for one, times in inside.items()):
            yield block


def _owners(model: nn.Module) -> Counter[nn.Parameter]:
    """Counts the modules that own each parameter."""
    return Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)


def _keep_name(module: nn.Module) -> None:
    """Gives the subclass that FSDP created the name of the original class, for tables and messages."""
    subclass = type(module)
    original = subclass.__mro__[2]
    subclass.__name__, subclass.__qualname__ = original.__name__, original.__qualname__


def own_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a sharded tensor's rows on this rank, in the same memory; other tensors unchanged."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():
        rows: torch.Tensor = to_local()
    return rows


def weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that the optimizer updates, by name: in a sharded model this rank's rows."""
    return {name: getattr(one, _OWN, one) for name, one in model.named_parameters()}


def whole_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Returns the whole shapes of a model's sharded tensors, by the names of its state_dict."""
    return {name: one.shape for name, one in model.state_dict().items() if hasattr(one, "to_local")}


def take_gradients(model: nn.Module) -> list[str]:
    """Moves the gradients that backward left in a sharded model to `weights`.

    Returns:
        Names of trained parameters without a gradient.
    """
    without = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        own = getattr(parameter, _OWN)
        own.grad = None if parameter.grad is None else own_rows(parameter.grad)
        if own.grad is None:
            without.append(name)
        parameter.grad = None
    return without


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context for forward passes without gradients; after it a sharded model holds only its rows.

    It isn't torch's inference mode, in which a cache can't be trained with later, TorchScript fails, and
    `measure` can't compute gradients. Gradients that it leaves at parameters are discarded.
    """
    sharded: list[Any] = [one for one in model.modules() if hasattr(one, "set_requires_gradient_sync")]
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    with torch.no_grad():
        yield
    for parameter, gradient in kept:
        parameter.grad = gradient
    for module in sharded:
        module.reshard()


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """A context in which each rank has a sharded model whole, so that one may call it alone; collective.

    To be opened within `evaluating`, which gives the memory back.
    """
    sharded: list[Any] = [one for one in model.modules() if hasattr(one, "set_reshard_after_forward")]
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    yield
    for module in sharded:
        module.set_reshard_after_forward(module is not model, recurse=False)  # as torch begins


def own_part(
    rows: Rows, shapes: Mapping[str, Sequence[int]], saved: Mapping[str, Mapping[str, torch.Tensor]]
) -> dict[str, dict[str, torch.Tensor]]:
    """Returns this rank's rows of a run's state, read from a checkpoint that holds it whole.

    Args:
        rows: This rank's rows.
        shapes: From `whole_shapes`.
        saved: Tensors by kind and name, as in `trainer.train.state.tensors_of`; lazy ones are read by slices.

    Raises:
        ValueError: If a tensor has another shape.
    """
    own: dict[str, dict[str, torch.Tensor]] = {}
    for kind, tensors in saved.items():
        own[kind] = {}
        for name, tensor in tensors.items():
            shape = shapes.get(parameter_of(kind, name))
            is_slot = kind == "optimizer"  # it may have another shape than its parameter, as a count of steps
            if shape is None or (is_slot and tensor.shape != shape):
                own[kind][name] = tensor[...]
            elif tensor.shape != shape:
                raise ValueError(f"{kind}: {name} isn't the same in the checkpoint and in the model")
            else:
                own[kind][name] = rows.of(tensor)
    return own


def parameter_of(kind: str, name: str) -> str:
    """Returns the name of the parameter that a tensor of a run's state belongs to."""
    return name.rpartition("/")[0] if kind == "optimizer" else name
