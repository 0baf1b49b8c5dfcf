"""One optimiser step: what a step of micro-batches does to the weights."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import distributed as dist, nn
from torch.amp.grad_scaler import GradScaler

from trainer.data.loader import Batch
from trainer.data.sampling.plan import Share
from trainer.distributed.parallel import check_reduced, sum_over_ranks, unsynchronised
from trainer.distributed.tree import TreeReduction
from trainer.models.batchnorm import StepStatistics
from trainer.models.nonfinite import FirstNonFinite
from trainer.models.precision import found_inf, scale_of
from trainer.observe.phases import PHASE_TIMER, enter_phase
from trainer.optim.average import WeightAverage
from trainer.optim.optimizers import Rates, clip_gradients, grad_norm
from trainer.rng import Purpose, key
from trainer.tasks import Task
from trainer.train.anomaly import Ring


@dataclass
class Training:
    """What a step works on. Everything that changes is a tensor on the device.

    Attributes:
        task: Gives the loss.
        model: The model itself.
        replica: Gives the loss of a batch by the model as it is called: compiled, or within DDP.
        optimizer: Fused.
        rates: Learning rate and count of updates.
        scaler: fp16's loss scaler, or None.
        autocast: Context of a forward pass.
        average: Moving average of the weights, or None.
        statistics: BatchNorm's.
        share: This rank's part of the plan.
        max_grad_norm: Largest gradient norm; 0: none.
        group: Process group, or None for a single process.
        nonfinite: Looks for the first module that gives no finite numbers, or None.
        cuda_graphs: True where forward and backward are replayed as CUDA graphs: each replay overwrites what
            the one before handed out, gradients among it.
        ragged: True where the items of a step are known only after loading (valid tokens).
        ring: What the anomaly detection look at, or None.
        skips: True where an update whose loss or gradients aren't finite is not made.
        tree: Adds up a step's micro-batches in one order for any number of ranks, or None: backward and DDP
        do.
        loss: float64 (): sum of the losses of this rank's steps since it was last set to 0, each divided
            by its step's items; with a tree those of all ranks.
        norm: float (): gradient norm of the last step, before clipping.
        keeps_gradients: True where gradients are added to tensors that stay where they are, because a graph
            is replayed again before they are used (several micro-batches), or DDP has its own place for them.
            Otherwise a graph's gradients are used where they lie, which spares an addition for each.
    """

    task: Task
    model: nn.Module
    replica: nn.Module
    optimizer: torch.optim.Optimizer
    rates: Rates
    scaler: GradScaler | None
    autocast: AbstractContextManager[object]
    average: WeightAverage | None
    statistics: StepStatistics
    share: Share
    max_grad_norm: float
    group: dist.ProcessGroup | None
    ragged: bool
    nonfinite: FirstNonFinite | None = None
    cuda_graphs: bool = False
    ring: Ring | None = None
    skips: bool = False
    tree: TreeReduction | None = None
    loss: torch.Tensor = field(init=False)
    norm: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        device = self.rates.current.device
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.norm = torch.zeros((), device=device)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        # A single rank knows by itself which ones a step used.
        several = self.tree is not None and self.group is not None
        self.all_used = torch.ones(len(self.parameters) * several, dtype=torch.float64, device=device)
        self.keeps_gradients = self.cuda_graphs and (
            self.share.gradient_accumulation_steps > 1 or self.group is not None
        )
        for parameter in self.parameters if self.keeps_gradients else ():
            parameter.grad = torch.zeros_like(parameter)
        index = device.index if device.type == "cuda" else None
        # The CPU's too where the model is on a GPU: it may draw there (stochastic depth, say).
        self.generators = [torch.default_generator]
        if index is not None:
            self.generators.append(torch.cuda.default_generators[index])
        self.micro_batches, self.gradient_accumulation_steps = (
            self.share.plan.micro_batches,
            self.share.gradient_accumulation_steps,
        )
        self.num_items = self.task.train_data.num_items
        # Below 2**62, so that adding the micro-batch's number never overflows.
        self.first_key = key(self.share.plan.seed, Purpose.MICRO_BATCH) >> 2


class LossOf(nn.Module):
    """A task's loss as a module, so that DDP sees one forward pass whatever the task calls of its model."""

    called: nn.Module

    def __init__(self, task: Task, model: nn.Module) -> None:
        """The loss of a task by a model, which may be compiled."""
        super().__init__()
        self.task, self.model = task, model
        vars(self)["called"] = model  # found at once, without a module's detour to its attributes

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss of a micro-batch, float ()."""
        return self.task.loss(self.called, batch)

    __call__ = forward  # nothing hooks it; a module's own call would cost a percent of the smallest step


def train_step(t: Training, batches: Iterator[Batch], step: int) -> None:
    """Does one optimiser step; the host never waits for the device.

    Args:
        t: Weights and everything else that is updated, in place.
        batches: This rank's batches; as many are taken as the step has micro-batches for it.
        step: Number of the step in the run; keys dropout.
    """
    expected = t.share.plan.step_samples(step) * t.num_items
    first_key = t.first_key + step * t.micro_batches + t.share.rank * t.gradient_accumulation_steps
    num_items, step_loss = 0, None
    own_used: set[int] = set()
    PHASE_TIMER.step = step + 1
    for index in range(t.gradient_accumulation_steps):
        enter_phase("data")
        batch = next(batches)
        enter_phase("host")
        num_items += batch.num_items
        for generator in t.generators:
            generator.manual_seed(first_key + index)
        enter_phase("forward")
        last = index == t.gradient_accumulation_steps - 1
        with nullcontext() if last else unsynchronised(t.replica):
            with t.autocast:
                loss = t.replica(batch) / expected
            statistics = t.statistics.of_micro_batch()
            enter_phase("backward")
            scaled = loss if t.scaler is None else t.scaler.scale(loss)
            loss = loss.detach()
            # A loss that isn't finite makes all gradients NaN: so every rank sees it, by their sum.
            scaled.backward(loss * 0 + 1 if t.skips else None)
        if statistics:
            t.statistics.restore()
        if t.tree is None:
            step_loss = loss if step_loss is None else step_loss + loss
            if statistics:
                t.statistics.add(statistics)
        else:
            gradients, used = _take_gradients(t)
            own_used |= used
            flags = t.all_used if len(used) == len(t.parameters) else _flags(t, used)
            metrics = torch.cat((loss.double().view(1), flags, *(s.double() for s in statistics)))
            t.tree.add_micro_batch(gradients, metrics)
    if t.tree is None and t.group is not None:
        check_reduced(t.replica, t.share.rank)
    enter_phase("update")
    if t.tree is not None:
        step_loss = _sum_by_tree(t, t.tree, own_used)
    assert step_loss is not None
    if t.ragged:
        step_loss = step_loss * _divide_by_true_num_items(t, expected, num_items)
    t.loss += step_loss
    skipped = _update(t, step, step_loss)
    t.statistics.end_step(skipped)
    if t.nonfinite is not None:
        t.nonfinite.end_step(step)


def take_metrics(t: Training) -> dict[str, torch.Tensor]:
    """Metrics () since the last call, on the device: loss (a sum over steps and ranks) and others."""
    loss = t.loss.clone() if t.tree is not None else sum_over_ranks(t.loss.clone(), t.group)
    t.loss.zero_()
    metrics = {"loss": loss, "lr": t.rates.of_last_update(), "updates": t.rates.updates[0]}
    if t.max_grad_norm:
        metrics["grad_norm"] = t.norm
    if t.scaler is not None:
        metrics["loss_scale"] = scale_of(t.scaler)
    if t.nonfinite is not None:
        metrics |= t.nonfinite.take()
    return metrics


def leave_out_step(t: Training, batches: Iterator[Batch], step: int) -> None:
    """Passes over a step whose samples are not to be learned from; only its number is used up."""
    PHASE_TIMER.step = step + 1
    enter_phase("data")
    for _ in range(t.gradient_accumulation_steps):
        next(batches)
    if t.average is not None:
        skipped = torch.ones_like(t.norm) if t.scaler is not None or t.skips else None
        t.average.update(step, skipped, t.rates.updates, step + 1 == t.share.plan.steps)


def _update(t: Training, step: int, step_loss: torch.Tensor) -> torch.Tensor | None:
    """Returns float (), 1 if the update was skipped; None where that can't be."""
    # The order matters: gradients are unscaled before they are clipped, and a skipped update (its
    # gradients overflowed in fp16) moves neither schedule nor average.
    skipped = None
    if t.scaler is not None:
        t.scaler.unscale_(t.optimizer)
        skipped = found_inf(t.scaler, t.optimizer)
    gradients = [p.grad for p in t.parameters if p.grad is not None]
    if t.max_grad_norm:
        t.norm = clip_gradients(gradients, t.max_grad_norm)
    elif t.ring is not None:
        t.norm = grad_norm(gradients)
    if t.ring is not None:
        # An overflow in fp16 is the scaler's business, unless the scale is too small to be the cause.
        norm = t.norm if t.scaler is None else torch.where(scale_of(t.scaler) < 1, t.norm, 0.0)
        t.ring.record(step, step_loss, norm)
    if t.skips and t.scaler is None:
        skipped = (~t.norm.isfinite()).to(torch.float32)
        t.optimizer.found_inf = skipped  # type: ignore[attr-defined]  # as GradScaler tells it
    if t.scaler is None:
        t.optimizer.step()
    else:
        t.scaler.step(t.optimizer)
        t.scaler.update()
    _clear_gradients(t)
    if t.average is not None:
        t.average.update(step, skipped, t.rates.updates, step + 1 == t.share.plan.steps)
    t.rates.advance(skipped)
    return skipped


def _take_gradients(t: Training) -> tuple[list[torch.Tensor], set[int]]:
    """A micro-batch's gradients, to keep: zeros for a parameter that had no part in it; and which had."""
    used = {number for number, p in enumerate(t.parameters) if p.grad is not None}
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in t.parameters]
    if t.keeps_gradients:
        gradients = [g.clone() for g in gradients]  # the next replay writes to the same place
    _clear_gradients(t)
    return gradients, used


def _flags(t: Training, used: set[int]) -> torch.Tensor:
    flags = [float(number in used) for number in range(len(t.all_used))]
    return torch.tensor(flags, dtype=torch.float64, device=t.all_used.device)


def _sum_by_tree(t: Training, tree: TreeReduction, own_used: set[int]) -> torch.Tensor:
    """Puts the gradients of the step in place, none for a parameter that no micro-batch used.

    Args:
        t: What is trained.
        tree: Has this rank's micro-batches.
        own_used: The parameters that a micro-batch of this rank used; only of others the sum is asked, as the
            host waits for the device then.

    Returns:
        The step's loss, float64 ().
    """
    sums = tree.end_step()
    if t.keeps_gradients:
        torch._foreach_copy_([p.grad for p in t.parameters if p.grad is not None], sums.gradients)
    else:
        for parameter, gradient in zip(t.parameters, sums.gradients, strict=True):
            parameter.grad = gradient
        if len(own_used) < len(t.parameters):
            flags = sums.metrics[1 : 1 + len(t.all_used)].tolist() or [0.0] * len(t.parameters)
            for number, flag in enumerate(flags):
                if number not in own_used and not flag:
                    t.parameters[number].grad = None
    t.statistics.set_sum(sums.metrics[1 + len(t.all_used) :])
    return sums.metrics[0]


def _clear_gradients(t: Training) -> None:
    if t.keeps_gradients:
        torch._foreach_zero_([p.grad for p in t.parameters if p.grad is not None])
    else:
        for parameter in t.parameters:
            parameter.grad = None


def _divide_by_true_num_items(t: Training, expected: int, num_items: int) -> torch.Tensor:
    """Corrects the gradients; returns the factor, float64 ()."""
    # Valid tokens of the step are known when its last micro-batch has been loaded, on every rank its own.
    # Until here the losses were divided by the most there can be.
    true = torch.full((), float(num_items), dtype=torch.float64, device=t.loss.device)
    sum_over_ranks(true, t.group)
    correction = expected / true.clamp_(min=1)  # no valid token at all: no gradient, not a NaN
    gradients = [p.grad for p in t.parameters if p.grad is not None]
    torch._foreach_mul_(gradients, correction.to(gradients[0].dtype))
    return correction
