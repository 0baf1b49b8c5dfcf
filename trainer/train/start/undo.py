"""What `fit` sets in the user's process, and undoes at its end; what others set there meanwhile stays."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from operator import attrgetter
from typing import Any

import torch

from trainer.config.user_file import folders_closed
from trainer.data.items import state_kept
from trainer.errors import BadInputError
from trainer.host.allocator import CUBLAS_WORKSPACE
from trainer.host.startup import any_character
from trainer.models.compiling import CACHE_VARIABLE

Switch = tuple[Callable[[], Any], Callable[[Any], object]]  # how it is read and written
_UNKNOWN = (AttributeError, KeyError, RuntimeError, OSError, ValueError)


def _attribute(place: str) -> Switch:
    module, _, name = place.rpartition(".")
    owner = attrgetter(module)
    return lambda: getattr(owner(torch), name), lambda value: setattr(owner(torch), name, value)


def _variable(name: str) -> Switch:
    return lambda: os.environ.get(
        name
    ), lambda value: os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def _gpu() -> int:
    if not torch.cuda.is_initialized():
        raise RuntimeError
    return torch.cuda.current_device()


_SWITCHES: tuple[Switch, ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _attribute("utils.deterministic.fill_uninitialized_memory"),
    _attribute("backends.cudnn.benchmark"),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _attribute("backends.cudnn.allow_tf32"),
    # Since torch 2.9; both switches above set some of these, and can't be read where the user has set them.
    *(
        _attribute(f"backends.{one}.fp32_precision")
        for one in ("cuda.matmul", "mkldnn.matmul", "cudnn.conv", "cudnn.rnn")
    ),
    *map(_variable, (CUBLAS_WORKSPACE[0], CACHE_VARIABLE, "LOGNAME")),
    (
        lambda: sys.modules["torch._dynamo"].config.cache_size_limit,  # slow to import
        lambda value: setattr(sys.modules["torch._dynamo"].config, "cache_size_limit", value),
    ),
    (_gpu, torch.cuda.set_device),
)


def _value(read: Callable[[], Any]) -> Any:
    """Returns the value of a switch; the function itself if this version of torch can't tell it."""
    with warnings.catch_warnings(), suppress(*_UNKNOWN):
        warnings.simplefilter("ignore")
        return read()
    return read


@contextmanager
def switches_kept() -> Iterator[Callable[[], None]]:
    """Context manager that puts back, at its end, the switches that are set within.

    Yields:
        A function to call when they are set: what has another value in the end was set by somebody else, and
        stays.
    """
    before = [_value(read) for read, _ in _SWITCHES]
    ours = list[Any]()
    try:
        yield lambda: ours.extend(_value(read) for read, _ in _SWITCHES)
    finally:
        for number, (read, write) in enumerate(_SWITCHES):
            now = _value(read)
            if before[number] not in (read, now) and now == (ours[number] if ours else now):
                with warnings.catch_warnings(), suppress(*_UNKNOWN):
                    warnings.simplefilter("ignore")
                    write(before[number])


@contextmanager
def undone() -> Iterator[None]:
    """Context manager of `fit`: begins with default settings, and undoes what the training sets.

    These are torch's random state, what users' files have put on `sys.path`, and error handlers of the
    standard streams; `switches_kept` undoes the rest.

    Raises:
        BadInputError: If torch's default dtype isn't float32.
    """
    if (dtype := torch.get_default_dtype()) != torch.float32:
        raise BadInputError(
            f"torch's default dtype is {dtype}, which models would be made in: call "
            "torch.set_default_dtype(torch.float32) before"
        )
    with state_kept():
        import rich.style  # noqa: F401  (it draws from random when it is imported)
    with any_character(), folders_closed(), _randomness_kept(), _nothing_around():
        yield


@contextmanager
def _randomness_kept() -> Iterator[None]:
    """Restores torch's random state, which the training seeds; if CUDA is new, seeds it by torch's seed."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        with torch.random.fork_rng([]):
            yield
    finally:
        if gpus is not None:
            torch.cuda.set_rng_state_all(gpus)
        elif torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(torch.initial_seed())


@contextmanager
def _nothing_around() -> Iterator[None]:
    """Switches gradients on, autocast off and the default device to CPU, whatever the caller's contexts."""
    with ExitStack() as entered:
        if torch.is_inference_mode_enabled():
            entered.enter_context(torch.inference_mode(False))
        entered.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                # Autocast within another one would keep casts of weights that were updated since.
                entered.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
        with suppress(AttributeError):  # after set_default_device(None), torch's way back to the CPU
            if torch.get_default_device().type != "cpu":  # else not: it slows each call of torch
                entered.enter_context(torch.device("cpu"))
        yield
