"""torch.compile: of the whole model or block by block, with a clear line where it can't be done."""

import functools
import getpass
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config.model import CompileConfig
from trainer.host.toolchain import missing_compiler, missing_headers

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# Blocks of many shapes share one function; torch gives up compiling it after eight of them.
_MOST_SHAPES = 128
# Before torch 2.6 what splits graphs at DDP's buckets refuses those with checkpointing or FlexAttention
# (https://github.com/pytorch/pytorch/issues/104674).
SPLITS_ALL_GRAPHS = hasattr(torch.compiler, "set_stance")


def missing_for_compiling(device: torch.device) -> str | None:
    """Names the requirement of torch.compile that this host lacks, with the remedy; None if there is none.

    Inductor builds C++ for a CPU, Triton a C launcher for a GPU; both include Python's headers.
    """
    return missing_compiler(device.type == "cuda") or missing_headers()


def prepare_cache() -> tuple[Path | None, str | None]:
    """Makes sure that compiled code can be kept: in TORCHINDUCTOR_CACHE_DIR, or below XDG_CACHE_HOME.

    Returns:
        The folder, None for torch's own choice; and what is wrong with the wanted one, if anything is.
    """
    try:
        getpass.getuser()  # as torch's compiler calls its folder
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
    """Within it whatever torch.compile was called for runs as it is, and what was compiled stays compiled.

    A function that torch.compile meets within a dispatch mode, such as one that counts, it gives up for good.
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


def words_on_ddp(world_size: int) -> list[str]:
    """A line about compiled code within DDP, where this version of torch asks for one."""
    if SPLITS_ALL_GRAPHS or world_size == 1:
        return []
    return [
        f"torch {torch.__version__}: DDP's optimizer of graphs is off, which refuses checkpointed blocks and "
        "FlexAttention before 2.6: less of the communication may overlap with backward"
    ]


def torch_mode(config: CompileConfig, device: torch.device) -> str:
    """torch's name of the mode; CUDA graphs only of a whole model (blocks would share their memory)."""
    if config.cuda_graphs and device.type == "cuda":
        return config.mode
    return {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}.get(
        config.mode, config.mode
    )


def compile_model(model: nn.Module, config: CompileConfig, device: torch.device) -> Callable[..., Any]:
    """The whole model, compiled; the model itself stays as it is, for evaluation."""
    set_up_torch()
    compiled: Callable[..., Any] = torch.compile(model, mode=torch_mode(config, device), dynamic=False)
    return compiled


def compile_blocks(blocks: Iterable[nn.Module], config: CompileConfig, device: torch.device) -> None:
    """Compiles blocks in place for training; in evaluation they run as they are."""
    set_up_torch()
    for block in blocks:
        compiled = torch.compile(block.forward, mode=torch_mode(config, device), dynamic=False)
        block.forward = functools.partial(_choose, block, compiled, block.forward)


def _choose(
    block: nn.Module, compiled: Callable[..., Any], original: Callable[..., Any], *values: Any, **named: Any
) -> Any:
    # Evaluation has another shape and is a small part of a run: not worth compiling anew.
    return (compiled if block.training else original)(*values, **named)


def set_up_torch() -> None:
    """Sets what torch's compiler takes from its own configuration, before anything is compiled."""
    import torch._dynamo  # here: it takes three seconds

    # On a machine without a GPU it says with each compilation that there is none.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    torch._dynamo.config.cache_size_limit = max(_MOST_SHAPES, torch._dynamo.config.cache_size_limit)
    if not SPLITS_ALL_GRAPHS:
        torch._dynamo.config.optimize_ddp = False
