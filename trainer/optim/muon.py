"""Muon: momentum made orthogonal for the hidden matrices, AdamW for everything else.

Jordan et al., 2024 ("Muon: An optimizer for hidden layers in neural networks"); the size of the update is
that of Liu et al., 2025 ("Muon is Scalable for LLM Training"). torch.optim.Muon came with torch 2.9, takes no
kernels of convolutions, and knows no skipped update.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from trainer.errors import BadInputError

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_LAYERS = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention, *_EMBEDDINGS)


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Returns the weights for Muon's orthogonal update, as Jordan et al., 2024, advise.

    These are the weights of linear layers, attention and convolutions (a kernel is a matrix of
    (out, in * height * width)), without the first and the last layer in the model's order, and without
    embeddings. Parameters of other modules are left to AdamW.
    """
    layers = [module for module in model.modules() if isinstance(module, _LAYERS)]
    others = [*layers[:1], *layers[-1:], *(layer for layer in layers if isinstance(layer, _EMBEDDINGS))]
    excluded = {id(p) for layer in others for p in layer.parameters()}
    weights = {id(p): p for layer in layers for p in layer.parameters() if p.requires_grad and p.ndim >= 2}
    return [weight for identity, weight in weights.items() if identity not in excluded]


def split_groups(groups: Iterable[dict[str, Any]], matrices: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Splits each parameter group into two, `orthogonal` and not, without empty ones."""
    chosen = {id(p) for p in matrices}
    split = [
        {**group, "params": [p for p in group["params"] if (id(p) in chosen) is wanted], "orthogonal": wanted}
        for group in groups
        for wanted in (True, False)
    ]
    return [group for group in split if group["params"]]


def orthogonalize(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Moves the singular values of matrices towards 1 and keeps their singular vectors.

    It is the Newton-Schulz iteration with the quintic of Jordan et al., 2024, which is steep at 0 and doesn't
    converge: singular values end between about 0.7 and 1.2, which is sufficient; tiny ones end lower.

    Args:
        matrices: (n, rows, columns); the computation is in their dtype.
        steps: Iterations.

    Returns:
        The same shape and dtype.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon for groups with `orthogonal`, AdamW for the others, with one learning rate and weight decay.

    A matrix moves by 0.2 * sqrt(max(rows, columns)) times its orthogonal momentum: about as far as AdamW
    would move it, so that AdamW's learning rate and weight decay serve for both. Weight decay is decoupled.

    The host never reads the device: `step` takes part in torch.amp.GradScaler's protocol for fused
    optimizers and skips an update there. Gradients are the same on all ranks when it is called, and each
    rank does the same work: nothing is sent.

    On a GPU from Ampere on, Newton-Schulz runs in bfloat16, which it tolerates; elsewhere in the weights'
    own dtype. On a CPU matrices are small and bfloat16 isn't faster; older GPUs only emulate it.

    Attributes:
        note: A line on what it updates, for the start of a run.
    """

    # Without what torch does for torch.compile, see `AdamW`.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: torch.Tensor | float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        """Creates all state as zeros, so that a checkpoint can be loaded and the first update be skipped.

        Args:
            params: Parameter groups; with a true `orthogonal` they hold matrices or kernels only.
            lr: Learning rate, float32 () on the device, read at each step.
            momentum: Nesterov momentum of the matrices.
            betas: Betas of AdamW.
            eps: Epsilon of AdamW.
            weight_decay: Weight decay of groups without their own.
        """
        # "fused" makes torch's load_state_dict keep "step" on the device.
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "orthogonal": False,
                "fused": True,
            },
        )
        self._step_supports_amp_scaling = True
        matrices = sum(len(group["params"]) for group in self.param_groups if group["orthogonal"])
        others = sum(len(group["params"]) for group in self.param_groups) - matrices
        self.note = f"muon for {matrices} matrices, adamw for the other {others} tensors"
        for group in self.param_groups:
            for p in group["params"]:
                if group["orthogonal"]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                else:
                    self.state[p]["step"] = torch.zeros((), device=p.device)
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)

    @staticmethod
    def split(groups: Iterable[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
        """See `PreallocatedOptimizer`."""
        if not (matrices := hidden_matrices(model)):
            raise BadInputError(
                "optim.name=muon: the model has no matrices between its first and its last layer; use adamw"
            )
        return split_groups(groups, matrices)

    @staticmethod
    def moments(_: torch.Tensor, group: Mapping[str, Any]) -> float:
        """See `PreallocatedOptimizer`."""
        return 1 if group["orthogonal"] else 2

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates the parameters that have a gradient; returns what `closure`, if any, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params: list[torch.Tensor] = [p for p in group["params"] if p.grad is not None]
            if not group["orthogonal"]:
                self._step_adamw(group, params)
                continue
            by_shape: dict[torch.Size, list[torch.Tensor]] = {}
            for p in params:
                by_shape.setdefault(p.shape, []).append(p)
            for alike in by_shape.values():
                self._step_matrices(group, alike)
        return loss

    def _scaling(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns scale and skip flag, which GradScaler.step sets; no scale if it has unscaled already."""
        return getattr(self, "grad_scale", None), getattr(self, "found_inf", None)

    def _step_matrices(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        scale, skipped = self._scaling()
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        gradient = torch.stack(_gradients(params))
        momentum = torch.stack(buffers)
        rate = group["lr"]
        if scale is not None:
            gradient /= scale
        if skipped is not None:
            # An overflowed gradient is replaced by the momentum, which then stays unchanged; the update is
            # finite, times a rate of 0, where an infinite one would become NaN.
            sound = skipped == 0
            gradient = torch.where(sound, gradient, momentum)
            rate = rate * sound
        momentum.lerp_(gradient, 1 - group["momentum"])
        torch._foreach_copy_(buffers, momentum.unbind())
        nesterov = gradient.lerp_(momentum, group["momentum"]).flatten(2)
        update = orthogonalize(nesterov.to(_format(nesterov))).to(gradient.dtype)
        update *= rate * (0.2 * max(update.shape[1:]) ** 0.5)
        weights = [p.data for p in params]
        torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
        torch._foreach_sub_(weights, update.view(momentum.shape).unbind())

    def _step_adamw(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        scale, skipped = self._scaling()
        states = [self.state[p] for p in params]
        adamw(
            params,
            _gradients(params),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            grad_scale=scale,
            found_inf=skipped,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _gradients(params: list[torch.Tensor]) -> list[torch.Tensor]:
    return [p.grad for p in params if p.grad is not None]


def _format(matrices: torch.Tensor) -> torch.dtype:
    ampere = matrices.is_cuda and torch.cuda.get_device_capability(matrices.device) >= (8, 0)
    return torch.bfloat16 if ampere else matrices.dtype
