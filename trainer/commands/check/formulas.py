"""Optimizers, learning rates, parameter groups, freezing, evaluations: written again, for `plain`.

The optimizers are those of torch.optim; Muon is its formula.
"""

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.config.recipe import Recipe
from trainer.config.training import OptimConfig
from trainer.errors import BadInputError
from trainer.models.activation_checkpointing import blocks

_NO_FORMULA = (
    "trainer check has no formula to compare it with; write one in trainer/commands/check/formulas.py"
)


def learning_rate(config: OptimConfig, update: int, updates: int, epoch_length: float) -> float:
    """Returns the learning rate of an update (the first is 0), by the formulas in docs/check.md."""
    share = config.warmup_steps * updates if config.warmup_steps < 1 else config.warmup_steps
    if config.schedule == "one-cycle":
        top, low, end = share - 1, 1 / 25, max(config.final_lr, 1 / 25 / 1e4)
        if update < top:
            return config.lr * between(1, low, update / top)
        return config.lr * between(end, 1, (update - top) / (updates - 1 - top or 1))
    warmup = round(share)
    if update < warmup:
        return config.lr * (update + 1) / warmup
    after, final = update - warmup, config.final_lr
    match config.schedule:
        case "constant":
            factor = 1.0
        case "step":
            falls = sum(update >= round(epochs * epoch_length, 6) for epochs in config.milestones)
            factor = float(config.gamma**falls)
        case "cosine":
            factor = between(final, 1, after / (updates - warmup))
        case "wsd":
            length = max(1, min(round(config.decay * updates), updates - warmup))
            fallen = math.sqrt(max(0, update - (updates - length)) / length)
            factor = final + (1 - final) * (1 - fallen)
        case _:
            raise BadInputError(f"optim.schedule={config.schedule}: {_NO_FORMULA}")
    return config.lr * factor


def evaluations(interval: tuple[int, str] | None, steps: int, epoch_length: float) -> list[int]:
    """Returns the steps (from 1) after which a run is evaluated: so many steps or epochs, and the last.

    Args:
        interval: Number and unit, `step` or `epoch`; None: only after the last step.
        steps: Steps of the run.
        epoch_length: Steps in an epoch.
    """
    if interval is None:
        return [steps]
    length = interval[0] * (epoch_length if interval[1] == "epoch" else 1)
    done = [math.floor(round(step / length, 9)) for step in range(steps + 1)]
    return [step for step in range(1, steps + 1) if done[step] > done[step - 1] or step == steps]


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freezes parameters by name, in place; a BatchNorm that has none left keeps its running statistics.

    A pattern names a parameter, or all that a module has.
    """
    names = names_by_id(model)
    for p in model.parameters():
        p.requires_grad_(p.requires_grad and not matches_any(names[id(p)], patterns))
    for name, part in model.named_modules():
        if isinstance(part, _BatchNorm):
            own = [names[id(p)] for p in part.parameters(recurse=False)] or [[name]]
            if all(matches_any(one, patterns) for one in own):
                part.eval()


def names_by_id(model: nn.Module) -> dict[int, list[str]]:
    """Returns all names of each parameter, by its id: a tied one has several."""
    found: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(p), []).append(name)
    return found


def matches_any(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Returns True if a pattern has one of the names, or a module that it is in."""
    return any(
        fnmatchcase(one, pattern) or fnmatchcase(one, f"{pattern}.*") for one in names for pattern in patterns
    )


def between(end: float, start: float, part: float) -> float:
    """Returns the value of half a cosine from `start` (part 0) to `end` (part 1)."""
    return end + (start - end) * (1 + math.cos(math.pi * part)) / 2


def plain_optimizer(
    task: Any, recipe: Recipe, model: nn.Module, updates: int, epoch_length: float
) -> tuple[torch.optim.Optimizer, Any]:
    """Returns the task's own optimizer and scheduler where it has them; else torch's, by the recipe."""
    config = recipe.optim
    if hasattr(task, "optimizer"):
        optimizer = task.optimizer(model)
    elif config.name == "sgd":
        momentum, nesterov = config.momentum, config.nesterov and config.momentum > 0
        optimizer = torch.optim.SGD(groups(config, model), config.lr, momentum, nesterov=nesterov)
    elif config.name == "adamw":
        optimizer = torch.optim.AdamW(groups(config, model), config.lr, config.betas, config.eps)
    elif config.name == "muon":
        optimizer = PlainMuon(groups(config, model), config)
    else:
        raise BadInputError(f"optim.name={config.name}: {_NO_FORMULA}")
    scheduler = task.scheduler(optimizer, updates, epoch_length) if hasattr(task, "scheduler") else None
    return optimizer, scheduler


def groups(config: OptimConfig, model: nn.Module) -> list[dict[str, Any]]:
    """Returns a group for each parameter: its weight decay and the factor of its learning rate.

    Parameters with fewer than two dimensions aren't decayed unless decay_1d is set, nor those in no_decay.
    With `layer_decay` d and n blocks, layers after the blocks have factor 1, block i from the end d^i, and
    layers before them d^(n+1). With muon, the weights of linear, convolution and attention layers are
    orthogonalized, except the first and the last layer and embeddings.
    """
    names, inside = list(blocks(model)), False
    kinds = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention, nn.Embedding, nn.EmbeddingBag)
    layers = [part for part in model.modules() if isinstance(part, kinds)]
    hidden = [part for part in layers[1:-1] if not isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    others = [p for part in layers if part not in hidden for p in part.parameters()]
    chosen = {id(p) for part in hidden for p in part.parameters()} - {id(p) for p in others}
    every_name = names_by_id(model)
    found = []
    for name, p in model.named_parameters():
        spared = matches_any(every_name[id(p)], config.no_decay)
        decayed = not spared and (p.ndim >= 2 or config.decay_1d)
        at = next((number for number, block in enumerate(names) if name.startswith(f"{block}.")), None)
        inside = inside or at is not None
        depth = (0 if inside else len(names) + 1) if at is None else len(names) - at
        if p.requires_grad:
            found.append(
                {
                    "params": [p],
                    "weight_decay": config.weight_decay if decayed else 0.0,
                    "factor": config.layer_decay**depth,
                    "orthogonal": config.name == "muon" and p.ndim >= 2 and id(p) in chosen,
                }
            )
    return found


class PlainMuon(torch.optim.Optimizer):
    """Muon: momentum orthogonalized by Newton-Schulz (Jordan et al., 2024), scaled as in Liu et al., 2025."""

    def __init__(self, params: list[dict[str, Any]], config: OptimConfig) -> None:
        """Hands the groups that aren't orthogonalized to AdamW."""
        super().__init__(params, {"lr": config.lr})
        self._momentum = config.momentum
        rest = [group for group in self.param_groups if not group["orthogonal"]]
        self._adamw = torch.optim.AdamW(rest, config.lr, config.betas, config.eps) if rest else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Makes an update."""
        assert closure is None
        for group in self.param_groups:
            p = group["params"][0]
            if not group["orthogonal"] or p.grad is None:
                continue
            buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            buffer += (1 - self._momentum) * (p.grad - buffer)
            x = (p.grad + self._momentum * (buffer - p.grad)).flatten(1)
            x = x / (x.norm() + 1e-7)
            for _ in range(5):
                a = x @ x.T
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
            rate = torch.tensor(group["lr"], dtype=torch.float32)  # and what it is multiplied with
            p.mul_(1 - rate * group["weight_decay"])
            p.sub_(rate * (0.2 * max(x.shape) ** 0.5) * x.view_as(p))
        if self._adamw is not None:
            for ours, theirs in zip(self._rest(), self._adamw.param_groups, strict=True):
                theirs["lr"] = ours["lr"]
            self._adamw.step()
            self.state.update(self._adamw.state)

    def _rest(self) -> Iterator[dict[str, Any]]:
        return (group for group in self.param_groups if not group["orthogonal"])
