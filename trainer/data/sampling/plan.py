"""Sample order and steps, as arithmetic.

Terms:
  micro-batch  the samples of one forward and backward pass on a rank, and the unit of randomness; numbered
               through the whole run
  step         the micro-batches of one update, over all ranks: `global_batch_size` samples
  epoch        once through the data
  shard        a file with many samples; a shuffle block is a group of shards whose samples are shuffled
               together

Nothing here depends on the world size except which of a step's micro-batches a rank takes, so the samples
of a step are the same on any number of ranks. Resuming is starting at another step.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from trainer.config.data import Last
from trainer.data.sampling.class_order import ClassDraws
from trainer.data.sampling.group_order import in_blocks, in_buckets
from trainer.data.sampling.mix_order import MixDraws
from trainer.errors import BadInputError
from trainer.rng import Float32, Ints, permuted

MOST_STEPS = 20_000_000  # a table on the device holds the learning rate of every step


class Samples(NamedTuple):
    """Samples of n micro-batches; each array has shape (n, micro_batch_size).

    Attributes:
        epoch: Epoch of each sample, from 0; it keys the random numbers of the sample's augmentation. Samples
            that are drawn with replacement have the number of the draw instead, as a sample may occur twice
            in an epoch.
        sample: Index of each sample in the data set.
        weight: 1 for a sample, 0 for padding.
    """

    epoch: Ints
    sample: Ints
    weight: Float32


@dataclass(frozen=True)
class Plan:
    """The order of the samples of a run, and their division into steps and micro-batches.

    Attributes:
        samples: Number of samples in an epoch.
        global_batch_size: Samples in a step, over all ranks.
        micro_batch_size: Samples in a micro-batch; divides `global_batch_size`.
        epochs: Number of epochs.
        last: What happens to the last step of an epoch. `cross`: it takes the samples it lacks from
            the next epoch (the run's last step from one epoch more). `drop`: incomplete steps are
            left out. `weighted`: it is padded to the full shape with samples of weight 0.
        seed: Seed of the order.
        max_steps: Upper bound for the steps of the run; None: no bound.
        shuffle: False keeps the samples in their order (evaluation, data.shuffle=false).
        shards: Number of samples in each shard; read only with `shards_per_block`.
        shards_per_block: Shards in a shuffle block (see `group_order`); 0: all samples are shuffled together.
        buckets: Number of samples in each bucket, if all samples of a micro-batch come from one bucket (see
            `group_order`); else empty.
        draws: Distribution from which samples are drawn with replacement, by weight of class (see
            `class_order`) or of data set (`mix_order`); None: every sample once in an epoch.

    Raises:
        BadInputError: If there are no samples, `micro_batch_size` doesn't divide `global_batch_size`, or the
            run has no steps or too many.
    """

    samples: int
    global_batch_size: int
    micro_batch_size: int
    epochs: int
    last: Last
    seed: int
    max_steps: int | None = None
    shuffle: bool = True
    shards: tuple[int, ...] = ()
    shards_per_block: int = 0
    buckets: tuple[int, ...] = ()
    draws: ClassDraws | MixDraws | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise BadInputError("the data set is empty: there is nothing to train on")
        if self.global_batch_size % self.micro_batch_size:
            raise BadInputError(
                f"data.global_batch_size={self.global_batch_size} is not a multiple of "
                f"data.micro_batch_size={self.micro_batch_size}: choose a micro-batch that divides it"
            )
        if self.steps > MOST_STEPS:
            raise BadInputError(
                f"{self.steps:,} steps are more than {MOST_STEPS:,}: lower epochs or set max_steps"
            )
        if self.last == "drop" and self.samples < self.global_batch_size:
            raise BadInputError(
                f"data.last_batch=drop leaves no step: {self.samples} samples are fewer than "
                f"data.global_batch_size={self.global_batch_size}; use a smaller batch or "
                "data.last_batch=cross"
            )

    @property
    def notes(self) -> list[str]:
        """Lines for the user on a step that is larger than the data set."""
        size, samples = self.global_batch_size, self.samples
        if size <= samples:
            return []
        part = f"{1 - samples / size:.0%} of a step is padding"
        what = part if self.last == "weighted" else f"a step has each {size / samples:.3g} times"
        return [f"data.global_batch_size={size} is more than the {samples} samples of the data: {what}"]

    @property
    def micro_batches(self) -> int:
        """Micro-batches in a step."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def steps(self) -> int:
        """Steps in the whole run; the number of updates, unless the gradient scaler skips some."""
        if self.last == "cross":
            steps = -(-self.samples * self.epochs // self.global_batch_size)
        else:
            steps = self.steps_per_epoch * self.epochs
        return steps if self.max_steps is None else min(steps, self.max_steps)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch, where no step has samples of two epochs (`drop`, `weighted`)."""
        whole, rest = divmod(self.samples, self.global_batch_size)
        return whole + (rest > 0 and self.last == "weighted")

    @property
    def epoch_length(self) -> float:
        """Steps of an epoch; fractional if its last step also has samples of the next epoch (`cross`)."""
        return self.samples / self.global_batch_size if self.last == "cross" else self.steps_per_epoch

    def samples_seen(self, steps: int) -> int:
        """Returns the number of samples of weight 1 in the first `steps` steps, over all ranks."""
        if self.last != "weighted":
            return steps * self.global_batch_size
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs * self.samples + rest * self.global_batch_size

    def epoch_at(self, steps: int) -> float:
        """Returns the number of epochs after `steps` steps, with the fraction of an unfinished one."""
        if self.last == "cross":
            return steps * self.global_batch_size / self.samples
        return steps / self.steps_per_epoch

    def epochs_done(self, steps: int) -> int:
        """Returns the number of epochs whose samples have all been seen after `steps` steps."""
        if self.last == "cross":
            return min(steps * self.global_batch_size // self.samples, self.epochs)
        return steps // self.steps_per_epoch

    def next_epoch_end(self, done: int, epochs: int = 1) -> int:
        """Returns the number of steps after which the next multiple of `epochs` epochs is complete.

        Args:
            done: Number of completed steps.
            epochs: Epochs between two such ends.

        Returns:
            More than `done`; more than the steps of the run if none of them completes it.
        """
        later = range(done + 1, self.steps + 1)
        whole = self.epochs_done(done) // epochs
        return done + 1 + bisect_right(later, whole, key=lambda step: self.epochs_done(step) // epochs)

    def step_samples(self, step: int) -> int:
        """Returns the number of samples of weight 1 in a step, over all ranks; `step` counts from 0."""
        if self.last != "weighted":
            return self.global_batch_size
        return min(
            self.global_batch_size, self.samples - step % self.steps_per_epoch * self.global_batch_size
        )

    def read(self, micro_batches: Ints) -> Samples:
        """Returns the samples of micro-batches.

        Args:
            micro_batches: int64 (n,), micro-batch numbers counted through the run: step * self.micro_batches
                + index of the micro-batch in its step, over all ranks.

        Returns:
            Arrays of shape (n, micro_batch_size).
        """
        if self.last == "cross":
            run_position = micro_batches[:, None] * self.micro_batch_size + np.arange(self.micro_batch_size)
            epoch, position = np.divmod(run_position, self.samples)
        else:
            step, micro_batch = np.divmod(micro_batches, self.micro_batches)
            epoch, step = np.divmod(step, self.steps_per_epoch)
            start = step * self.global_batch_size + micro_batch * self.micro_batch_size
            position = start[:, None] + np.arange(self.micro_batch_size)
            epoch = np.broadcast_to(epoch[:, None], position.shape)
        real = position < self.samples
        position = np.where(real, position, 0)
        sample = self._sample(epoch, position)
        if self.draws is not None:
            epoch = epoch * self.samples + position
        return Samples(epoch, sample, real.astype(np.float32))

    def _sample(self, epoch: Ints, position: Ints) -> Ints:
        if not self.shuffle:
            return position
        if self.draws is not None:
            return self.draws.drawn(self.seed, epoch, position)
        if self.shards_per_block:
            return in_blocks(self.seed, epoch, position, self.shards, self.shards_per_block)
        if self.buckets:
            cross = self.last == "cross"
            return in_buckets(self.seed, epoch, position, self.buckets, self.micro_batch_size, cross)
        return permuted(self.seed, epoch, position, self.samples)


@dataclass(frozen=True)
class Share:
    """One rank's part of a plan: a contiguous range of the micro-batches of each step.

    Attributes:
        plan: The plan of all ranks.
        rank: This rank.
        world: Number of ranks.

    Raises:
        BadInputError: If the micro-batches of a step can't be divided evenly among the ranks.
    """

    plan: Plan
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.plan.micro_batches % self.world:
            raise BadInputError(
                f"data.global_batch_size={self.plan.global_batch_size} is not a multiple of "
                "data.micro_batch_size="
                f"{self.plan.micro_batch_size} x {self.world} ranks: change one of them or the number of "
                "ranks"
            )

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of this rank in each step."""
        return self.plan.micro_batches // self.world

    def micro_batches(self, batches: Ints) -> Ints:
        """Returns the numbers in the plan of this rank's micro-batches, int64 (n,).

        Args:
            batches: int64 (n,), numbers of this rank's micro-batches, counted from 0 through the run.
        """
        step, index = np.divmod(batches, self.gradient_accumulation_steps)
        return np.asarray(
            step * self.plan.micro_batches + self.rank * self.gradient_accumulation_steps + index
        )

    def batches(self, first_step: int = 0) -> range:
        """Returns the `batches` argument of `micro_batches` from a step to the end of the run."""
        return range(
            first_step * self.gradient_accumulation_steps, self.plan.steps * self.gradient_accumulation_steps
        )


def evaluation_share(samples: int, micro_batch_size: int, rank: int, world: int) -> Share:
    """Returns a rank's part of an evaluation: each sample once, in order, padded with samples of weight 0."""
    plan = Plan(
        samples, micro_batch_size * world, micro_batch_size, epochs=1, last="weighted", seed=0, shuffle=False
    )
    return Share(plan, rank, world)
