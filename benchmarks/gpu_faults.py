"""Faults of torch in docs/stacks.md, by code like their reports': as torch is, and as the trainer sets it.

A fault that doesn't show says that this torch, on this GPU, has none. On a CPU the code runs as well, small.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from trainer.models.compiling import set_up_torch
from trainer.models.head_loss import head_loss

_FAR = 1e-2  # relative difference of gradients that rounding doesn't explain


def _far(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """True if a gradient isn't finite, or differs by more than rounding."""
    return not bool(found.isfinite().all()) or float((found - wanted).norm()) > _FAR * float(wanted.norm())


def attention(device: torch.device, guarded: bool) -> bool:
    """Attention by cuDNN with a mask, 704 tokens and scores of about -100: are gradients finite?"""
    tokens = 704 if device.type == "cuda" else 64
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(not guarded)
    try:
        given = torch.randn(3, 1, 1, tokens, 64, device=device) * 0.1
        query, key, value = given.to(torch.bfloat16).unbind()
        query, key = (query + 3.5).requires_grad_(), key - 3.5  # 64 products of -12, over 8
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
        F.scaled_dot_product_attention(query, key, value, mask).float().sum().backward()
        assert query.grad is not None
        return not bool(query.grad.isfinite().all())
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def mixed_sums(device: torch.device, guarded: bool) -> bool:
    """Two LayerNorms whose scales and shifts are slices of one parameter: is its gradient eager torch's?"""
    rows, width = (8 * 1024, 1024) if device.type == "cuda" else (64, 64)

    def loss(table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        scale1, shift1, scale2, shift2 = table.chunk(4)
        x = F.layer_norm(x, (width,)) * (1 + scale1) + shift1
        x = F.layer_norm(x, (width,)) * (1 + scale2) + shift2
        return x.square().mean(0).sum()

    table, x = torch.randn(4, width, device=device) * 0.1, torch.randn(rows, width, device=device)
    patches = {"triton.mix_order_reduction": False} if guarded and _has("triton.mix_order_reduction") else {}
    return _far(_gradient(_compiled(loss, patches), table, x), _gradient(loss, table, x))


def copies(device: torch.device, guarded: bool) -> bool:
    """A copy of a buffer that changes later: is the gradient of what is computed from it eager torch's?"""

    def loss(weight: torch.Tensor, x: torch.Tensor, queue: torch.Tensor) -> torch.Tensor:
        made, kept = x @ weight, queue.clone()
        queue.mul_(0.5)
        return (made @ kept.T).square().sum()

    if guarded:
        set_up_torch()
    sizes = ((32, 16), (64, 32), (128, 16))
    weight, x, queue = (torch.randn(*size, device=device) for size in sizes)
    found = _gradient(_compiled(loss, {}), weight, x, queue.clone())
    return _far(found, _gradient(loss, weight, x, queue.clone()))


def dropout(device: torch.device, guarded: bool) -> bool:
    """Dropout after a reshape, checkpointed: do four neighbors have one mask, or has backward another?"""
    shape = (8, 64, 4096) if device.type == "cuda" else (2, 8, 64)

    def part(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x.transpose(1, 2).contiguous(), 0.5)

    def kept(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(part, x, use_reentrant=False)
        return out

    x = torch.ones(shape, device=device, requires_grad=True)
    out = _compiled(kept, {"fallback_random": True} if guarded else {})(x)
    out.sum().backward()
    assert x.grad is not None
    mask, again = out.detach() > 0, x.grad.transpose(1, 2) > 0
    fours = mask.unflatten(-1, (-1, 4))
    same = (fours == fours[..., :1]).all(-1).float().mean()
    return bool((mask != again).any()) or float(same) > 0.5  # 0.125 of fours are alike by chance


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        return torch.zeros((), device=hidden.device).add_(hidden.square().sum())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (hidden,), (gradient,) = ctx.saved_tensors, gradients
        slope: torch.Tensor = 2 * hidden * gradient
        return slope


def in_place(device: torch.device, guarded: bool) -> bool:
    """A compiled autograd.Function that changes what it returns, or the trainer's head: its gradient."""
    x = torch.randn(16, 32, device=device)
    if not guarded:
        plain = _InPlace.apply
        return _far(_gradient(_compiled(plain, {}), x), 2 * x)
    weight, targets = torch.randn(64, 32, device=device), torch.arange(16, device=device)

    def wanted(hidden: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")

    found = _compiled(lambda hidden: head_loss(hidden, weight, targets), {})
    return _far(_gradient(found, x), _gradient(wanted, x))


def mean_of_one(device: torch.device, guarded: bool) -> bool:
    """NCCL's mean over a group of one rank, or its sum: does every element come?"""
    with _alone(device):
        for size in (1, 3, 1021, 1 << 20, (1 << 20) + 3):
            for dtype in (torch.float32, torch.bfloat16):
                given = torch.ones(size, dtype=dtype, device=device)
                # In another tensor than the one that is given, as FSDP has it.
                found = torch.zeros_like(given)
                operation = dist.ReduceOp.SUM if guarded or device.type == "cpu" else dist.ReduceOp.AVG
                dist.reduce_scatter_tensor(found, given.clone(), op=operation)
                if not torch.equal(found, given):
                    return True
    return False


FAULTS: dict[str, Callable[[torch.device, bool], bool]] = {
    "pytorch/pytorch#196678": attention,
    "pytorch/pytorch#193061": mixed_sums,
    "pytorch/pytorch#198333": dropout,
    "pytorch/pytorch#198131": copies,
    "pytorch/pytorch#180642": in_place,
    "NVIDIA/nccl#1950": mean_of_one,
}


def faults() -> dict[str, Any]:
    """Tries all, each as torch is and as the trainer sets it.

    Returns:
        By report: `as_torch_is` and `as_set`: whether the fault shows, or the error as text.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    found: dict[str, Any] = {}
    for name, try_it in FAULTS.items():
        found[name] = {}
        for key, guarded in (("as_torch_is", False), ("as_set", True)):
            torch.manual_seed(0)
            torch.compiler.reset()
            try:
                found[name][key] = try_it(device, guarded)
            except Exception as error:  # a kernel that this GPU lacks: the others are still tried
                found[name][key] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return {"faults": found, "measured": device.type == "cuda"}


def _gradient(loss: Callable[..., torch.Tensor], first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    own = first.clone().requires_grad_()
    loss(own, *others).backward()
    return torch.zeros_like(own) if own.grad is None else own.grad


def _compiled(function: Callable[..., Any], patches: dict[str, Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(function, options=patches or None)
    return made


def _has(option: str) -> bool:
    import torch._inductor.config as settings

    section, _, name = option.rpartition(".")
    return hasattr(getattr(settings, section), name)


@contextlib.contextmanager
def _alone(device: torch.device) -> Iterator[None]:
    """Context manager of a process group of one rank."""
    with contextlib.ExitStack() as stack:
        store = dist.HashStore()  # type: ignore[attr-defined]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1
        )
        stack.callback(dist.destroy_process_group)
        yield
