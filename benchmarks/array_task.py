"""A task of arrays, of which only the model and the loss are left to say."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from trainer.data.batch import Batch
from trainer.data.dataset import ArrayDataset, Dataset


class ArrayTask:
    """Trained and evaluated on the same arrays.

    Args:
        arrays: By name, as many rows each as there are samples.
        evaluated: Number of samples that are evaluated; None: all.
    """

    uniforms = 0
    metric = "loss"
    lower_is_better = True

    def __init__(self, arrays: Mapping[str, np.ndarray[Any, Any]], evaluated: int | None = None) -> None:
        self.train_data: Dataset = ArrayDataset(dict(arrays))
        self.evaluation_data: Dataset = ArrayDataset({name: a[:evaluated] for name, a in arrays.items()})

    def describe(self) -> dict[str, Any]:
        """Nothing that anybody must know."""
        return {}

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """The loss, summed over the items of a micro-batch."""
        raise NotImplementedError

    def measure(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        """The loss."""
        return {"loss": self.loss(model, batch)}
