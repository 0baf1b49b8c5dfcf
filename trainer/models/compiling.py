"""torch.compile of the whole model or block by block, with a clear line where it isn't possible."""

import dataclasses
import functools
import getpass
import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config.model import CompileConfig

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# Blocks of many shapes share one code object; torch falls back to eager after eight of them.
_MOST_SHAPES = 128
# Before torch 2.6 DDP's graph splitter rejects graphs with checkpointing
# (https://github.com/pytorch/pytorch/issues/104674).
SPLITS_ALL_GRAPHS = hasattr(torch.compiler, "set_stance")


def missing_for_compiling(device: torch.device) -> str | None:
    """Names the requirement of torch.compile that this host lacks, with the remedy; None if there is none.

    Inductor builds C++ for a CPU, Triton a C launcher for a GPU; both include Python's headers.
    """
    if device.type == "cuda":
        compilers, package = [os.environ.get("CC", ""), "clang", "gcc"], "gcc"
    else:
        usual = "clang++" if sys.platform == "darwin" else "g++"
        compilers, package = [os.environ.get("CXX", usual)], "g++"
    if not any(compiler and shutil.which(compiler) for compiler in compilers):
        return f"no compiler was found ({' or '.join(filter(None, compilers))}); install {package}"
    header = Path(sysconfig.get_path("include"), "Python.h")
    try:
        header.stat()
    except OSError:  # or it may not be looked at, which would raise with exists()
        return f"{header} is missing; install python3-dev, or use a Python that comes with its headers"
    return None


def prepare_cache() -> tuple[Path | None, str | None]:
    """Prepares the cache of compiled code: TORCHINDUCTOR_CACHE_DIR, or a folder in XDG_CACHE_HOME.

    Returns:
        The folder, None for torch's own choice; and the reason why the configured one can't be used, or None.
    """
    try:
        getpass.getuser()  # torch's compiler names its folder by it
    except (KeyError, OSError):  # a container's UID needs no name
        os.environ["LOGNAME"] = f"uid-{os.getuid()}"
    wanted = os.environ.get(CACHE_VARIABLE)
    if wanted is None and "XDG_CACHE_HOME" in os.environ:
        wanted = str(Path(os.environ["XDG_CACHE_HOME"], "torchinductor"))
    if wanted is None:
        return None, None
    folder = Path(wanted)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        usable = False
    if usable:
        os.environ[CACHE_VARIABLE] = str(folder)
        return folder, None
    os.environ.pop(CACHE_VARIABLE, None)
    return None, f"compile cache {folder} can't be written, torch's own is used; set {CACHE_VARIABLE}"


@contextmanager
def uncompiled() -> Iterator[None]:
    """A context in which compiled functions run eagerly; afterwards they run compiled again.

    torch.compile would permanently give up a function that it first sees within a dispatch mode.
    """
    compile_ = torch.compile
    with ExitStack() as stack:

        def first(*arguments: Any, **named: Any) -> Any:
            torch.compile = compile_
            _stay_eager(stack)
            return compile_(*arguments, **named)

        if "torch._dynamo" in sys.modules:
            _stay_eager(stack)
        else:  # which takes three seconds to import: not for nothing
            stack.callback(setattr, torch, "compile", compile_)
            torch.compile = first
        yield


def _stay_eager(stack: ExitStack) -> None:
    if hasattr(torch.compiler, "set_stance"):
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        return
    from torch._dynamo import eval_frame  # before torch 2.6

    stack.callback(setattr, eval_frame, "_maybe_set_eval_frame", eval_frame._maybe_set_eval_frame)
    setattr(eval_frame, "_maybe_set_eval_frame", lambda _: None)  # noqa: B010  (gone from newer ones)


def ddp_notes(world_size: int) -> list[str]:
    """Returns a line on compiled code within DDP, before torch 2.6."""
    if SPLITS_ALL_GRAPHS or world_size == 1:
        return []
    return [
        f"torch {torch.__version__}: DDP's optimizer of graphs is off, which refuses checkpointed blocks "
        "before 2.6: less of the communication may overlap with backward"
    ]


def torch_mode(config: CompileConfig, device: torch.device) -> str:
    """Returns torch's name of the mode; CUDA graphs only for a whole model, as blocks would share memory."""
    if config.cuda_graphs and device.type == "cuda":
        return config.mode
    return {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}.get(
        config.mode, config.mode
    )


def compile_model(model: nn.Module, config: CompileConfig, device: torch.device) -> Callable[..., Any]:
    """Compiles the whole model; the model itself stays unchanged, for evaluation."""
    set_up_torch()
    compiled: Callable[..., Any] = torch.compile(model, mode=torch_mode(config, device), dynamic=False)
    return compiled


def compile_blocks(blocks: Iterable[nn.Module], config: CompileConfig, device: torch.device) -> None:
    """Compiles blocks in place for training; in evaluation they run eagerly."""
    set_up_torch()
    for block in blocks:
        compiled = torch.compile(block.forward, mode=torch_mode(config, device), dynamic=False)
        block.forward = functools.partial(_choose, block, compiled, block.forward)


def _choose(
    block: nn.Module, compiled: Callable[..., Any], original: Callable[..., Any], *values: Any, **named: Any
) -> Any:
    # Evaluation has other shapes and is a small fraction of a run: not worth another compilation.
    return (compiled if block.training else original)(*values, **named)


def set_up_torch() -> None:
    """Sets torch._dynamo's global configuration, before the first compilation."""
    import torch._dynamo  # slow to import: three seconds

    # Without a GPU it logs with each compilation that there is none.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    torch._dynamo.config.cache_size_limit = max(_MOST_SHAPES, torch._dynamo.config.cache_size_limit)
    if not SPLITS_ALL_GRAPHS:
        torch._dynamo.config.optimize_ddp = False
    _avoid_wrong_code()


def save_reads(graph: torch.fx.Graph) -> None:
    """Marks what is computed from an input that the forward pass changes: saved for backward, not repeated.

    Args:
        graph: Forward and backward pass, in which only copies to inputs at the end change something.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    copy = torch.ops.aten.copy_.default
    left = [node.args[0] for node in graph.nodes if node.target is copy]
    while left:
        for user in left.pop().users:
            if user.target is copy:
                continue
            schema = getattr(user.target, "_schema", None)
            if schema is not None and any(one.alias_info for one in schema.returns):
                left.append(user)  # a view shows the changes, too
            else:
                user.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def cache_key() -> str:
    """Returns what compiled code depends on and torch's own keys of its caches leave out.

    Before torch 2.14 they leave out autocast's dtype (https://github.com/pytorch/pytorch/pull/181564); in all
    versions the kernels that attention may choose, and the threads for which C++ is generated.
    """
    kinds = [torch.get_autocast_dtype(one) for one in ("cpu", "cuda") if torch.is_autocast_enabled(one)]
    sdp = torch.backends.cuda
    attention = (sdp.cudnn_sdp_enabled(), sdp.flash_sdp_enabled(), sdp.mem_efficient_sdp_enabled())
    ours = "trainer: copies stay, reads of what changes are saved, no random numbers by four"
    return f"{ours}, {kinds}, {attention}, {torch.get_num_threads()}"


def _graph_pass() -> Any:
    """Returns `save_reads` as a pass of inductor, which has `cache_key` from torch 2.6 on."""
    try:
        from torch._inductor import custom_graph_pass
    except ImportError:
        return save_reads
    named = {"__call__": lambda _, graph: save_reads(graph), "uuid": lambda _: cache_key()}
    return type("SaveReads", (custom_graph_pass.CustomGraphPass,), named)()


def _is_made_here(node: torch.fx.Node) -> bool:
    """True if what a node changes isn't an input of the graph."""
    return isinstance(node.args[0], torch.fx.Node) and node.args[0].op != "placeholder"


def _avoid_wrong_code() -> None:
    """Turns off parts of inductor that generate wrong code in some versions, without an error."""
    from torch._inductor import config
    from torch._inductor.codegen.triton import TritonOverrides
    from torch._inductor.fx_passes import post_grad, reinplace

    # In all versions: the copy of a buffer is left out though the buffer changes later, so that what is
    # computed from the copy, and its gradient, are wrong (https://github.com/pytorch/pytorch/issues/198131).
    for copying in (torch.ops.aten.clone.default, torch.ops.aten.copy.default):
        post_grad.noop_registry.pop(copying, None)

    # In 2.9 at least: a buffer is changed by an index before what reads it earlier. It is changed at the end.
    for op in (torch.ops.aten.index_put.default, torch.ops.aten._unsafe_index_put.default):
        if (known := reinplace.inplaceable_ops.get(op)) is not None:
            reinplace.inplaceable_ops[op] = dataclasses.replace(known, extra_check=_is_made_here)

    # In all versions, too: backward computes again what was made of a buffer, from the changed one
    # (https://github.com/pytorch/pytorch/pull/197039).
    config.joint_custom_post_pass = _graph_pass()
    if config.joint_custom_post_pass is save_reads:  # without a key of its own in caches
        config.fx_graph_cache = False
    # From 2.10 on: a sum that is a part of a larger gradient may never be written
    # (https://github.com/pytorch/pytorch/issues/193061, in 2.14.1 too).
    if hasattr(config.triton, "mix_order_reduction"):
        config.triton.mix_order_reduction = False
    # From 2.13 on: dropout's masks repeat, and a recomputed one differs from that of the forward pass
    # (https://github.com/pytorch/pytorch/issues/198333, in 2.14.1 too). No switch restores the former code.
    if hasattr(TritonOverrides, "_can_use_4x_random"):
        setattr(TritonOverrides, "_can_use_4x_random", staticmethod(lambda: False))  # noqa: B010
