"""Training and evaluation mode of modules, which keeps the user's choice for single modules."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from trainer.models.unfinished import ends_at_exit

Modes = Sequence[tuple[nn.Module, bool]]


class Uninitialized(TorchFunctionMode):
    """A context that skips torch.nn.init: on the meta device it takes time and has no effect."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init" and "tensor" in kwargs:
            return kwargs["tensor"]
        return func(*args, **kwargs)


def modes_of(model: nn.Module) -> Modes:
    """Returns each module, outermost first, and its `training` flag."""
    return [(module, module.training) for module in model.modules()]


def put_back(modes: Modes) -> None:
    """Restores each module's mode by its own `train`, which may have side effects."""
    for module, training in modes:
        if module.training != training:
            module.train(training)
    for module, training in modes:  # `train` of a container has set its children, too
        module.training = training


def begin_training(model: nn.Module) -> list[str]:
    """Puts a new model into training mode, except for modules that `model()` returned in evaluation mode.

    A model that is in evaluation mode as a whole, as `from_pretrained` returns it, trains as a whole.

    Returns:
        Names of the modules that stay in evaluation mode, only the outermost.
    """
    ends_at_exit()
    kept = {module for module, training in modes_of(model) if not training}
    model.train()
    if all(module in kept for module in model.modules()):
        return []
    put_back([(module, module.training and module not in kept) for module in model.modules()])
    whole = [name for name, module in model.named_modules() if kept.issuperset(module.modules())]
    return [name for name in whole if not any(name.startswith(f"{other}.") for other in whole)]


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """A context in which all modules are in evaluation mode; their own modes are restored after it."""
    modes = modes_of(model)
    model.eval()
    try:
        yield
    finally:
        put_back(modes)
