"""The reference of `trainer check`: trains a task as one would by hand in plain PyTorch.

Read it from top to bottom. It imports nothing that it checks: no loop, step, optimizer, schedule, average,
process group or loader of the package. It shares with a run: the keys of random numbers (`trainer.rng`), the
task's data, model, loss and metrics, the class `Batch`, weights to start from, LoRA, and the assignment of
samples to micro-batches.

A step is: the losses of its samples added up and divided by their number, backward, clipping, an optimizer
of torch.optim (`formulas`), the average. A custom task's values are those that its class gives: they are
added up here, and divided by what counts in all micro-batches of the step; a mean weighs its items. Three
rules of the trainer stand here, too:
  micro-batches  buffers and frozen parameters that a forward pass changes start each micro-batch at their
                 values before the step; after it they are the mean of the values that the micro-batches left
  evaluation     what training changes so is put back after an evaluation
  items          where the loss says what counts, or in fp16 where samples differ in their items, a loss is
                 divided by the most that a step can have, and gradients are corrected before they are clipped
The second rule can be left out (`ruled`).
"""

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from trainer.commands.check.formulas import freeze, learning_rate, plain_optimizer
from trainer.config.recipe import Recipe
from trainer.data.batch import Batch
from trainer.models.finetune import fine_tune
from trainer.models.pretrained import find_weights
from trainer.models.weights import load_initial
from trainer.rng import Ints, Purpose, key, uniforms
from trainer.tasks import loss_rows

StepTensors = dict[
    str, torch.Tensor
]  # after a step, by name: loss, lr, updates, scale, model/…, optimizer/…, ema/…, metric/…


def reference_steps(  # noqa: PLR0912, PLR0915  (one loop, to be read from top to bottom)
    task: Any,
    recipe: Recipe,
    order: Sequence[Sequence[tuple[Ints, Ints]]],
    epoch_length: float,
    evaluated: Collection[int],
    nudged: bool = False,
    ruled: bool = True,
    pretend: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[StepTensors]:
    """Trains, and returns a snapshot after each step.

    Args:
        order: The micro-batches of each step: epochs and indices of their samples.
        epoch_length: Steps per epoch; milestones are in epochs.
        evaluated: Steps (from 1) after which it evaluates.
        nudged: Whether to round differently: the first weights are moved by one unit in the last place, and
            each gradient is that of a third of the loss, times three.
        ruled: Whether what training changes is put back after an evaluation.
        pretend: Context of backward passes, in which the task computes in another precision.
    """
    torch.default_generator.manual_seed(key(recipe.seed, Purpose.WEIGHTS) >> 1)
    model: nn.Module = task.model()
    if (start := find_weights(recipe.model)) is not None:
        load_initial(model, start.file, recipe.model.reinit)
    if recipe.model.lora.rank:
        fine_tune(model, recipe.model)
    else:
        freeze(model, recipe.model.freeze)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if nudged:
        with torch.no_grad():
            for p in trained.values():
                p.copy_(torch.nextafter(p, torch.full_like(p, math.inf)))
    off = [part for part in model.modules() if not part.training] if model.training else []
    optimizer, scheduler = plain_optimizer(task, recipe, model, len(order), epoch_length)
    if hasattr(task, "optimizer"):  # which may draw random numbers

        def seeded(*_: Any) -> None:
            torch.default_generator.manual_seed(key(recipe.seed, Purpose.UPDATE, updates) >> 2)

        optimizer.register_step_pre_hook(seeded)
    own_rate = scheduler is None and not hasattr(task, "optimizer")
    averaged = trained if recipe.ema.decay else {}
    average = {
        n: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for n, p in averaged.items()
    }
    updates = moved = 0
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe.precision.mode)
    first, thirds = key(recipe.seed, Purpose.MICRO_BATCH) >> 2, 3 if nudged else 1
    scaler = GradScaler(
        "cpu",
        init_scale=recipe.precision.initial_scale * thirds,  # so that the same steps overflow
        growth_interval=recipe.precision.growth_interval,
        enabled=mixed == torch.float16,
    )
    seen, moving = list[StepTensors](), set[str]()
    for step, micro_batches in enumerate(order):
        model.train()
        for part in off:  # what the task's model() has put into evaluation stays so
            part.eval()
        batches = [plain_samples(task.train_data, *one, recipe.seed, task.uniforms) for one in micro_batches]
        items: float = max(1, sum(batch.num_items for batch in batches))
        most = items
        if hasattr(task, "given_loss"):
            most = max(1, sum(len(next(iter(batch.fields.values()))) for batch in batches))
        counted = 0.0
        if mixed == torch.float16 and "num_items" in task.train_data.fields:
            most = task.train_data.num_items * sum(len(samples) for _, samples in micro_batches)
        before, after, total = untrained(model), list[StepTensors](), StepTensors()
        for at, batch in enumerate(batches):
            put(model, before)
            if not len(next(iter(batch.fields.values()))):  # padding alone
                continue
            drawn = first + step * len(batches) + at
            torch.default_generator.manual_seed(drawn)
            random.seed(drawn)
            np.random.seed(drawn % 2**32)
            with torch.autocast("cpu", mixed) if mixed else nullcontext():
                parts, number = losses(task, model, batch)
            counted += number
            after.append(untrained(model))
            with pretend():
                scaler.scale(parts["loss"] / (most * thirds)).backward()
            total = {n: total.get(n, 0) + part.detach().double() for n, part in parts.items()}
        items = counted or items
        total = {name: part / items for name, part in total.items()}
        scaler.unscale_(optimizer)
        for p in trained.values() if nudged or most != items else ():
            p.grad = None if p.grad is None else p.grad * (thirds * most / items)
        if recipe.optim.max_grad_norm:
            nn.utils.clip_grad_norm_(list(trained.values()), recipe.optim.max_grad_norm)
        if own_rate:
            rate = np.float32(learning_rate(recipe.optim, updates, len(order), epoch_length))  # kept so
            for group in optimizer.param_groups:
                group["lr"] = float(rate * np.float32(group["factor"]))
        total["lr"] = torch.tensor(rate if own_rate else optimizer.param_groups[0]["lr"], dtype=torch.float64)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        made = {name: mean(before[name], [one[name] for one in after]) for name in before}
        if scaler.get_scale() < scale:  # the gradients overflowed: no update, and nothing moves
            put(model, before)
        else:
            put(model, made)
            moving |= {name for name, tensor in made.items() if not torch.equal(tensor, before[name])}
            updates += 1
            if scheduler is not None:
                scheduler.step()
        due = (step + 1) % recipe.ema.every == 0 or step + 1 == len(order)
        if average and due and updates > moved:
            # The ramp: the decay is at most n / (9 + n), n updates having been made.
            share = max(1 - recipe.ema.decay ** (updates - moved), 9 / (9 + updates))
            for name, p in averaged.items():
                average[name] += share * (p.detach() - average[name])
            moved = updates
        total["updates"] = torch.tensor(updates)
        if scaler.is_enabled():
            total["scale"] = torch.tensor(scaler.get_scale())
        now = {**total, **tensors(model, optimizer, average)}
        if step + 1 in evaluated:
            kept = {name: p.detach().clone() for name, p in averaged.items()}
            changed = untrained(model) if ruled else {}
            put(model, average)
            now |= measure_plainly(task, model, recipe.data.eval_batch_size, mixed)
            put(model, {**kept, **{name: tensor for name, tensor in changed.items() if name in moving}})
        seen.append(now)
    return seen


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer, average: StepTensors) -> StepTensors:
    """Copies weights, buffers, the optimizer's state of each parameter, and the average."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for p, slots in optimizer.state.items():
        found |= {f"optimizer/{names[id(p)]}/{slot}": value for slot, value in slots.items()}
    found |= {f"ema/{name}": tensor for name, tensor in average.items()}
    return {name: t.detach().clone() for name, t in found.items() if isinstance(t, torch.Tensor)}


def losses(task: Any, model: nn.Module, batch: Batch) -> tuple[StepTensors, float]:
    """Computes the loss of a micro-batch, a sum, and each named loss; and the number that divides them."""
    names, number = loss_rows(task), float(batch.num_items)
    if hasattr(task, "given_loss"):
        given = task.given_loss(model, batch)
        each = [given[name] for name in task.losses] if names else [given]
        number = max(number_of(one, batch) for one in each)
        parts = [added_up(one, number) for one in each]
    else:
        parts = [task.loss(model, batch)]
    every = dict(zip(names or ("loss",), parts, strict=True))
    first, *others = (part for name, part in every.items() if not name.startswith("watched/"))
    return {**every, "loss": sum(others, first)}, number


def number_of(given: Any, batch: Batch) -> float:
    """Returns the number that divides a custom task's values: of a pair its counts, of means the items."""
    if isinstance(given, tuple):
        return float(given[1].double().sum())
    return len(given) if torch.as_tensor(given).ndim else batch.num_items


def added_up(given: Any, number: float) -> torch.Tensor:
    """Adds up values of samples, or values that count; a mean is so many times its value."""
    values, counts = given if isinstance(given, tuple) else (torch.as_tensor(given), None)
    wide: torch.Tensor = values if values.dtype == torch.float64 else values.float()
    if counts is None:
        return wide.sum() if values.ndim else wide * number
    total: torch.Tensor = (wide[counts != 0] * counts[counts != 0]).sum()
    return total


def plain_samples(data: Any, epochs: Ints | None, samples: Ints, seed: int, wanted: int) -> Batch:
    """Reads samples one by one; each gets `wanted` random numbers for the loss, in addition to the data's."""
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
    return Batch(fields, None, uniform, sum(each), max(each, default=0))


def untrained(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies the tensors that no optimizer changes: buffers and frozen parameters, by name."""
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    return {name: t.detach().clone() for name, t in {**dict(model.named_buffers()), **frozen}.items()}


@torch.no_grad()
def put(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Sets the parameters and buffers of a model that have these names."""
    places = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        places[name].copy_(tensor)


def mean(before: torch.Tensor, after: Sequence[torch.Tensor]) -> torch.Tensor:
    """Averages a tensor over the micro-batches that changed it; an integer changes by their mean, rounded."""
    changed = [one for one in after if not torch.equal(one, before)]
    if not changed:
        return before
    if before.is_floating_point() or before.is_complex():
        return changed[0] if len(changed) == 1 else torch.stack(changed).mean(0)
    steps = torch.stack([one.double() - before.double() for one in changed])
    return (before.double() + steps.mean(0).round()).to(before.dtype)


@torch.no_grad()
def measure_plainly(task: Any, model: nn.Module, size: int, mixed: torch.dtype | None) -> StepTensors:
    """Computes metrics: sums over the evaluation data divided by its items, and results of `summarize`.

    A custom task's values are divided by what counts in each figure.
    """
    data, whole, own = task.evaluation_data, 0, hasattr(task, "given_measure")
    sums, numbers, rows = StepTensors(), dict[str, float](), dict[str, list[Any]]()
    model.eval()
    for start in range(0, len(data), size):
        batch = plain_samples(data, None, np.arange(start, min(start + size, len(data))), 0, 0)
        whole += batch.num_items
        with torch.autocast("cpu", mixed) if mixed else nullcontext():
            measured = (task.given_measure if own else task.measure)(model, batch)
        for name, given in measured.items():
            if hasattr(task, "summarize") and (own or given.ndim):
                rows.setdefault(name, []).append(given)
                continue
            number = number_of(given, batch) if own else 0.0
            value = added_up(given, number) if own else given
            sums[name] = sums.get(name, 0) + value.double()
            numbers[name] = numbers.get(name, 0.0) + number
    metrics = {name: value / (numbers[name] if own else whole) for name, value in sums.items()}
    if rows:
        given = task.summarize({name: of_all_batches(parts) for name, parts in rows.items()})
        metrics |= {name: torch.tensor(float(v), dtype=torch.float64) for name, v in given.items()}
    return {f"metric/{name}": value for name, value in metrics.items()}


def of_all_batches(parts: Sequence[Any]) -> Any:
    """Joins values of batches, or values and counts."""
    if isinstance(parts[0], tuple):
        return tuple(map(torch.cat, zip(*parts, strict=True)))
    return torch.cat(list(parts))
