"""Updates by the user's own optimizer or scheduler, whose state_dict is in the checkpoints.

They run on the host, which synchronizes with the device where an update may be skipped; the optimizers and
schedules of `optimizers` don't.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from trainer.checkpoint.tensor_file import put_together, take_apart
from trainer.rng import Purpose, key


class Scheduler(Protocol):
    """Scheduler like those of torch.optim.lr_scheduler: sets the rates of the optimizer that it was given."""

    def step(self) -> object:
        """Sets the rates for the next update."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the scheduler's state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Restores the scheduler's state."""


class ConstantSchedule:
    """Constant rates, for `make_optimizer` where a user's scheduler sets them."""

    def __init__(self, rate: float) -> None:
        """Takes the constant rate."""
        self.current = rate

    def of(self, factor: float) -> float:
        """Returns the rate times a factor."""
        return self.current * factor


class HostSchedule:
    """Learning rates of an optimizer, set on the host by the user's scheduler, or constant.

    It replaces `optimizers.LRScheduler`, and gives the state for checkpoints.

    Attributes:
        optimizer: Optimizer with these rates.
        updates: int64 (1,), on the device: updates so far, without skipped ones.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
        device: torch.device,
        seed: int = 0,
        generators: Sequence[torch.Generator] = (),
        own: bool = True,
    ) -> None:
        """Starts before the first update.

        Args:
            optimizer: The optimizer.
            scheduler: Called after each update, or None.
            device: Device of the weights.
            seed: Seed of the run.
            generators: Random generators that are seeded by the update, alike on all ranks.
            own: True for the user's optimizer, which may not support skipped updates.
        """
        self.optimizer, self._scheduler, self._device = optimizer, scheduler, device
        self.updates = torch.zeros(1, dtype=torch.int64, device=device)
        self._done, self._last = 0, self._rate()
        if own:
            # The trainer then reads the flag and doesn't call `step`, whatever this class supports: torch's
            # fused SGD uses uninitialized memory if its first update is skipped.
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]

            def seeded(*_: Any) -> None:
                for generator in generators:
                    generator.manual_seed(key(seed, Purpose.UPDATE, self._done) >> 2)

            optimizer.register_step_pre_hook(seeded)

    def _rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def last_update(self) -> Any:
        """Returns the last update for which the scheduler has a rate (OneCycleLR); None if unlimited."""
        return getattr(self._scheduler, "total_steps", None)

    def look_up(self) -> None:
        """Reads the number of updates from the device."""
        self._done = int(self.updates)

    def advance(self, skipped: torch.Tensor | None = None) -> None:
        """Counts an update and lets the scheduler step, unless `skipped` (float (), on the device) is 1."""
        self._last = self._rate()
        if skipped is not None and bool(skipped):
            return
        self._done += 1
        self.updates += 1
        if self._scheduler is not None:
            self._scheduler.step()

    def of_last_update(self) -> torch.Tensor:
        """Returns the first group's rate in the last update, made or skipped, float64 ()."""
        return torch.tensor(self._last, dtype=torch.float64, device=self._device)

    def kept(self) -> tuple[dict[str, torch.Tensor], Any]:
        """Returns the state of both for a checkpoint: tensors by name, and the rest for JSON.

        Raises:
            ValueError: If a state_dict holds a type that no checkpoint can.
        """
        state = {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "rate": self._last,
        }
        return take_apart(state, "own")

    def load(self, tensors: Mapping[str, torch.Tensor], plain: Any) -> None:
        """Restores the state that `kept` returned.

        Raises:
            KeyError: If a tensor is missing.
            ValueError: If it is the state of another optimizer.
        """
        state = put_together(plain, tensors)
        if not isinstance(state, dict):
            raise ValueError("optimizer: the checkpoint holds nothing of an optimizer of one's own")
        self.optimizer.load_state_dict(state["optimizer"])
        for parameter, slots in self.optimizer.state.items():
            for slot, value in slots.items():
                # In the parameter's memory layout: kernels depend on it.
                if getattr(value, "shape", None) == parameter.shape and value.stride() != parameter.stride():
                    slots[slot] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        self._last = float(state["rate"])
