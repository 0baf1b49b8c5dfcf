"""Out of memory: the holders of the memory, and the settings to change."""

import contextlib
import errno
import re
import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from trainer.config.sizes import GIB, KIB, MIB, TIB
from trainer.host.files import write_whole, written_whole
from trainer.host.limits import read_limits
from trainer.host.processes import resident_bytes

# How those say it that take a GPU's memory beside torch's allocator: cuBLAS and its like for handles, cuDNN
# for plans, Triton and the driver for kernels, NCCL for buffers; and torch itself where NVML doesn't answer.
_ON_GPU = re.compile(
    r"CUDA out of memory|CUDA (driver )?error: out of memory|Triton Error \[CUDA\]: out of memory"
    r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|Cuda failure (2 )?'out of memory'"
    r"|CU\w+_ALLOC_FAILED|CUDNN_\w+DEVICE_ALLOCATION_FAILED|NVML_SUCCESS == r INTERNAL ASSERT FAILED"
)
# Symptoms of a full GPU, and of much else: they count while less than this share of its memory is free.
_MAYBE = re.compile(
    r"CU\w+_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR|NOT_SUPPORTED)|unable to find an engine"
    r"|unhandled cuda error|device not ready|!handles_\.at"
)
_FULL = 0.02
_ON_HOST = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|bad_alloc|Cannot allocate memory"
    r"|HOST_ALLOCATION_FAILED"
)
# In a probe, which has begun with less and went well.
_MAYBE_ON_HOST = re.compile(
    r"could not create a primitive|can't start new thread|Resource temporarily unavailable"
)

_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"
_SHOWN = 5
_LETTERS = 160
_REST = "activations and temporaries"
_CACHE = "cached, in pieces that don't fit"
_OTHERS = "other processes, CUDA itself"
_STANDARD = sysconfig.get_path("stdlib")
_TRAINER = str(Path(__file__).parents[1])
_OBSERVING = str(Path(__file__).parent)  # looks on while others allocate


def is_out_of_memory(error: BaseException, *, probing: bool = False) -> bool:
    """Returns True if an exception means that memory, the device's or the host's, ran out.

    Args:
        probing: Whether it is looked for where memory ends: then whatever fails on a full GPU means it.
    """
    if _is_of_gpu(error, probing) or isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = str(error) if isinstance(error, RuntimeError) else ""
    return bool(_ON_HOST.search(words) or (probing and _MAYBE_ON_HOST.search(words)))


def _is_of_gpu(error: BaseException, probing: bool = False) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    words = str(error)
    return bool(_ON_GPU.search(words)) or ((probing or bool(_MAYBE.search(words))) and _gpu_is_full())


def _gpu_is_full() -> bool:
    """Returns True if this process's GPU has no memory left outside of torch's allocator."""
    with contextlib.suppress(RuntimeError):  # after some errors nothing more can be asked
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            free, total = torch.cuda.mem_get_info()
            return free < _FULL * total
    return False


def held_by(
    model: nn.Module, optimizer: torch.optim.Optimizer, **others: Iterable[torch.Tensor]
) -> dict[str, int]:
    """Bytes by holder, largest first; a tensor that several hold counts once.

    Args:
        others: Tensors of further holders, by name ("average", "batch").
    """
    # Where they are sharded, this rank's rows (`distributed.sharding.weights`).
    parameters = [getattr(p, "own_rows", p) for p in model.parameters()]
    weights = [*parameters, *model.buffers()]
    state = (v for one in optimizer.state.values() for v in one.values() if isinstance(v, torch.Tensor))
    holders = {
        "weights": weights,
        "gradients": (p.grad for p in parameters if p.grad is not None),
        "optimizer state": state,
        **others,
    }
    seen: set[tuple[torch.device, int]] = set()
    held = dict[str, int]()
    for name, tensors in holders.items():
        held[name] = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if (place := (tensor.device, storage.data_ptr())) not in seen:
                seen.add(place)
                held[name] += storage.nbytes()
    return dict(sorted(held.items(), key=lambda item: -item[1]))


def explain_oom(
    error: BaseException,
    device: torch.device,
    folder: Path | None,
    held: Mapping[str, int],
    *,
    micro_batch_size: int,
    checkpointing: str = "none",
    precision: str = "fp32",
    rank: int = 0,
) -> str:
    """Returns one paragraph: the allocation that failed, the owners of the memory, the remedy.

    Writes memory_summary.txt and memory_snapshot.pickle (for https://pytorch.org/memory_viz; nothing of ours
    reads it) to the folder when a GPU's memory ran out; of another rank than the first with its number.

    Args:
        error: What was raised, still with its traceback.
        folder: The run folder, or None: nothing is written.
        held: From `held_by`.
    """
    where = _where(error)
    if not _is_of_gpu(error):
        return _on_host(error, held, where)
    written = _write(device, folder, rank)
    wanted = _size(error, rf"[Tt]ried to allocate {_SIZE}")
    now, reserved = _taken(device)
    allocated = _size(error, rf"{_SIZE} is allocated by PyTorch") or now
    cached = _size(error, rf"{_SIZE} is reserved by PyTorch but unallocated") or max(0, reserved - allocated)
    total = _size(error, rf"total capacity of {_SIZE}")
    free = _size(error, rf"of which {_SIZE} is free")
    sizes = {
        **held,
        _REST: max(0, allocated - sum(held.values())),
        _CACHE: cached,
        _OTHERS: max(0, total - free - allocated - cached) if total else 0,
    }
    names = sorted((name for name in sizes if sizes[name] >= MIB), key=lambda name: -sizes[name])
    shares = ", ".join(f"{name} {sizes[name] / GIB:.2f} GiB" for name in names[:_SHOWN])
    has = f" of {total / GIB:.1f} GiB" if total else ""
    advice = "; ".join(_advice(sizes, wanted, micro_batch_size, checkpointing, precision))
    what = f"{wanted / MIB:,.0f} MiB more were wanted" if wanted else f"'{_first_line(error)}'"
    return f"out of memory on {device}{has}{where}: {what}. Held: {shares}. What to do: {advice}.{written}"


def _taken(device: torch.device) -> tuple[int, int]:
    """Bytes that torch has given away, and those that it holds; 0 where it can't be asked any more."""
    with contextlib.suppress(RuntimeError):
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        return stats["allocated_bytes"]["all"]["current"], stats["reserved_bytes"]["all"]["current"]
    return 0, 0


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:_LETTERS]


def _advice(
    sizes: Mapping[str, int], wanted: int, micro_batch_size: int, checkpointing: str, precision: str
) -> list[str]:
    used = max(1, sum(sizes.values()))
    found = []
    if sizes[_OTHERS] > max(2 * GIB, used / 5):
        found.append("see nvidia-smi for other processes on this GPU")
    # A cache that would have held it all: only its pieces are too small.
    if sizes[_CACHE] > max(wanted, used / 20):
        found.append("memory.allocator=expandable, which lets pieces be joined")
    if micro_batch_size > 1:
        found.append(
            f"data.micro_batch_size={max(1, micro_batch_size // 2)} with the same data.global_batch_size "
            "(gradients add up, the result stays)"
        )
    if checkpointing == "none":
        found.append("memory.checkpointing=blocks (activations are computed again)")
    if precision in ("fp32", "tf32"):
        found.append("precision.mode=bf16")
    if sizes.get("optimizer state", 0) > sizes[_REST]:
        found.append("an optimizer with less state (optim.name=sgd)")
    return found or ["a smaller model, or a GPU with more memory"]


def _on_host(error: BaseException, held: Mapping[str, int], where: str) -> str:
    match = re.search(r"allocate (\d+) bytes", str(error))
    wanted = f"{int(match[1]) / GIB:.2f} GiB more were wanted" if match else "no more is to be had"
    held_text = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in held.items() if size >= MIB)
    limits = read_limits()
    return (
        f"out of host memory{where}: {wanted}; this process has {resident_bytes() / GIB:.2f} GiB of "
        f"{limits.memory_bytes / GIB:.1f} ({limits.sources['memory_bytes']})"
        f"{', of which ' + held_text if held_text else ''}. What to do: a smaller data.micro_batch_size with "
        "the same data.global_batch_size; memory.checkpointing=blocks; fewer data.workers or a smaller "
        "data.prefetch."
    )


def _where(error: BaseException) -> str:
    """The innermost line that isn't of a library."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", _STANDARD, _OBSERVING))
        and "site-packages" not in frame.filename
    ]
    # Of a user's model rather than of the trainer, which only called it.
    models = [frame for frame in frames if not frame.filename.startswith(_TRAINER)]
    for frame in reversed(models or frames):
        return f" in {Path(frame.filename).name}:{frame.lineno}"
    return ""


def _write(device: torch.device, folder: Path | None, rank: int) -> str:
    """Writes torch's memory summary and snapshot; returns a sentence that names the files, or ""."""
    if folder is None:
        return ""
    files, of = [], f".rank-{rank}" if rank else ""
    with contextlib.suppress(OSError, RuntimeError):
        file = folder / f"memory_summary{of}.txt"
        write_whole(file, torch.cuda.memory_summary(device))
        files.append(file)
    with contextlib.suppress(OSError, RuntimeError):
        file = folder / f"memory_snapshot{of}.pickle"
        with written_whole(file, lasting=False) as beside:
            torch.cuda.memory._dump_snapshot(str(beside))
        files.append(file)
    return f" More in {' and '.join(map(str, files))}." if files else ""


def _size(error: BaseException, pattern: str) -> int:
    """Bytes that torch's message names; 0 if it doesn't."""
    match = re.search(pattern, str(error))
    return int(float(match[1]) * _UNITS[match[2]]) if match else 0
