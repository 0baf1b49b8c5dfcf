"""The loss of a language model's head: cross entropy of logits that are never whole in memory.

Logits of 32 x 1,024 tokens and 128,256 words are 16 GiB in float32, and their softmax and gradient as much
again. Here they live for a piece of the tokens at a time, and the gradients of hidden states and weights are
made with them in the forward pass, so that nothing is computed twice.
"""

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

IGNORED = -100  # such targets don't count, as in torch's cross_entropy
# Numbers of a piece, half a GiB in float32; up to so many logits are made at once, by torch's own functions.
PIECE = 1 << 27


def in_pieces(tokens: torch.Tensor, vocabulary: int) -> bool:
    """Whether the logits of tokens are too large to be whole.

    In float16 they are whole all the same: gradients without a loss scale would leave its range.
    """
    if tokens.numel() * vocabulary <= PIECE:
        return False
    return _autocast_dtype(tokens) != torch.float16


class Scaling(NamedTuple):
    """What some heads make of their products: times a factor, then softly capped by `cap * tanh(x / cap)`."""

    factor: float = 1.0
    cap: float | None = None

    def of(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits as the model means them."""
        if self.factor != 1.0:
            logits = logits * self.factor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


PLAIN = Scaling()


def head_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    scaling: Scaling = PLAIN,
) -> torch.Tensor:
    """Cross entropy in nats of the logits `hidden @ weight.T`, summed over the targets.

    Args:
        hidden: Float (..., width).
        weight: Of the head, (vocabulary, width).
        targets: int64 (...); those that are -100 don't count.
        bias: Of the head, (vocabulary,).
        scaling: Of the logits.

    Returns:
        float (), float32 at least.
    """
    learns = torch.is_grad_enabled()
    wanted = tuple(learns and one is not None and one.requires_grad for one in (hidden, weight, bias))
    arguments = (hidden.flatten(0, -2), weight, bias, targets.flatten(), _dtype(hidden), wanted, scaling)
    loss: torch.Tensor = _HeadLoss.apply(*arguments)  # type: ignore[no-untyped-call]
    return loss


def _dtype(hidden: torch.Tensor) -> torch.dtype:
    """What products are computed in."""
    return (None if hidden.dtype == torch.float64 else _autocast_dtype(hidden)) or hidden.dtype


def _autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    kind = tensor.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        dtype: torch.dtype,
        wanted: tuple[bool, bool, bool],
        scaling: Scaling,
    ) -> torch.Tensor:
        """Adds up pieces of about as many tokens each.

        Args:
            dtype: Of the products.
            wanted: Whether hidden states get a gradient, weights, and the bias.
        """
        exact = torch.promote_types(dtype, torch.float32)
        places, words = len(hidden), torch.arange(len(weight), device=weight.device)
        pieces = max(1, -(-places * len(weight) // PIECE))
        head, loss = weight.to(dtype), torch.zeros((), dtype=exact, device=hidden.device)
        of_weight = torch.zeros_like(weight, dtype=exact) if wanted[1] else None
        added = None if bias is None else bias.to(dtype)
        of_bias = None if bias is None else torch.zeros_like(bias, dtype=exact)
        of_hidden = []
        size = max(1, -(-places // pieces))
        for some, target in zip(hidden.to(dtype).split(size), targets.split(size), strict=True):
            logits = scaling.of(F.linear(some, head, added).to(exact))
            counts = target != IGNORED
            total = logits.logsumexp(1)
            picked = logits.gather(1, torch.where(counts, target, 0)[:, None])[:, 0]
            # Not in place: where a function returns what it changed, torch 2.11 compiles a backward pass that
            # gives no gradient (https://github.com/pytorch/pytorch/issues/180642).
            loss = loss + torch.where(counts, total - picked, 0.0).sum()
            if not any(wanted):
                continue
            right = (words == target[:, None]).to(torch.uint8)
            slope = None if scaling.cap is None else (logits / scaling.cap).square_().neg_().add_(1)
            logits.sub_(total[:, None]).exp_().sub_(right)
            logits.mul_(counts[:, None])
            if slope is not None:
                logits.mul_(slope)
            if scaling.factor != 1.0:
                logits.mul_(scaling.factor)
            if of_bias is not None:
                of_bias += logits.sum(0)
            wrong = logits.to(dtype)
            if wanted[0]:
                of_hidden.append(wrong @ head)
            if of_weight is not None:
                of_weight += wrong.t() @ some
        ctx.save_for_backward(
            torch.cat(of_hidden).to(hidden.dtype) if wanted[0] else None,
            None if of_weight is None else of_weight.to(weight.dtype),
            of_bias.to(bias.dtype) if bias is not None and of_bias is not None and wanted[2] else None,
        )
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scales what the forward pass made."""
        saved: tuple[torch.Tensor | None, ...] = ctx.saved_tensors
        (gradient,) = gradients
        scaled = [None if one is None else one * gradient for one in saved]
        return *scaled, None, None, None, None
