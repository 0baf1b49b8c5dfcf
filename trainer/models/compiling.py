"""torch.compile of the whole model or block by block, with a clear line where it isn't possible."""

import functools
import getpass
import logging
import os
import shutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config.model import CompileConfig
from trainer.models.inductor import avoid_wrong_code

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


def failed_to_compile(error: Exception) -> bool:
    """Returns True if torch's compiler raised an error, rather than what it compiled."""
    frames = traceback.walk_tb(error.__traceback__)
    within = any(frame.f_code.co_name == "fx_codegen_and_compile" for frame, _ in frames)
    return within or type(error).__module__.startswith("torch._dynamo.")


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
    avoid_wrong_code()
