"""Reduces the micro-batches of a step to one gradient and one loss, over all ranks.

A reduction takes what each micro-batch gives (`add`) and leaves the step's (`finish`): in the parameters
the gradients of all ranks, for `StepStatistics` BatchNorm's statistics, and the loss. There are two. DDP's
all-reduce leaves loss and statistics of this rank alone, which are summed over the ranks later: the loss
when a row of metrics is due, the statistics in `StepStatistics.end_step`. The tree's leaves all of them of
all ranks, added in one order, so that the bits don't depend on the number of ranks.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import fsum
from typing import Any, Protocol

import torch
from torch import distributed as dist, nn

from trainer.data.sampling.plan import Plan
from trainer.distributed.parallel import World, check_reduced, sum_over_ranks, unsynchronized
from trainer.distributed.sharding import Rows, take_gradients, weights
from trainer.distributed.tree import TreeReduction
from trainer.errors import BadInputError
from trainer.models.batchnorm import StepStatistics
from trainer.observe.text import enumerated
from trainer.optim.optimizers import clip_gradients, grad_norm

_NOTHING = nullcontext()


class Gradients:
    """The gradients of a model's parameters, where backward leaves them.

    Attributes:
        parameters: Those that are trained.
    """

    def __init__(self, model: nn.Module) -> None:
        """Takes the gradients of a model."""
        self.parameters = [p for p in weights(model).values() if p.requires_grad]

    def present(self) -> list[torch.Tensor]:
        """The gradients that there are: none for a parameter that had no part in the step."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def take(self) -> tuple[list[torch.Tensor], set[int]]:
        """A micro-batch's gradients, to keep (zeros where there is none), and which there were."""
        used = {number for number, p in enumerate(self.parameters) if p.grad is not None}
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.clear()
        return gradients, used

    def put(self, gradients: list[torch.Tensor]) -> None:
        """Makes these the gradients of all parameters."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def clear(self) -> None:
        """Drops them after a step."""
        for parameter in self.parameters:
            parameter.grad = None

    def norm(self) -> torch.Tensor:
        """Their joint 2-norm, float (); 0 where there are none."""
        return grad_norm(present) if (present := self.present()) else self._nothing()

    def clip(self, largest: float) -> torch.Tensor:
        """Scales them so that it is at most `largest`; returns what it was before."""
        return clip_gradients(present, largest) if (present := self.present()) else self._nothing()

    def _nothing(self) -> torch.Tensor:
        return torch.zeros((), device=self.parameters[0].device)


class ShardedGradients(Gradients):
    """This rank's rows of the gradients; their norm is that of all ranks'."""

    def __init__(self, model: nn.Module, rows: Rows) -> None:
        """Takes the gradients of a sharded model."""
        super().__init__(model)
        self._rows = rows

    def norm(self) -> torch.Tensor:
        """See `Gradients.norm`; collective."""
        return self._rows.norm(super().norm())

    def clip(self, largest: float) -> torch.Tensor:
        """See `Gradients.clip`; collective."""
        return clip_gradients(self.present(), largest, self.norm())


class FixedGradients(Gradients):
    """Gradients in tensors that stay where they are.

    For CUDA graphs: each replay writes its gradients to the same memory. With one micro-batch on one rank
    they are used before the next replay; with several, or with DDP, they are added to tensors that last.
    """

    def __init__(self, model: nn.Module) -> None:
        """Takes a model's gradients, 0 at first."""
        super().__init__(model)
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def take(self) -> tuple[list[torch.Tensor], set[int]]:
        """See `Gradients.take`."""
        gradients = [g.clone() for g in self.present()]
        self.clear()
        return gradients, set(range(len(self.parameters)))

    def put(self, gradients: list[torch.Tensor]) -> None:
        """See `Gradients.put`."""
        torch._foreach_copy_(self.present(), gradients)

    def clear(self) -> None:
        """Sets them to 0."""
        torch._foreach_zero_(self.present())


class Reduction(Protocol):
    """Interface of a reduction of a step's micro-batches.

    Attributes:
        loss_group: The ranks over which a loss is still to be summed; None where each has the whole.
    """

    loss_group: dist.ProcessGroup | None

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """The context of a micro-batch's forward and backward pass; `last`: of the step."""
        ...

    def add(self, loss: torch.Tensor, statistics: list[torch.Tensor]) -> None:
        """Takes a micro-batch's loss and BatchNorm's statistics, after its backward pass.

        Args:
            loss: float (); or (n,), the sum of several losses and each of them.
            statistics: Of this micro-batch.
        """
        ...

    def finish(self) -> torch.Tensor:
        """Puts the step's sums in place; collective. Returns its loss: this rank's, or the whole."""
        ...

    def gather_losses(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the losses for a checkpoint, float64 (n, …): each rank's, or the whole; collective."""
        ...

    def own_loss(self, losses: Sequence[float]) -> float:
        """This rank's part of what a checkpoint kept, maybe on another number of ranks."""
        ...


class AllReduce:
    """DDP's: gradients are added in place, and summed over the ranks during the last backward pass."""

    def __init__(self, replica: nn.Module, world: World, statistics: StepStatistics) -> None:
        """Takes a model, wrapped in DDP or alone."""
        self.loss_group = world.group
        self._replica, self._world, self._statistics = replica, world, statistics
        self._loss: torch.Tensor | None = None

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """See `Reduction.micro_batch`: only the last one's gradients cross the network."""
        if self._loss is not None:
            self._statistics.restore()
        return _NOTHING if last else unsynchronized(self._replica)

    def add(self, loss: torch.Tensor, statistics: list[torch.Tensor]) -> None:
        """See `Reduction.add`."""
        self._loss = loss if self._loss is None else self._loss + loss
        if statistics:
            self._statistics.add(statistics)

    def finish(self) -> torch.Tensor:
        """See `Reduction.finish`."""
        if self.loss_group is not None:
            check_reduced(self._replica, self._world.rank)
        loss, self._loss = self._loss, None
        assert loss is not None
        return loss

    def gather_losses(self, loss: torch.Tensor) -> torch.Tensor:
        """See `Reduction.gather_losses`."""
        losses = torch.zeros(self._world.size, *loss.shape, dtype=torch.float64, device=loss.device)
        losses[self._world.rank] = loss
        return sum_over_ranks(losses, self.loss_group)

    def own_loss(self, losses: Sequence[float]) -> float:
        """See `Reduction.own_loss`: another number of ranks had other parts, of the same total."""
        if len(losses) == self._world.size:
            return losses[self._world.rank]
        return fsum(losses) * (self._world.rank == 0)


class ReduceScatter(AllReduce):
    """FSDP's: gradients are summed during the last backward pass, and each rank gets those of its rows."""

    def __init__(self, model: nn.Module, world: World, statistics: StepStatistics, accumulates: bool) -> None:
        """Takes a sharded model; `accumulates`: whether a step has several micro-batches."""
        super().__init__(model, world, statistics)
        self._model: Any = model
        self._accumulates = accumulates

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """See `AllReduce.micro_batch`: until the last one each rank keeps whole gradients."""
        if self._accumulates:
            self._model.set_requires_gradient_sync(last)
        if self._loss is not None:
            self._statistics.restore()
        return _NOTHING

    def finish(self) -> torch.Tensor:
        """See `Reduction.finish`.

        Raises:
            BadInputError: If a trained parameter had no part in the step.
        """
        if without := take_gradients(self._model):
            raise BadInputError(
                f"rank {self._world.rank}: a step's backward pass gave no gradient to the model's parameters "
                f"{enumerated(without, 6)}; freeze these by model.freeze, remove them, or use "
                "parallel.strategy=ddp with parallel.find_unused_parameters=true"
            )
        return super().finish()


class TreeSum:
    """The tree's: everything is added in one order, whatever the number of ranks."""

    loss_group: dist.ProcessGroup | None = None

    def __init__(
        self, gradients: Gradients, world: World, statistics: StepStatistics, bucket_mb: int
    ) -> None:
        """Sums over the ranks in buckets of so many MiB."""
        self._gradients, self._statistics = gradients, statistics
        self._tree = TreeReduction(world.group, bucket_mb)
        self._used, self._losses = set[int](), torch.Size()
        # A single rank knows by itself which parameters a step used.
        flags = len(gradients.parameters) if world.group is not None else 0
        self._all_used = torch.ones(flags, dtype=torch.float64, device=world.device)

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:  # noqa: ARG002
        """See `Reduction.micro_batch`."""
        return _NOTHING

    def add(self, loss: torch.Tensor, statistics: list[torch.Tensor]) -> None:
        """See `Reduction.add`."""
        if statistics:
            self._statistics.restore()
        gradients, used = self._gradients.take()
        self._used |= used
        flags = self._all_used if len(used) == len(gradients) else self._flags(used)
        self._losses = loss.shape
        metrics = torch.cat((loss.double().view(-1), flags, *(s.double() for s in statistics)))
        self._tree.add_micro_batch(gradients, metrics)

    def _flags(self, used: set[int]) -> torch.Tensor:
        flags = [float(number in used) for number in range(len(self._all_used))]
        return torch.tensor(flags, dtype=torch.float64, device=self._all_used.device)

    def finish(self) -> torch.Tensor:
        """See `Reduction.finish`; a parameter that no micro-batch used gets no gradient."""
        sums = self._tree.end_step()
        own_used, self._used = self._used, set()
        parameters, count = self._gradients.parameters, len(self._all_used)
        losses = self._losses.numel()
        self._gradients.put(sums.gradients)
        # Asked for only where this rank used fewer, as the host waits for the device then.
        if len(own_used) < len(parameters):
            used = sums.metrics[losses : losses + count].tolist() or [0.0] * len(parameters)
            for number, flag in enumerate(used):
                if number not in own_used and not flag:
                    parameters[number].grad = None
        self._statistics.set_sum(sums.metrics[losses + count :])
        return sums.metrics[:losses] if self._losses else sums.metrics[0]

    def gather_losses(self, loss: torch.Tensor) -> torch.Tensor:
        """See `Reduction.gather_losses`."""
        return loss.clone().unsqueeze(0)

    def own_loss(self, losses: Sequence[float]) -> float:
        """See `Reduction.own_loss`."""
        return fsum(losses)


class ItemCount:
    """Divisor of a step's losses: its items, known from the plan."""

    def __init__(self, plan: Plan, per_sample: int, group: dist.ProcessGroup | None) -> None:
        """Items are samples, or so many tokens of each."""
        self._plan, self._per_sample, self._group = plan, per_sample, group

    def begin(self, step: int) -> int:
        """Begins to count a step; returns its items over all ranks, at most."""
        return self._plan.step_samples(step) * self._per_sample

    def add(self, num_items: int) -> None:
        """Takes the items of a micro-batch that was loaded."""

    def correct(self, loss: torch.Tensor, gradients: Gradients) -> torch.Tensor:  # noqa: ARG002
        """Divides a step's loss and gradients by what it really had: here they are. Returns the loss."""
        return loss


class RaggedItemCount(ItemCount):
    """Divisor where samples differ in their items (valid tokens), known once they are loaded.

    Until then losses are divided by the most there can be.
    """

    _expected = _here = 0

    def begin(self, step: int) -> int:
        """See `ItemCount.begin`."""
        self._expected, self._here = super().begin(step), 0
        return self._expected

    def add(self, num_items: int) -> None:
        """See `ItemCount.add`."""
        self._here += num_items

    def correct(self, loss: torch.Tensor, gradients: Gradients) -> torch.Tensor:
        """Divides by what all ranks really had; collective."""
        true = torch.full((), float(self._here), dtype=torch.float64, device=loss.device)
        sum_over_ranks(true, self._group)
        # No valid token at all: no gradient, not a NaN.
        correction = self._expected / true.clamp_(min=1)
        if present := gradients.present():
            torch._foreach_mul_(present, correction.to(present[0].dtype))
        return loss * correction
