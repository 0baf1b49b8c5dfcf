"""A model that compiles a part of itself, and a task that counts how often that runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.helpers.toys import TokenTask


class Compiled(nn.Module):
    """Compiles a part of itself, in one of the ways that there are."""

    def __init__(self, way: str, backend: Callable[..., Any]) -> None:
        super().__init__()
        self.way, self.backend = way, backend
        self.inner: Any = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
        self.later: Any = None
        if way == "module":
            self.inner = torch.compile(self.inner, backend=backend)
        elif way == "method":
            self.part = torch.compile(self.part, backend=backend)  # type: ignore[method-assign]

    def part(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "at first use" and self.later is None:
            self.later = torch.compile(self.part, backend=self.backend)
        y: torch.Tensor = (self.later or self.part)(x)
        return y


class CompiledTask(TokenTask):
    """Counts how often what it compiled runs, and keeps something of each loss."""

    def __init__(self, way: str) -> None:
        super().__init__(16, ragged=False, dtype=torch.float32)
        self.way, self.compiled, self.runs, self.asked = way, 0, 0, 0
        self.mean: Any = 0.0

    def backend(self, graph: Any, _: Any) -> Callable[..., Any]:
        self.compiled += 1

        def run(*values: Any) -> Any:
            self.runs += 1
            return graph(*values)

        return run

    def model(self) -> nn.Module:
        return Compiled(self.way, self.backend)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        self.asked += 1
        return loss
