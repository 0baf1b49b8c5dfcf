"""Trains a task as one would by hand in plain PyTorch: what `trainer check` holds the trainer against.

To be read from top to bottom. It imports nothing of what it checks: no loop, step, optimizer, schedule,
average, process group or loader of the package. What it shares with a run is named here: the keys of random
numbers (`trainer.rng`), the task's data, model, loss and metrics, and which samples are in which micro-batch.

A step is: the losses of its samples added up and divided by their number, backward, clipping, an optimizer of
torch.optim, the average. With several micro-batches in a step, what a forward pass changes besides (buffers,
frozen parameters) begins each time at the value before the step, and becomes the mean of what they made of it.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from trainer.config.recipe import Recipe
from trainer.config.training import OptimConfig
from trainer.models.activation_checkpointing import blocks
from trainer.models.finetune import fine_tune
from trainer.models.pretrained import find_weights
from trainer.models.weights import load_initial
from trainer.rng import Ints, Purpose, key, uniforms

Snapshot = dict[str, torch.Tensor]  # after a step, by name: loss, lr, model/…, optimizer/…, ema/…, metric/…


class Samples(NamedTuple):
    """What a task's loss is given: the fields of `trainer.Batch`."""

    fields: Mapping[str, torch.Tensor]
    weight: torch.Tensor | None
    uniform: torch.Tensor | None
    num_items: int
    longest: int

    @property
    def items(self) -> int:
        """What the loss is a sum over."""
        return self.num_items


def train(
    task: Any,
    recipe: Recipe,
    order: Sequence[Sequence[tuple[Ints, Ints]]],
    epoch_length: float,
    evaluated: Collection[int],
    nudged: bool = False,
) -> list[Snapshot]:
    """Trains, and returns what there is after each step.

    Args:
        order: For each step its micro-batches, each as epochs and numbers of its samples.
        epoch_length: Steps of an epoch, in which milestones count.
        evaluated: Steps (from 1) after which it measures.
        nudged: Whether all is rounded otherwise: it begins from weights that are moved by one unit in their
            last place, and a third of each gradient is taken three times.
    """
    torch.manual_seed(key(recipe.seed, Purpose.WEIGHTS) >> 1)
    model: nn.Module = task.model()
    if (start := find_weights(recipe.model)) is not None:
        load_initial(model, start.file, recipe.model.reinit)
    fine_tune(model, recipe.model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if nudged:
        with torch.no_grad():
            for p in trained.values():
                p.copy_(torch.nextafter(p, torch.full_like(p, math.inf)))
    off = [part for part in model.modules() if not part.training] if model.training else []
    optimizer, scheduler = make_optimizer(task, recipe, model, len(order))
    own_rate = scheduler is None and not hasattr(task, "optimizer")
    averaged = {name: p for name, p in model.named_parameters() if p.is_floating_point() and recipe.ema.decay}
    average = {name: p.detach().clone() for name, p in averaged.items()}
    updates = moved = 0
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe.precision.mode)
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=recipe.precision.initial_scale,
        growth_interval=recipe.precision.growth_interval,
        enabled=mixed == torch.float16,
    )
    first, thirds = key(recipe.seed, Purpose.MICRO_BATCH) >> 2, 3 if nudged else 1
    seen = list[Snapshot]()
    for step, micro_batches in enumerate(order):
        model.train()
        for part in off:  # what the task's model() has put into evaluation stays so
            part.eval()
        batches = [read(task.train_data, *one, recipe.seed, task.uniforms) for one in micro_batches]
        items = max(1, sum(batch.items for batch in batches))
        before, after = untrained(model), list[Mapping[str, torch.Tensor]]()
        total = dict[str, torch.Tensor]()
        for number, batch in enumerate(batches):
            put(model, before)
            if not len(next(iter(batch.fields.values()))):  # padding alone
                continue
            torch.manual_seed(first + step * len(batches) + number)
            with torch.autocast("cpu", mixed) if mixed else nullcontext():
                parts = losses(task, model, batch)
            scaler.scale(sum(parts.values()) / (items * thirds)).backward()
            for name, part in {"": sum(parts.values()), **parts}.items():
                where = f"loss/{name}" if name else "loss"
                total[where] = total.get(where, 0) + part.detach().double() / items
            after.append(untrained(model))
        scaler.unscale_(optimizer)
        for p in trained.values():
            if p.grad is not None and nudged:
                p.grad *= thirds
        if recipe.optim.max_grad_norm:
            nn.utils.clip_grad_norm_(list(trained.values()), recipe.optim.max_grad_norm)
        if own_rate:
            rate = np.float32(learning_rate(recipe.optim, updates, len(order), epoch_length))  # kept so
            for group in optimizer.param_groups:
                group["lr"] = float(rate * np.float32(group["factor"]))
        else:
            rate = optimizer.param_groups[0]["lr"]
        if hasattr(task, "optimizer"):  # which may draw random numbers
            torch.manual_seed(key(recipe.seed, Purpose.UPDATE, updates) >> 2)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() < scale:  # the gradients overflowed: no update, and nothing moves
            put(model, before)
        else:
            put(model, {name: mean(before[name], [one[name] for one in after]) for name in before})
            updates += 1
            if scheduler is not None:
                scheduler.step()
        due = (step + 1) % recipe.ema.every == 0 or step + 1 == len(order)
        if average and due and updates > moved:
            # The ramp: the decay is at most (1 + n) / (10 + n) after n updates.
            share = max(1 - recipe.ema.decay ** (updates - moved), 9 / (10 + updates - 1))
            for name, p in averaged.items():
                average[name] += share * (p.detach() - average[name])
            moved = updates
        names = {id(p): name for name, p in model.named_parameters()}
        now: Snapshot = {**total, "lr": torch.as_tensor(float(rate), dtype=torch.float64)}
        now |= {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
        for p, slots in optimizer.state.items():
            tensors = {slot: value for slot, value in slots.items() if isinstance(value, torch.Tensor)}
            now |= {f"optimizer/{names[id(p)]}/{slot}": value for slot, value in tensors.items()}
        now |= {f"ema/{name}": tensor for name, tensor in average.items()}
        now = {name: torch.as_tensor(tensor).detach().clone() for name, tensor in now.items()}
        if step + 1 in evaluated:
            kept = {name: p.detach().clone() for name, p in averaged.items()}
            put(model, average)
            now |= {f"metric/{name}": value for name, value in measure(task, model, recipe, mixed).items()}
            put(model, kept)
        seen.append(now)
    return seen


def losses(task: Any, model: nn.Module, batch: Samples) -> dict[str, torch.Tensor]:
    """Of a micro-batch, each a sum over its samples: by name, or the only one as ""."""
    if names := getattr(task, "losses", ()):
        return dict(zip(names, task.loss_parts(model, batch), strict=True))
    return {"": task.loss(model, batch)}


def read(data: Any, epochs: Ints | None, samples: Ints, seed: int, wanted: int) -> Samples:
    """Reads samples one by one; `wanted` random numbers of each go to the loss, besides those of the data."""
    count = data.uniforms + wanted
    drawn = uniforms(seed, epochs, samples, count) if count and epochs is not None else None
    rows = []
    for number, sample in enumerate(samples):
        out = {name: np.zeros((1, *field.shape), field.dtype) for name, field in data.fields.items()}
        data.read(np.array([sample]), None if drawn is None else drawn[number : number + 1], out)
        rows.append(out)
    fields = {
        name: torch.from_numpy(np.concatenate([row[name] for row in rows]))
        if rows
        else torch.empty(0, *field.shape)
        for name, field in data.fields.items()
    }
    each = [int(row["num_items"][0]) if "num_items" in row else data.num_items for row in rows]
    uniform = None if drawn is None else torch.from_numpy(drawn)
    return Samples(fields, None, uniform, sum(each), max(each, default=0))


def untrained(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of what no optimizer moves: buffers and frozen parameters, by name."""
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    return {name: t.detach().clone() for name, t in {**dict(model.named_buffers()), **frozen}.items()}


@torch.no_grad()
def put(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Gives a model's parameters and buffers of these names these values."""
    places = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        places[name].copy_(tensor)


def mean(before: torch.Tensor, after: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of what those micro-batches made of it that changed it; an integer moves by their mean, rounded."""
    changed = [one for one in after if not torch.equal(one, before)]
    if not changed:
        return before
    if before.is_floating_point() or before.is_complex():
        return changed[0] if len(changed) == 1 else torch.stack(changed).mean(0)
    steps = torch.stack([one.double() - before.double() for one in changed])
    return (before.double() + steps.mean(0).round()).to(before.dtype)


@torch.no_grad()
def measure(task: Any, model: nn.Module, recipe: Recipe, mixed: torch.dtype | None) -> Snapshot:
    """Metrics: sums over the evaluation data divided by its items, and what `summarize` makes of rows."""
    data, size, items = task.evaluation_data, recipe.data.eval_batch_size, 0
    model.eval()
    sums, rows = dict[str, torch.Tensor](), dict[str, list[torch.Tensor]]()
    for start in range(0, len(data), size):
        batch = read(data, None, np.arange(start, min(start + size, len(data))), recipe.seed, 0)
        items += batch.items
        with torch.autocast("cpu", mixed) if mixed else nullcontext():
            measured = task.measure(model, batch)
        for name, value in measured.items():
            if value.ndim:
                rows.setdefault(name, []).append(value)
            else:
                sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + value.double()
    metrics = {name: value / items for name, value in sums.items()}
    if rows:
        given = task.summarize({name: torch.cat(parts) for name, parts in rows.items()})
        metrics |= {name: torch.tensor(float(v), dtype=torch.float64) for name, v in given.items()}
    return metrics


def learning_rate(config: OptimConfig, update: int, updates: int, epoch_length: float) -> float:
    """Of an update, by the formulas in docs/check.md; the first is update 0."""
    share = config.warmup_steps * updates if config.warmup_steps < 1 else config.warmup_steps
    if config.schedule == "one-cycle":
        top, low, end = share - 1, 1 / 25, max(config.final_lr, 1 / 25 / 1e4)
        if update < top:
            return config.lr * between(1, low, update / top)
        return config.lr * between(end, 1, (update - top) / (updates - 1 - top or 1))
    warmup = round(share)
    if update < warmup:
        return config.lr * (update + 1) / warmup
    final = config.final_lr
    match config.schedule:
        case "constant":
            return config.lr
        case "step":
            falls = sum(update >= round(epochs * epoch_length, 6) for epochs in config.milestones)
            return config.lr * float(config.gamma**falls)
        case "cosine":
            return config.lr * between(final, 1, (update - warmup) / (updates - warmup))
        case "wsd":
            length = max(1, min(round(config.decay * updates), updates - warmup))
            fallen = math.sqrt(max(0, update - (updates - length)) / length)
            return config.lr * (1 - (1 - final) * fallen)


def between(end: float, start: float, part: float) -> float:
    """Half a cosine from `start` (part 0) to `end` (part 1)."""
    return end + (start - end) * (1 + math.cos(math.pi * part)) / 2


def make_optimizer(
    task: Any, recipe: Recipe, model: nn.Module, updates: int
) -> tuple[torch.optim.Optimizer, Any]:
    """The task's own optimizer and scheduler where it has them; else those of torch, by the recipe."""
    config = recipe.optim
    if hasattr(task, "optimizer"):
        optimizer = task.optimizer(model)
    elif config.name == "sgd":
        momentum = config.momentum
        optimizer = torch.optim.SGD(groups(config, model), config.lr, momentum, nesterov=momentum > 0)
    elif config.name == "adamw":
        optimizer = torch.optim.AdamW(groups(config, model), config.lr, config.betas, config.eps)
    else:
        optimizer = Muon(groups(config, model), config)
    scheduler = task.scheduler(optimizer, updates) if hasattr(task, "scheduler") else None
    return optimizer, scheduler


def groups(config: OptimConfig, model: nn.Module) -> list[dict[str, Any]]:
    """A group for each parameter: what has less than two dimensions isn't decayed; the factor of its rate.

    With `layer_decay` d and n blocks, what comes after the blocks has factor 1, block i from the end d^i, and
    what comes before them d^(n+1). With muon, matrices and kernels of linear, convolution and attention layers
    are orthogonal, but those of the first and the last layer, and embeddings.
    """
    names, inside = list(blocks(model)), False
    kinds = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention, nn.Embedding, nn.EmbeddingBag)
    layers = [part for part in model.modules() if isinstance(part, kinds)]
    hidden = [part for part in layers[1:-1] if not isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    others = [p for part in layers if part not in hidden for p in part.parameters()]
    chosen = {id(p) for part in hidden for p in part.parameters()} - {id(p) for p in others}
    found = []
    for name, p in model.named_parameters():
        at = next((number for number, block in enumerate(names) if name.startswith(f"{block}.")), None)
        inside = inside or at is not None
        depth = (0 if inside else len(names) + 1) if at is None else len(names) - at
        if p.requires_grad:
            found.append(
                {
                    "params": [p],
                    "weight_decay": config.weight_decay if p.ndim >= 2 else 0.0,
                    "factor": config.layer_decay**depth,
                    "orthogonal": config.name == "muon" and p.ndim >= 2 and id(p) in chosen,
                }
            )
    return found


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal by Newton-Schulz (Jordan et al., 2024), of the size of Liu et al., 2025."""

    def __init__(self, params: list[dict[str, Any]], config: OptimConfig) -> None:
        """AdamW takes the groups that aren't orthogonal."""
        super().__init__(params, {"lr": config.lr})
        self._momentum = config.momentum
        rest = [group for group in self.param_groups if not group["orthogonal"]]
        self._adamw = torch.optim.AdamW(rest, config.lr, config.betas, config.eps) if rest else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """An update."""
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
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.sub_(group["lr"] * 0.2 * max(x.shape) ** 0.5 * x.view_as(p))
        if self._adamw is not None:
            for ours, theirs in zip(self._rest(), self._adamw.param_groups, strict=True):
                theirs["lr"] = ours["lr"]
            self._adamw.step()
            self.state.update(self._adamw.state)

    def _rest(self) -> Iterator[dict[str, Any]]:
        return (group for group in self.param_groups if not group["orthogonal"])
