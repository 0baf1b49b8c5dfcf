"""Reduces the micro-batches of a step to one gradient and one loss, over all ranks.

A reduction takes gradients, loss and BatchNorm's statistics of each micro-batch (`add`) and sums them over
the step (`finish`). Gradients are then those of all ranks. With an all-reduce (DDP) or reduce-scatter (FSDP),
loss and statistics are still those of this rank, and are summed over the ranks later: the loss when a metrics
record is due, the statistics in `StepStatistics.end_step`. With the tree all of them are sums over all ranks,
added in one order, so that the bits don't depend on the number of ranks.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    """Gradients of a model's parameters, in their `grad`.

    Attributes:
        parameters: The trained parameters.
        dtypes: Their dtypes.
    """

    def __init__(self, model: nn.Module) -> None:
        """Takes a model."""
        self.parameters = [p for p in weights(model).values() if p.requires_grad]
        self.dtypes = {p.dtype for p in self.parameters}

    def check(self, model: nn.Module) -> None:
        """Checks that a model's trained parameters are still these.

        Raises:
            BadInputError: Naming one that was frozen, or another one, when the run began.
        """
        known, own = {id(p) for p in self.parameters}, weights(model)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and id(own[name]) not in known:
                raise BadInputError(
                    f"the model's parameter '{name}' isn't one of those that the run began to train, so that "
                    "neither optimizer nor checkpoints know it: let it be trained from the start, or thaw it "
                    "in a second run from this one (--init-from)"
                )

    def present(self) -> list[torch.Tensor]:
        """Returns the gradients, without parameters that had no part in the step."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def take(self) -> tuple[list[torch.Tensor], set[int]]:
        """Hands a micro-batch's gradients over to the caller, and clears them.

        Returns:
            A gradient for each parameter, zeros if it had none; and the numbers of those that had one.
        """
        used = {number for number, p in enumerate(self.parameters) if p.grad is not None}
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.clear()
        return gradients, used

    def put(self, gradients: list[torch.Tensor]) -> None:
        """Sets the gradients of all parameters."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def clear(self) -> None:
        """Sets all gradients to None."""
        for parameter in self.parameters:
            parameter.grad = None

    def norm(self) -> torch.Tensor:
        """Returns the 2-norm of all gradients together, float (); 0 without any."""
        return grad_norm(present) if (present := self.present()) else self._zero()

    def clip(self, largest: float) -> torch.Tensor:
        """Scales the gradients to a norm of at most `largest`; returns their norm before, float ()."""
        return clip_gradients(present, largest) if (present := self.present()) else self._zero()

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), device=self.parameters[0].device)


class ShardedGradients(Gradients):
    """Gradients of a sharded model: this rank's rows; the norm is that of the rows of all ranks."""

    def __init__(self, model: nn.Module, rows: Rows) -> None:
        """Takes a sharded model and this rank's rows of it."""
        super().__init__(model)
        self._rows = rows

    def norm(self) -> torch.Tensor:
        """See `Gradients.norm`; collective."""
        return self._rows.norm(super().norm())

    def clip(self, largest: float) -> torch.Tensor:
        """See `Gradients.clip`; collective."""
        return clip_gradients(self.present(), largest, self.norm())


class FixedGradients(Gradients):
    """Gradients in tensors that keep their memory.

    CUDA graphs write the gradients of each replay to the same memory. With one micro-batch on one rank they
    are used before the next replay; with several, or with DDP, they are added to tensors of their own.
    """

    def __init__(self, model: nn.Module) -> None:
        """Takes a model, and sets its gradients to 0."""
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
        """Sets all gradients to 0."""
        torch._foreach_zero_(self.present())


class Reduction(Protocol):
    """Interface of a reduction of a step's micro-batches.

    Attributes:
        loss_group: Process group over which the loss of `finish` is still to be summed; None where it is the
            sum over all ranks already.
    """

    loss_group: dist.ProcessGroup | None

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Returns the context of a micro-batch's forward and backward pass.

        Args:
            last: True for the last micro-batch of a step.
        """

    def add(self, loss: torch.Tensor, statistics: list[torch.Tensor]) -> None:
        """Takes a micro-batch's loss and BatchNorm's statistics, after its backward pass.

        Args:
            loss: float (); or (1 + n,), the trained sum of several losses and each of them; and what they
                count, if they say so.
            statistics: Batch statistics of this micro-batch.
        """

    def finish(self) -> torch.Tensor:
        """Puts the step's gradients into the parameters; collective.

        Returns:
            The step's loss, shaped as in `add`: this rank's, or the sum over all (see `loss_group`).
        """

    def gather_losses(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns losses for a checkpoint, float64 (ranks, …), or (1, …) if summed already; collective."""

    def own_loss(self, losses: Sequence[float]) -> float:
        """Returns this rank's loss of those in a checkpoint, which may be of another number of ranks."""


class AllReduce:
    """All-reduce of DDP: gradients accumulate in place, and are summed in the step's last backward pass."""

    def __init__(self, replica: nn.Module, world: World, statistics: StepStatistics) -> None:
        """Takes a model, wrapped in DDP or not."""
        self.loss_group = world.group
        self._replica, self._world, self._statistics = replica, world, statistics
        self._loss: torch.Tensor | None = None

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """See `Reduction.micro_batch`; gradients cross the network only in the last one."""
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
        """See `Reduction.own_loss`; with another number of ranks, rank 0 takes the sum."""
        if len(losses) == self._world.size:
            return losses[self._world.rank]
        return fsum(losses) * (self._world.rank == 0)


@contextmanager
def _one_backward_pass() -> Iterator[None]:
    """Refuses a second pass through a module: FSDP has given its whole weights away after the first."""
    try:
        yield
    except RuntimeError as error:
        if "got mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise BadInputError(
            "parallel.strategy: the loss differentiates a part of the model itself (torch.autograd.grad), or "
            "calls it with other weights (functional_call), which FSDP can't; use parallel.strategy=ddp"
        ) from error


class ReduceScatter(AllReduce):
    """Reduce-scatter of FSDP: in the step's last backward pass each rank gets the sum of its rows."""

    def __init__(self, model: nn.Module, world: World, statistics: StepStatistics, accumulates: bool) -> None:
        """Takes a sharded model; `accumulates`: True if a step has several micro-batches on this rank."""
        super().__init__(model, world, statistics)
        self._model: Any = model
        self._accumulates = accumulates

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """See `AllReduce.micro_batch`; before the last one each rank keeps unsharded gradients."""
        if self._accumulates:
            self._model.set_requires_gradient_sync(last)
        if self._loss is not None:
            self._statistics.restore()
        return _one_backward_pass()

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
    """Tree reduction: everything is added in one order, whatever the number of ranks."""

    loss_group: dist.ProcessGroup | None = None

    def __init__(
        self, gradients: Gradients, world: World, statistics: StepStatistics, bucket_mb: int
    ) -> None:
        """Takes the gradients to sum, in buckets of `bucket_mb` MiB."""
        self._gradients, self._statistics = gradients, statistics
        self._tree = TreeReduction(world.group, bucket_mb)
        self._used, self._losses = set[int](), torch.Size()
        # A single rank needs no flags to know which parameters a step used.
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
        # Read only where this rank used fewer than all: .tolist() makes the host wait for the device.
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
    """Divisor of a step's losses where every sample has as many items: known from the plan."""

    def __init__(self, plan: Plan, per_sample: int, group: dist.ProcessGroup | None) -> None:
        """Takes the items of each sample: 1, or its number of tokens."""
        self._plan, self._per_sample, self._group = plan, per_sample, group

    def begin(self, step: int) -> int:
        """Begins to count a step; returns the most items that it can have, over all ranks."""
        return self._plan.step_samples(step) * self._per_sample

    def add(self, num_items: int) -> None:
        """Adds the items of a micro-batch that was loaded."""

    def correct(self, loss: torch.Tensor, gradients: Gradients) -> torch.Tensor:  # noqa: ARG002
        """Returns a step's loss: it has been divided by the right number already."""
        return loss


class RaggedItemCount(ItemCount):
    """Divisor of a step's losses where samples differ in their items (valid tokens).

    The number is known when all micro-batches are loaded; until then losses are divided by its upper bound.
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
        """Scales a step's loss and gradients to the items that all ranks had; collective.

        Returns:
            The scaled loss; gradients are scaled in place.
        """
        true = torch.full((), float(self._here), dtype=torch.float64, device=loss.device)
        sum_over_ranks(true, self._group)
        # Without any valid token the gradient is 0, not NaN.
        correction = self._expected / true.clamp_(min=1)
        return _scaled(loss, gradients, correction)


class GivenCount(ItemCount):
    """Divisor of a step's losses where the loss gives what it counts, as its last element; else as known."""

    def __init__(self, known: ItemCount, losses: int, group: dist.ProcessGroup | None) -> None:
        """Takes the count to fall back to, the number of named losses, and the group of a loss."""
        self._known, self._group = known, group
        self._alone, self._given = not losses, 2 + losses  # with counts: their sum, each of them, the counts

    def begin(self, step: int) -> int:
        """See `ItemCount.begin`."""
        return self._known.begin(step)

    def add(self, num_items: int) -> None:
        """See `ItemCount.add`."""
        self._known.add(num_items)

    def correct(self, loss: torch.Tensor, gradients: Gradients) -> torch.Tensor:
        """Scales a step's loss and gradients to the counts that all ranks had; collective."""
        if not loss.ndim or len(loss) < self._given:
            return self._known.correct(loss, gradients)
        share = sum_over_ranks(loss[-1].clone(), self._group)  # of the number that they were divided by
        loss = loss[0] if self._alone else loss[:-1]
        # Where nothing counts the gradient is 0, not NaN.
        return _scaled(loss, gradients, torch.where(share == 0, 0.0, 1 / share))


def _scaled(loss: torch.Tensor, gradients: Gradients, factor: torch.Tensor) -> torch.Tensor:
    for dtype in gradients.dtypes:  # in each its own: a factor in bfloat16 is too coarse for the others
        if alike := [g for g in gradients.present() if g.dtype == dtype]:
            torch._foreach_mul_(alike, factor.to(dtype))
    return loss * factor
