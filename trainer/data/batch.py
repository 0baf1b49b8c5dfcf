"""A micro-batch, as a task's methods get it."""

from collections.abc import KeysView, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True, eq=False, init=False)
class Batch:
    """One micro-batch on its device; `batch["x"]` is its field x, and `len(batch)` the number of its samples.

    Attributes:
        fields: A tensor (micro_batch_size, *shape) for each field of the data set.
        weight: float32 (micro_batch_size,), 0 for padding; None if batches are never padded.
        uniform: float32 (micro_batch_size, n) in [0, 1), keyed by sample and epoch, for the augmentation;
            None if none was requested.
        num_items: Samples or valid tokens that the loss of this micro-batch is a sum over.
        longest: Most items, or greatest length, of a sample; a host number, as `num_items`. 0: unknown.
    """

    fields: Mapping[str, torch.Tensor]
    weight: torch.Tensor | None
    uniform: torch.Tensor | None
    num_items: int
    longest: int = 0

    __iter__: ClassVar[None] = None  # `x, y = batch` would give the fields' names

    def __init__(
        self,
        fields: Mapping[str, torch.Tensor],
        weight: torch.Tensor | None,
        uniform: torch.Tensor | None,
        num_items: int,
        longest: int = 0,
    ) -> None:
        """Takes the attributes; the __init__ of a frozen dataclass costs twice as much."""
        # A literal is faster than the five calls of a frozen dataclass's own __init__.
        object.__setattr__(
            self,
            "__dict__",
            {
                "fields": fields,
                "weight": weight,
                "uniform": uniform,
                "num_items": num_items,
                "longest": longest,
            },
        )

    def __getitem__(self, name: str) -> torch.Tensor:
        """Returns a field, (micro_batch_size, ...)."""
        try:
            return self.fields[name]
        except KeyError:
            raise KeyError(f"no field {name!r}; the fields are {', '.join(map(repr, self.fields))}") from None

    def __contains__(self, name: object) -> bool:
        """True if there is a field of this name."""
        return name in self.fields

    def __len__(self) -> int:
        """Returns the number of samples; padding counts."""
        for values in self.fields.values():
            return len(values)
        return 0

    def keys(self) -> KeysView[str]:
        """Returns the names of the fields, so that `model(**batch)` works."""
        return self.fields.keys()
