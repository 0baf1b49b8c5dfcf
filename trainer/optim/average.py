"""The moving average of the weights.

Not torch.optim.swa_utils.AveragedModel: it copies the model, and reads its count of updates on the host. That
fp16's scaler, or anomaly.nonfinite=skip, skipped an update is known to the device alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from trainer.config.training import AverageConfig
from trainer.distributed.overlap import sharing_memory
from trainer.distributed.sharding import weights


class WeightAverage:
    """Exponential moving average of the weights (Polyak and Juditsky, 1992).

    Of the parameters that are trained: a frozen one is in the model as it is, also where a forward pass moves
    it or it holds no floating-point numbers.

    Attributes:
        tensors: The averages, by the parameters' names, on the weights' device or in the host's memory.
    """

    def __init__(self, model: nn.Module, config: AverageConfig) -> None:
        """Starts from the weights as they are; of a sharded model this rank's rows of them."""
        self._config = config
        self._moved = 0  # steps at the last movement
        self._ramp = 10
        named = {name: one for name, one in weights(model).items() if one.requires_grad}
        # Themselves, not their memory: a forward pass may give them other memory (`parameter.data = …`).
        self._weights: list[torch.Tensor] = [*named.values()]
        self._device = self._weights[0].device
        self._moved_at = torch.zeros(1, dtype=torch.int64, device=self._device)  # updates at that time
        self._staging: _Staging | None = None
        where = self._device
        if config.on_cpu and self._device.type != "cpu":
            where = torch.device("cpu")
            self._staging = _Staging(self._weights)
        self.tensors = {name: parameter.detach().to(where, copy=True) for name, parameter in named.items()}
        self._average = list(self.tensors.values())
        self._alone, self._together = _parted(named, self._average)

    def update(
        self, step: int, skipped: torch.Tensor | None, updates: torch.Tensor, last: bool = False
    ) -> None:
        """Moves towards the weights after a step, if it is due: for all updates since it moved last.

        At first the average follows faster: the decay is at most (1 + updates) / (10 + updates), as in
        TensorFlow's ExponentialMovingAverage.

        Args:
            step: Its number; without a scaler that is the number of updates before it.
            skipped: float (), on the device: 1 if there was no update; None where that can't be.
            updates: int64 (1,), on the device: updates before this step's.
            last: Whether it is the run's last, after which the average moves in any case.
        """
        done, decay = step + 1, self._config.decay
        if done % self._config.every and not last:
            return
        if skipped is None:
            self._move(max(1 - decay ** (done - self._moved), 9 / (self._ramp + step)))
            self._moved = done
        else:
            # Steps of which only the device knows whether they made an update.
            made = updates + (1 - skipped).to(torch.int64)
            missed = made - self._moved_at
            share = torch.maximum(1 - decay**missed, 9 / (self._ramp + updates)) * (missed > 0)
            self._move(share[0])
            self._moved_at.copy_(made)

    def go_on(self, step: int) -> None:
        """Continues after so many steps; the average and `moved_at` have been restored."""
        self._moved = step - step % self._config.every

    @property
    def before(self) -> int:
        """Updates that it followed in runs before this one, whose average this run began from."""
        return self._ramp - 10

    @before.setter
    def before(self, updates: int) -> None:
        self._ramp = 10 + updates

    @property
    def moved_at(self) -> torch.Tensor:
        """int64 (1,): updates at the last movement; counted only where the scaler may skip some."""
        return self._moved_at

    def _move(self, share: float | torch.Tensor) -> None:
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # no_grad costs 100 bytecodes a step
        try:
            if self._staging is None:
                _lerp(self._average, self._weights, share)
            else:
                self.catch_up()
                self._staging.start(self._weights, share)
        finally:
            torch._C._set_grad_enabled(before)

    def catch_up(self) -> None:
        """Does the movement that is under way, if the average is on the CPU and the weights are not."""
        if self._staging is not None and (arrived := self._staging.arrived()) is not None:
            _lerp(self._average, *arrived)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context manager in which the model has the averaged weights; its own are kept here until the end.

        The model itself and no copy of it: a copy would still call a function that the model made of its own
        method (`self.f = torch.compile(self._f)`, a closure), which computes with the weights as trained.
        """
        self.catch_up()
        # Values only: addresses stay, which a CUDA graph or a view of the weights keeps.
        kept = [weight.detach().clone() for weight, _ in self._together]
        _swap(self._alone)
        for weight, average in self._together:
            weight.data.copy_(average)
        try:
            yield
        finally:
            _swap(self._alone)
            for (weight, _), before in zip(self._together, kept, strict=True):
                weight.data.copy_(before)


_Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def _parted(named: Mapping[str, nn.Parameter], average: list[torch.Tensor]) -> tuple[_Pairs, _Pairs]:
    """Weights with their averages: those that have their memory alone, and those that share it."""
    together = sharing_memory({name: one.detach() for name, one in named.items()})
    pairs = [(name, (one, mean)) for (name, one), mean in zip(named.items(), average, strict=True)]
    return [pair for name, pair in pairs if name not in together], [
        pair for n, pair in pairs if n in together
    ]


def _swap(pairs: _Pairs) -> None:
    for weight, average in pairs:
        kept = weight.detach().clone()
        weight.data.copy_(average)
        average.copy_(kept)


class _Staging:
    """Weights on their way to the host: page-locked memory, filled in the background, read a step later."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._host = [torch.empty_like(weight, device="cpu", pin_memory=True) for weight in weights]
        self._share = torch.empty((), pin_memory=True)
        self._done: torch.cuda.Event | None = None

    def start(self, weights: Sequence[torch.Tensor], share: float | torch.Tensor) -> None:
        for host, weight in zip(self._host, weights, strict=True):
            host.copy_(weight, non_blocking=True)
        if isinstance(share, torch.Tensor):
            self._share.copy_(share, non_blocking=True)
        else:
            self._share.fill_(share)
        self._done = torch.cuda.Event()
        self._done.record()

    def arrived(self) -> tuple[list[torch.Tensor], float] | None:
        if self._done is None:
            return None
        self._done.synchronize()
        self._done = None
        return self._host, float(self._share)


def _lerp(average: list[torch.Tensor], weights: list[torch.Tensor], share: float | torch.Tensor) -> None:
    if isinstance(share, float):
        torch._foreach_lerp_(average, weights, share)
        return
    step = torch._foreach_sub(weights, average)
    torch._foreach_mul_(step, share)
    torch._foreach_add_(average, step)
