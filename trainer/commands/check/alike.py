"""Random numbers that don't depend on how samples are divided, for an experiment of `trainer check`."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MASKS = ("bernoulli", "bernoulli_", "native_dropout")


class draws_alike(TorchDispatchMode):  # noqa: N801  (a context manager, as torch.no_grad)
    """Context in which a random operation gives one number everywhere, and dropout drops nothing.

    So two micro-batches draw what one with all their samples draws. A number that was drawn won't do: which
    one comes first depends on how many are drawn.
    """

    def __init__(self) -> None:
        """Counts from the first operation."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation; if it draws, its result gets one number everywhere."""
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return result
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        self._drawn += 1
        lowest = args[0] if name == "randint" and str(func).endswith(".low") else 0
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor):
                number = 0.5 + 0.25 / self._drawn if one.is_floating_point() else lowest
                one.fill_(1 if name in _MASKS else number)
        return result
