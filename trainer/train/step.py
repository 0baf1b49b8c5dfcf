"""Optimizer step over its micro-batches, and the metrics of steps."""

from collections.abc import Iterator

import torch
from torch import nn

from trainer.data.batch import Batch
from trainer.distributed.parallel import sum_over_ranks
from trainer.models.precision import scale_of
from trainer.observe.phases import PHASE_TIMER, enter_phase
from trainer.tasks import Task, ValuesTask
from trainer.train.state import Run


class LossOf(nn.Module):
    """Module whose forward pass is the task's loss: what DDP wraps, whichever methods the loss calls."""

    called: nn.Module

    def __init__(self, task: Task, model: nn.Module) -> None:
        """Takes a task and its model, which may be compiled."""
        super().__init__()
        self.task, self.model = task, model
        vars(self)["called"] = model  # a plain attribute, faster than the lookup of a module's submodule

    def forward(self, batch: Batch) -> torch.Tensor:
        """Returns the loss of a micro-batch, float ()."""
        return self.task.loss(self.called, batch)

    __call__ = forward  # it has no hooks; nn.Module.__call__ would cost a percent of the smallest step


class ValuesOf(LossOf):
    """Module whose forward pass gives each loss of a task that has several, and what they count."""

    task: ValuesTask

    def __init__(self, task: ValuesTask, model: nn.Module) -> None:
        """Takes a task and its model, which may be compiled."""
        super().__init__(task, model)
        self.trained = max(1, len(task.losses) - len(getattr(task, "watched", ())))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Returns the losses of a micro-batch, float (1 + n,): the trained sum, and each without gradient.

        Of one loss without a name it is the loss, (). What the losses count, if they say so, comes last.
        """
        parts, counts = self.task.parts(self.called, batch)
        trained = sum(parts[1 : self.trained], parts[0])
        named = [part.detach() for part in parts] if self.task.losses else []
        if counts is not None:
            return torch.stack([one.double() for one in (trained, *named, counts)])
        return torch.stack((trained, *named)) if named else trained

    __call__ = forward


def train_step(run: Run, batches: Iterator[Batch], step: int) -> None:
    """Does one optimizer step, without a host synchronization (but see `TreeSum.finish`).

    All ranks must do the same collectives and enter the same phases in the same order: the watchdog compares
    how many phases each has entered.

    Args:
        run: The run; its state is updated in place.
        batches: This rank's batches; one is taken for each gradient accumulation step.
        step: Number of the step in the run, from 0; seeds dropout together with the micro-batch's number.
    """
    state, reduction, precision, items = run.state, run.reduction, run.precision, run.items
    expected, last = items.begin(step), run.gradient_accumulation_steps - 1
    first_key = run.first_key + step * run.micro_batches
    still = run.still if run.still is not None and run.still.due(step) else None
    PHASE_TIMER.step = step + 1
    for index in range(run.gradient_accumulation_steps):
        enter_phase("data")
        batch = next(batches)
        enter_phase("host")
        items.add(batch.num_items)
        for generator in run.generators:
            generator.manual_seed(first_key + index)
        enter_phase("forward")
        with reduction.micro_batch(index == last):
            if still is not None:
                still.look()
            with precision.autocast:
                loss = run.replica(batch) / expected
            if still is not None:
                still.compare()
            # Before backward: there activation checkpointing repeats the forward pass, and its updates.
            statistics = state.statistics.of_micro_batch()
            enter_phase("backward")
            if loss.ndim:
                precision.backward(loss[0])
                loss = loss.detach()
            else:
                loss = precision.backward(loss)
        reduction.add(loss, statistics)
    enter_phase("update")
    loss = reduction.finish()
    loss = items.correct(loss, run.gradients)
    skipped = _update(run, step, loss[0] if run.losses else loss)
    if state.left_out is None or skipped is None:
        state.loss += loss
    else:
        state.loss += torch.where(skipped > 0, 0.0, loss)
        state.left_out += skipped
    if run.nonfinite is not None:
        run.nonfinite.end_step(step)


def _update(run: Run, step: int, loss: torch.Tensor) -> torch.Tensor | None:
    """Updates weights, average and schedule by the step's gradients, and clears these.

    Returns:
        As `Precision.update`.
    """
    # The order matters: gradients are unscaled before they are clipped, and a skipped update (its gradients
    # overflowed in fp16, or aren't finite with anomaly.nonfinite=skip) moves neither schedule nor average.
    state, precision = run.state, run.precision
    precision.unscale(state.optimizer)
    if run.max_grad_norm:
        state.norm = run.gradients.clip(run.max_grad_norm)
    elif run.recent is not None:
        state.norm = run.gradients.norm()
    if run.recent is not None:
        run.recent.record(step, loss, precision.judged(state.norm))
    skipped = precision.update(state.optimizer, state.norm)
    run.gradients.clear()
    state.statistics.end_step(skipped)
    if state.average is not None:
        state.average.update(step, skipped, state.lr.updates, step + 1 == run.steps)
    state.lr.advance(skipped)
    return skipped


def take_metrics(run: Run) -> dict[str, torch.Tensor]:
    """Returns metrics by name, each (), on the device; collective.

    Losses are sums over the steps since the last call, without the `left_out` ones; `moved` is that of
    `StillTensors`; the other metrics are those of the last step.

    Raises:
        BadInputError: If the model's trained parameters have changed.
    """
    state = run.state
    run.gradients.check(state.model)
    loss = sum_over_ranks(state.loss.clone(), run.reduction.loss_group)
    state.loss.zero_()
    metrics = dict(zip(("loss", *run.losses), loss.unbind() if run.losses else (loss,), strict=True))
    if state.left_out is not None:
        metrics["left_out"] = state.left_out.clone()
        state.left_out.zero_()
    metrics |= {"lr": state.lr.of_last_update(), "updates": state.lr.updates[0]}
    if run.still is not None:
        metrics["moved"] = run.still.first_moved(run.world.group)
    if run.max_grad_norm or run.recent is not None:
        metrics["grad_norm"] = state.norm
    if state.scaler is not None:
        metrics["loss_scale"] = scale_of(state.scaler)
    if run.nonfinite is not None:
        metrics |= run.nonfinite.take()
    return metrics
