"""Common parts of the tests of counts: the steps of the smallest task, and what is counted in each."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import overhead
from trainer.observe.machine import Machine

# Of torch, whose operators' own work is part of what is counted: exact counts hold for this one.
_COUNTED_WITH = "2.9."
# What they write is what they read, moved or converted: a pass over memory that a leaner step would spare.
_COPIES = {
    *("copy_", "_foreach_copy_", "_to_copy", "clone", "cat", "stack", "index", "index_select", "gather"),
    *("repeat", "flip", "roll", "constant_pad_nd"),
}
# The size or the course of what follows depends on values, so the host waits until a device has them.
_WAITS = {
    *("_local_scalar_dense", "nonzero", "equal", "masked_select", "bincount"),
    *("_unique2", "unique_dim", "unique_consecutive", "repeat_interleave"),
}
# Of a tensor: on a CPU these reach memory without an operator, elsewhere they wait.
_READS = {"item", "tolist", "cpu", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__"}


@contextlib.contextmanager
def counting(seen: Counter[str]) -> Iterator[None]:
    """Counts operators as `aten.…`, bytes copied as `copied aten.…`, and what would wait as `waits …`."""
    with _Operators(seen), _Reads(seen):
        yield


def of(seen: Counter[str], kind: str) -> dict[str, int]:
    """The counts of a kind: what `counting` calls it, up to its first dot or space."""
    return {name: count for name, count in seen.items() if name.startswith(kind)}


class _Operators(TorchDispatchMode):
    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        space, name = str(function).split(".")[:2]
        if space == "aten":
            self._seen[str(function)] += 1
            if name in _WAITS or (name in ("index", "index_put_") and _by_mask(args[1])):
                self._seen[f"waits {function}"] += 1
            if name in _COPIES:
                written = args[0] if out is None else out
                self._seen[f"copied {function}"] += sum(one.nbytes for one in tree_leaves(written))
        return out


class _Reads(TorchFunctionMode):
    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        to_host = name == "to" and any(str(word) == "cpu" for word in (*args[1:], *(kwargs or {}).values()))
        if name in _READS or to_host:
            self._seen[f"waits Tensor.{name}"] += 1
        return function(*args, **(kwargs or {}))


def _by_mask(indices: Any) -> bool:
    return any(one.dtype in (torch.bool, torch.uint8) for one in indices if one is not None)


def skip_with_another_torch() -> None:
    """Skips exact counts on another torch; called after the checks that hold for every torch."""
    if not torch.__version__.startswith(_COUNTED_WITH):
        pytest.skip(f"counted with torch {_COUNTED_WITH}x, this is {torch.__version__}")


def tiny_steps(folder: Path, steps: int, done: Callable[[int], None], log_every: int = 50) -> None:
    """Trains the task of `python -m benchmarks overhead` by the whole loop; `done` is told of each step."""
    recipe = overhead.tiny_recipe(steps)
    recipe = recipe.model_copy(update={"log": recipe.log.model_copy(update={"every": log_every})})
    # The machine is watched by the clock, in a thread: neither may be in what is counted.
    with mock.patch.object(Machine, "_watch", lambda _: None):
        overhead.by_trainer(overhead.TinyTask(), recipe, folder, done)


def tiny_steps_by_hand(steps: int, done: Callable[[int], None]) -> None:
    """Trains the same task by the loop that one would write; `done` as above."""

    def cos(angle: float) -> float:  # of the learning rate, once a step
        done(round(angle * steps / math.pi))
        return math.cos(angle)

    with mock.patch.dict(overhead.by_hand.__globals__, math=SimpleNamespace(cos=cos, pi=math.pi)):
        overhead.by_hand(overhead.TinyTask(), overhead.tiny_recipe(steps).optim, steps)
