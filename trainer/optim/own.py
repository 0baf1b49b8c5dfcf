"""Updates by the user's own optimizer or scheduler, whose state_dict a checkpoint keeps.

They live on the host. So where an update may be skipped the host waits for the device to know, which the
optimizers and schedules of `optimizers` needn't.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from trainer.checkpoint.state_dict import put_together, take_apart
from trainer.rng import Purpose, key


class Scheduler(Protocol):
    """Scheduler like those of torch.optim.lr_scheduler: sets the rates of the optimizer that it was given."""

    def step(self) -> object:
        """Sets the rates for the next update."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the scheduler's state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Takes what it kept."""
        ...


class ConstantSchedule:
    """Constant rates, for `make_optimizer` where a user's scheduler sets them."""

    def __init__(self, rate: float) -> None:
        """Takes the constant rate."""
        self.current = rate

    def of(self, factor: float) -> float:
        """The rate times a factor."""
        return self.current * factor


class HostSchedule:
    """Learning rates of an optimizer, set on the host by the user's scheduler, or constant.

    It stands in the place of `optimizers.LRScheduler`, and knows what else a checkpoint must keep.

    Attributes:
        optimizer: Whose rates these are.
        updates: int64 (1,), on the device: updates so far; stands still when one is skipped.
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
        """Begins before the first update.

        Args:
            scheduler: Called after each update, or None.
            device: Where the weights are.
            seed: Of the run.
            generators: What an optimizer may draw from: seeded by the update, alike on all ranks.
            own: Whether the optimizer is the user's, which needn't support skipped updates.
        """
        self.optimizer, self._scheduler, self._device = optimizer, scheduler, device
        self.updates = torch.zeros(1, dtype=torch.int64, device=device)
        self._done, self._last = 0, self._rate()
        if own:
            # Whoever skips an update asks the device itself, whatever this class promises: torch's fused SGD
            # uses memory that nobody wrote if it is told to skip the first one.
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]

            def seeded(*_: Any) -> None:
                for generator in generators:
                    generator.manual_seed(key(seed, Purpose.UPDATE, self._done) >> 2)

            optimizer.register_step_pre_hook(seeded)

    def _rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def last_update(self) -> Any:
        """Returns the update after which its scheduler has no rate any more (OneCycleLR), if it has one."""
        return getattr(self._scheduler, "total_steps", None)

    def look_up(self) -> None:
        """Reads how many updates there were."""
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
        """The rate of the first group in the update that was made last or skipped, float64 ()."""
        return torch.tensor(self._last, dtype=torch.float64, device=self._device)

    def kept(self) -> tuple[dict[str, torch.Tensor], Any]:
        """Returns the state of both for a checkpoint: tensors by name, and the rest for JSON.

        Raises:
            ValueError: If a state_dict holds what no checkpoint can.
        """
        state = {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "rate": self._last,
        }
        return take_apart(state, "own")

    def load(self, tensors: Mapping[str, torch.Tensor], plain: Any) -> None:
        """Takes what `kept` gave.

        Raises:
            KeyError: If a part is missing.
            ValueError: If it is of another optimizer.
        """
        state = put_together(plain, tensors)
        if not isinstance(state, dict):
            raise ValueError("optimizer: the checkpoint holds nothing of an optimizer of one's own")
        self.optimizer.load_state_dict(state["optimizer"])
        for parameter, slots in self.optimizer.state.items():
            for slot, value in slots.items():
                # As it lay before: kernels go another way where the layouts differ.
                if getattr(value, "shape", None) == parameter.shape and value.stride() != parameter.stride():
                    slots[slot] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        self._last = float(state["rate"])
