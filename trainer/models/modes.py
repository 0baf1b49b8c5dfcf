"""Modes of a model's modules, training or evaluation: what a user set for a part stays as it was set."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

Modes = Sequence[tuple[nn.Module, bool]]


class Uninitialized(TorchFunctionMode):
    """A context that leaves weights as they are made: on the meta device nn.init does nothing, at length."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init" and "tensor" in kwargs:
            return kwargs["tensor"]
        return func(*args, **kwargs)


def modes_of(model: nn.Module) -> Modes:
    """Each module, outermost first, and whether it is in training mode."""
    return [(module, module.training) for module in model.modules()]


def put_back(modes: Modes) -> None:
    """Gives each module a mode that it had, by its own `train`, which may do more than set it."""
    for module, training in modes:
        if module.training != training:
            module.train(training)
    for module, training in modes:  # a module that several have got it from the last of them
        module.training = training


def begin_training(model: nn.Module) -> list[str]:
    """Puts a new model into training mode, but for parts that are in evaluation mode as `model()` gave them.

    Where all of it is (so `from_pretrained` gives it), nobody chose a part: then all of it trains.

    Returns:
        The names of these parts, the outermost only.
    """
    kept = {module for module, training in modes_of(model) if not training}
    model.train()
    if all(module in kept for module in model.modules()):
        return []
    put_back([(module, module.training and module not in kept) for module in model.modules()])
    whole = [name for name, module in model.named_modules() if kept.issuperset(module.modules())]
    return [name for name in whole if not any(name.startswith(f"{other}.") for other in whole)]


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """A context in which all of a model is in evaluation mode; after it each module has its own again."""
    modes = modes_of(model)
    model.eval()
    try:
        yield
    finally:
        put_back(modes)
