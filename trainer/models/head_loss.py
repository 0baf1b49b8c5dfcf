"""Fused head and cross entropy of a language model, by pieces, without the whole logits in memory.

Logits of 32 x 1,024 tokens and a vocabulary of 128,256 take 16 GiB in float32, and as much again for softmax
and gradient. Here they exist for one piece of the tokens at a time, and the gradients of hidden states and
weights are computed in the forward pass, so that nothing is computed twice.
"""

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

IGNORED = -100  # targets to ignore, as in torch's cross_entropy
# Logits of a piece, half a GiB in float32; up to so many are computed whole, by torch's own functions.
PIECE = 1 << 27


def in_pieces(tokens: torch.Tensor, vocabulary: int) -> bool:
    """True if the logits of `tokens` are too large to be computed whole.

    In float16 they always are whole: gradients without a loss scale would leave its range.
    """
    if tokens.numel() * vocabulary <= PIECE:
        return False
    return _autocast_dtype(tokens) != torch.float16


class Scaling(NamedTuple):
    """Scaling of logits in some models: a factor, then a soft cap `cap * tanh(x / cap)`."""

    factor: float = 1.0
    cap: float | None = None

    def of(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns scaled logits."""
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
    right: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the cross entropy in nats of the logits `hidden @ weight.T`, summed over the targets.

    Args:
        hidden: Float (..., width).
        weight: Weight of the head, (vocabulary, width).
        targets: int64 (...), -100 to ignore.
        bias: Bias of the head, (vocabulary,).
        scaling: Scaling of the logits.
        right: Bool (...), set to where a target is the likeliest token.

    Returns:
        float (), float32 at least.
    """
    learns = torch.is_grad_enabled()
    wanted = tuple(learns and one is not None and one.requires_grad for one in (hidden, weight, bias))
    found = None if right is None else right.view(-1)
    arguments = (
        hidden.flatten(0, -2),
        weight,
        bias,
        targets.flatten(),
        _dtype(hidden),
        wanted,
        scaling,
        found,
    )
    loss: torch.Tensor = _HeadLoss.apply(*arguments)  # type: ignore[no-untyped-call]
    return loss


def _dtype(hidden: torch.Tensor) -> torch.dtype:
    """Returns the dtype of the matrix products."""
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
        found: torch.Tensor | None,
    ) -> torch.Tensor:
        """Sums over pieces of about equally many tokens.

        Args:
            dtype: Dtype of the matrix products.
            wanted: True for each of hidden states, weight and bias that needs a gradient.
            found: Set to where a target is the likeliest.
        """
        exact = torch.promote_types(dtype, torch.float32)
        tokens, vocabulary = len(hidden), torch.arange(len(weight), device=weight.device)
        pieces = max(1, -(-tokens * len(weight) // PIECE))
        head, loss = weight.to(dtype), torch.zeros((), dtype=exact, device=hidden.device)
        of_weight = torch.zeros_like(weight, dtype=exact) if wanted[1] else None
        added = None if bias is None else bias.to(dtype)
        of_bias = None if bias is None else torch.zeros_like(bias, dtype=exact)
        of_hidden = []
        size = max(1, -(-tokens // pieces))
        for number, (some, target) in enumerate(
            zip(hidden.to(dtype).split(size), targets.split(size), strict=True)
        ):
            logits = scaling.of(F.linear(some, head, added).to(exact))
            if found is not None:
                found[number * size :][: len(target)] = logits.argmax(1) == target
            counts = target != IGNORED
            total = logits.logsumexp(1)
            picked = logits.gather(1, torch.where(counts, target, 0)[:, None])[:, 0]
            # Not in place: for a function that returns a changed tensor, torch 2.11 compiles a backward pass
            # without a gradient (https://github.com/pytorch/pytorch/issues/180642).
            loss = loss + torch.where(counts, total - picked, 0.0).sum()
            if not any(wanted):
                continue
            right = (vocabulary == target[:, None]).to(torch.uint8)
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
        """Scales the gradients from the forward pass."""
        saved: tuple[torch.Tensor | None, ...] = ctx.saved_tensors
        (gradient,) = gradients
        scaled = [None if one is None else one * gradient for one in saved]
        return *scaled, None, None, None, None, None
