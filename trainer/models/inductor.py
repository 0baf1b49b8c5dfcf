"""Parts of torch's compiler that generate wrong code without an error, and what is done instead."""

import dataclasses
import hashlib
import importlib
import operator
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.fx import Graph, Node

_COPY = torch.ops.aten.copy_.default
_INDEXED = (torch.ops.aten.index_put.default, torch.ops.aten._unsafe_index_put.default)


@torch.library.custom_op("trainer::copy_into", mutates_args={"into"})
def copy_into(into: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a tensor into another one, in a kernel of its own, which inductor can't fuse."""
    into.copy_(value)


def _lowered(into: Any, value: Any) -> None:
    """Lowers `copy_into` to torch's own `copy_`; before it inductor computes all that reads `into`."""
    from torch._inductor import ir

    ir.InplaceCopyFallback.create(into, value)  # by the usual fallback later reads would see the change


def avoid_wrong_code() -> None:
    """Turns off, or replaces, what generates wrong code in some versions of torch."""
    from torch._inductor import config, lowering
    from torch._inductor.codegen.triton import TritonOverrides
    from torch._inductor.fx_passes import post_grad, reinplace
    from torch._inductor.scheduler import Scheduler, SchedulerNode

    # In all versions: the copy of a buffer is left out though the buffer changes later, so that what is
    # computed from the copy, and its gradient, are wrong (https://github.com/pytorch/pytorch/issues/198131).
    for copying in (torch.ops.aten.clone.default, torch.ops.aten.copy.default):
        post_grad.noop_registry.pop(copying, None)

    # In all versions: a buffer changes before, or while, it is read at other places
    # (https://github.com/pytorch/pytorch/issues/198270).
    config.post_grad_custom_post_pass = _graph_pass(copy_apart)
    lowering.register_lowering(torch.ops.trainer.copy_into.default, type_promotion_kind=None)(_lowered)
    for op in _INDEXED:
        if (known := reinplace.inplaceable_ops.get(op)) is not None:
            reinplace.inplaceable_ops[op] = dataclasses.replace(known, extra_check=is_read_just_here)

    # Before 2.14: on CPUs what reads a buffer may be computed before what scatters into it, on GPUs within it
    # (https://github.com/pytorch/pytorch/issues/171493).
    _put_in(SchedulerNode, "recompute_size_and_body", _keeping_order)
    _put_in(Scheduler, "fusable_read_and_write", _not_after_scatter)

    # In all versions, too: backward computes again what was made of a buffer, from the changed one
    # (https://github.com/pytorch/pytorch/pull/197039).
    config.joint_custom_post_pass = _graph_pass(save_reads)
    if config.joint_custom_post_pass is save_reads:  # without a key of its own in caches
        config.fx_graph_cache = False
    # In all versions: changes of a float64 tensor without dimensions are left out, as of a float of Python.
    for name in ("graph_compile", "jit_compile_runtime_wrappers", "dispatch_and_compile_graph"):
        with suppress(ImportError):
            module = importlib.import_module(f"torch._functorch._aot_autograd.{name}")
            if hasattr(module, "tensorify_python_scalars"):
                _put_in(module, "tensorify_python_scalars", _for_numbers_alone)

    # From 2.10 on: a sum that is a part of a larger gradient may never be written
    # (https://github.com/pytorch/pytorch/issues/193061, in 2.14.1 too).
    if hasattr(config.triton, "mix_order_reduction"):
        config.triton.mix_order_reduction = False
    # From 2.13 on: dropout's masks repeat, and a recomputed one differs from that of the forward pass
    # (https://github.com/pytorch/pytorch/issues/198333, in 2.14.1 too). No switch restores the former code.
    if hasattr(TritonOverrides, "_can_use_4x_random"):
        setattr(TritonOverrides, "_can_use_4x_random", staticmethod(lambda: False))  # noqa: B010


def _put_in(
    owner: type | ModuleType, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replaces a method or function by what is made of it, once."""
    if (known := getattr(owner, name)).__module__ != __name__:
        setattr(owner, name, change(known))


def _for_numbers_alone(tensorify: Callable[..., None]) -> Callable[..., None]:
    """Returns a pass that makes tensors of Python's numbers, and leaves graphs without them as they are."""
    reads = torch.ops.aten._local_scalar_dense.default

    def made(graph: Any, *arguments: Any, **named: Any) -> None:
        for node in graph.graph.nodes:
            if node.target is reads or isinstance(node.meta.get("val"), torch.SymFloat):
                tensorify(graph, *arguments, **named)
                return

    return made


def _keeping_order(recompute: Callable[..., None]) -> Callable[..., None]:
    """Returns a method that lays out a node's loops anew and keeps what the node must come after.

    Before 2.14 torch's own reads the dependencies off the loops alone, where changes of buffers don't show.
    """
    from torch._inductor.dependencies import MemoryDep

    def recomputed(node: Any, *arguments: Any, **named: Any) -> None:
        before, real = node.read_writes.reads, node.scheduler.mutation_real_name
        recompute(node, *arguments, **named)
        changed = {real[one.name]: one.name for one in before if one.name in real}
        found = node.read_writes.rename(changed)
        for order in before:
            found = found if isinstance(order, MemoryDep) else found.with_read(order)
        node.set_read_writes(found)

    return recomputed


def _not_after_scatter(fusable: Callable[..., bool]) -> Callable[..., bool]:
    """Returns a method that fuses no read with a scatter: other threads of the kernel may write later."""
    from torch._inductor import ir

    def fused(scheduler: Any, read: Any, write: Any, **named: Any) -> bool:
        made = scheduler.name_to_buf.get(write.name)
        data = getattr(getattr(getattr(made, "defining_op", None), "node", None), "data", None)
        return not isinstance(data, ir.Scatter) and fusable(scheduler, read, write, **named)

    return fused


def save_reads(graph: Graph) -> None:
    """Marks what is computed from an input that the forward pass changes: saved for backward, not repeated.

    Args:
        graph: Forward and backward pass, in which only copies to inputs at the end change something.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    left = [node.args[0] for node in graph.nodes if node.target is _COPY]
    while left:
        for user in left.pop().users:
            if user.target is _COPY:
                continue
            if _is_a_view(user):
                left.append(user)  # a view shows the changes, too
            else:
                user.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def copy_apart(graph: Graph) -> None:
    """Copies changes back to an input by `copy_into`: inductor would fuse the copy with reads of the input.

    What is read just for its change, place by place, stays fused: a count, BatchNorm's statistics.
    """
    for node in [node for node in graph.nodes if node.target is _COPY]:
        into, value = node.args[:2]
        if not _is_read_just_for(node, into):
            with graph.inserting_before(node):
                graph.call_function(torch.ops.trainer.copy_into.default, (into, value))
            node.replace_all_uses_with(into)
            graph.erase_node(node)


def _is_read_just_for(copy: Node, into: Node) -> bool:
    """True if all that is made of an input ends in its copy, by functions of single elements."""
    left, seen = [into], {copy}
    while left:
        one = left.pop()
        for user in one.users.keys() - seen:
            if user.target is torch.ops.aten.copy.default and user.args[1] is not one:
                continue  # takes its shape alone
            pointwise = torch.Tag.pointwise in getattr(user.target, "tags", ())
            if not pointwise or user.meta["val"].shape != into.meta["val"].shape:
                return False
            seen.add(user)
            left.append(user)
    return True


def is_read_just_here(node: Node) -> bool:
    """True if what a node changes is made in this graph and read by nothing else: it may change in place."""
    changed = node.args[0]
    if not isinstance(changed, Node) or changed.op != "call_function" or _is_a_view(changed):
        return False
    return len(changed.users) == 1


def _is_a_view(node: Node) -> bool:
    """True if a node gives memory of what it gets, or an item of a list of views."""
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(one.alias_info for one in schema.returns)


def cache_key() -> str:
    """Returns what compiled code depends on and torch's own keys of its caches leave out.

    Before torch 2.14 they leave out autocast's dtype (https://github.com/pytorch/pytorch/pull/181564); in all
    versions the kernels that attention may choose, and the threads for which C++ is generated.
    """
    kinds = [torch.get_autocast_dtype(one) for one in ("cpu", "cuda") if torch.is_autocast_enabled(one)]
    sdp = torch.backends.cuda
    attention = (sdp.cudnn_sdp_enabled(), sdp.flash_sdp_enabled(), sdp.mem_efficient_sdp_enabled())
    ours = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()  # what stands here changes the code
    return f"trainer {ours}, {kinds}, {attention}, {torch.get_num_threads()}"


def _graph_pass(change: Callable[[Graph], None]) -> Any:
    """Returns a function as a pass of inductor, which has `cache_key` from torch 2.6 on."""
    try:
        from torch._inductor import custom_graph_pass
    except ImportError:
        return change
    named = {"__call__": lambda _, graph: change(graph), "uuid": lambda _: cache_key()}
    return type(change.__name__, (custom_graph_pass.CustomGraphPass,), named)()
