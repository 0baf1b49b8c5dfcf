"""Moving average of the weights.

torch.optim.swa_utils.AveragedModel copies the model, and reads its count of updates on the host, while an
update skipped by fp16's scaler or anomaly.nonfinite=skip is known on the device alone.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from trainer.config.training import AverageConfig
from trainer.distributed.overlap import sharing_memory
from trainer.distributed.sharding import weights


class WeightAverage:
    """Exponential moving average of the trained weights (Polyak and Juditsky, 1992).

    Frozen parameters aren't averaged, even if a forward pass changes them.

    Attributes:
        tensors: Averages by the parameters' names, on the weights' device, in float32 at least: bfloat16
            would lose their small steps.
        moved_at: Number of updates at the last update of the average, int64 (1,), on the device; if no update
            may be skipped, only set after the run's last step.
        before: Number of updates in earlier runs, whose average this run started from.
    """

    def __init__(self, model: nn.Module, config: AverageConfig) -> None:
        """Starts from the current weights; for a sharded model from this rank's rows."""
        self._config = config
        self._moved = 0  # steps before the last update of the average
        self.before = 0
        named = {name: one for name, one in weights(model).items() if one.requires_grad}
        # Parameters, not `.data`: a forward pass may replace their memory (`parameter.data = …`).
        self._weights: list[torch.Tensor] = [*named.values()]
        device = self._weights[0].device
        self.moved_at = torch.zeros(1, dtype=torch.int64, device=device)
        self.tensors = {name: p.detach().to(average_dtype(p), copy=True) for name, p in named.items()}
        self._average = list(self.tensors.values())
        self._wider = any(p.dtype != mean.dtype for p, mean in zip(self._weights, self._average, strict=True))
        self._alone, self._copied = _parted(named, self._average)

    def update(
        self, step: int, skipped: torch.Tensor | None, updates: torch.Tensor, last: bool = False
    ) -> None:
        """Updates the average after a step, every `ema.every` steps, for all updates since the last time.

        At first the average follows faster: the decay is at most (1 + updates) / (10 + updates), as in
        TensorFlow's ExponentialMovingAverage.

        Args:
            step: Number of the step; without a scaler also the number of updates before it.
            skipped: float (), on the device: 1 if the update was skipped; None if updates are never skipped.
            updates: int64 (1,), on the device: number of updates before this step's.
            last: True for the run's last step, after which the average is updated in any case.
        """
        done, decay = step + 1, self._config.decay
        if done % self._config.every and not last:
            return
        if skipped is None:
            self._move(max(1 - decay ** (done - self._moved), 9 / (10 + self.before + step)))
            if last:
                self.moved_at.fill_(done)
        else:
            # The number of updates is known on the device alone.
            made = updates + (1 - skipped).to(torch.int64)
            missed = made - self.moved_at
            fraction = torch.maximum(1 - decay**missed, 9 / (10 + self.before + updates)) * (missed > 0)
            self._move(fraction[0])
            self.moved_at.copy_(made)
        self._moved = done

    def go_on(self, step: int) -> None:
        """Continues after `step` steps; the average and `moved_at` have been restored."""
        # After the last step of a run, which may be extended, the average was updated in any case.
        self._moved = max(step - step % self._config.every, int(self.moved_at))

    def _move(self, fraction: float | torch.Tensor) -> None:
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # no_grad costs 100 bytecodes a step
        try:
            weights = self._weights
            if self._wider:
                weights = [w.to(mean.dtype) for w, mean in zip(weights, self._average, strict=True)]
            _lerp(self._average, weights, fraction)
        finally:
            torch._C._set_grad_enabled(before)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the model has the averaged weights; its own are restored afterwards.

        The model isn't copied: a copy would still call functions bound to the original
        (`self.f = torch.compile(self._f)`), which compute with the weights as trained.
        """
        # Values are exchanged, not addresses, which a CUDA graph or a view of the weights keeps.
        kept = [weight.detach().clone() for weight, _ in self._copied]
        _swap(self._alone)
        for weight, average in self._copied:
            weight.data.copy_(average)
        try:
            yield
        finally:
            _swap(self._alone)
            for (weight, _), before in zip(self._copied, kept, strict=True):
                weight.data.copy_(before)


def average_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Returns the dtype of a parameter's average."""
    return torch.promote_types(parameter.dtype, torch.float32)


_Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def _parted(named: Mapping[str, nn.Parameter], average: list[torch.Tensor]) -> tuple[_Pairs, _Pairs]:
    """Returns pairs of weight and average: those to swap, and weights that share memory or are narrower."""
    copied = sharing_memory({name: one.detach() for name, one in named.items()})
    copied |= {name for name, one in named.items() if one.dtype != average_dtype(one)}
    pairs = [(name, (one, mean)) for (name, one), mean in zip(named.items(), average, strict=True)]
    return [pair for name, pair in pairs if name not in copied], [pair for n, pair in pairs if n in copied]


def _swap(pairs: _Pairs) -> None:
    for weight, average in pairs:
        kept = weight.detach().clone()
        weight.data.copy_(average)
        average.copy_(kept)


def _lerp(average: list[torch.Tensor], weights: list[torch.Tensor], fraction: float | torch.Tensor) -> None:
    if isinstance(fraction, float):
        torch._foreach_lerp_(average, weights, fraction)
        return
    step = torch._foreach_sub(weights, average)
    torch._foreach_mul_(step, fraction)
    torch._foreach_add_(average, step)
