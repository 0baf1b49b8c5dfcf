"""A rank's allocator of GPU memory, set up before anything lies on a GPU."""

from collections.abc import Mapping

import torch

from trainer.config.model import Allocator
from trainer.host.allocator import check_allocator
from trainer.host.limits import read_limits
from trainer.host.nvml import driver_version, gpu_bytes

_FIRST_BYTES = 1 << 30
_HOST_SHARE = 0.8


def set_up_allocator(choice: Allocator, environ: Mapping[str, str]) -> None:
    """Checks that a rank on GPUs has the allocator that was asked for; managed memory is set up here.

    Call it before anything lies on a GPU.

    Raises:
        BadInputError: See `check_allocator`.
    """
    if choice == "native":
        return
    check_allocator(choice, environ, driver_version())
    if choice == "managed":
        gpu, ranks = int(environ.get("LOCAL_RANK", "0")), int(environ.get("LOCAL_WORLD_SIZE", "1"))
        use_managed_memory(gpu, gpu_bytes(environ, gpu), read_limits().memory_bytes // ranks)


def use_managed_memory(device: int, gpu_bytes: int, host_bytes: int) -> None:
    """Lets torch take its GPU memory from a pool of unified memory, which may be larger than the card.

    What doesn't fit on the card stays in the host's memory and moves when it is used.

    Args:
        device: Number of the GPU.
        gpu_bytes: Its memory.
        host_bytes: What of the host's memory this rank may use.
    """
    import rmm
    from rmm.allocators.torch import rmm_torch_allocator

    # Without a maximum the pool would grow until the kernel kills the process.
    most = gpu_bytes + int(host_bytes * _HOST_SHARE)
    rmm.reinitialize(
        pool_allocator=True,
        managed_memory=True,
        initial_pool_size=min(_FIRST_BYTES, most),
        maximum_pool_size=most,
        devices=device,
    )
    torch.cuda.memory.change_current_allocator(rmm_torch_allocator)
