"""State of the user's process that `fit` sets, and undoes at its end.

Only that: what other threads, or the user's own code, set meanwhile stays. A switch is put back only if it
still has the value that the training gave it.
"""

import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch

from trainer.config.user_file import folders_closed
from trainer.data.items import state_kept
from trainer.host.allocator import CUBLAS_WORKSPACE
from trainer.host.here import folder_kept
from trainer.host.limits import cpus_kept
from trainer.host.startup import any_character
from trainer.models.compiling import CACHE_VARIABLE

_PRECISIONS = ("cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn", "mkldnn.matmul", "mkldnn.conv")
_VARIABLES = (CUBLAS_WORKSPACE[0], CACHE_VARIABLE, "LOGNAME")  # of the environment, which the training sets
# Reader and setter; a switch that this version of torch lacks or can't read is left out.
_Switch = tuple[Callable[[], Any], Callable[[Any], object]]


def _attribute(thing: Any, name: str) -> _Switch:
    return lambda: getattr(thing, name), lambda value: setattr(thing, name, value)


def _variable(name: str) -> _Switch:
    def write(value: str | None) -> None:
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value

    return lambda: os.environ.get(name), write


def _switches() -> Sequence[_Switch]:
    backends = torch.backends
    return (
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
        *(_attribute(backends.cudnn, name) for name in ("benchmark", "deterministic", "allow_tf32")),
        (backends.cuda.cudnn_sdp_enabled, backends.cuda.enable_cudnn_sdp),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        # Since torch 2.9; after the two older switches above, which set some of these.
        *(
            _attribute(attrgetter(place)(backends), "fp32_precision")
            for place in _PRECISIONS
            if hasattr(backends, "fp32_precision")
        ),
        *map(_variable, _VARIABLES),
        *(
            _attribute(module.config, "cache_size_limit")
            for module in [sys.modules.get("torch._dynamo")]
            if module is not None
        ),
    )


_UNKNOWN = (AttributeError, RuntimeError, OSError, ValueError)


def _value(read: Callable[[], Any]) -> Any:
    """Returns the value of a switch; the function itself, which no switch has, if it can't be read."""
    with warnings.catch_warnings(), contextlib.suppress(*_UNKNOWN):
        warnings.simplefilter("ignore")
        return read()
    return read


@contextlib.contextmanager
def switches_kept() -> Iterator[Callable[[], None]]:
    """Puts back, at its end, the switches that are set within.

    Yields:
        A function to call when they are set: what has another value in the end was set by somebody else, and
        stays.
    """
    before = [(read, write, _value(read)) for read, write in _switches()]
    ours = dict[Callable[[], Any], Any]()
    try:
        yield lambda: ours.update((read, _value(read)) for read, _, _ in before)
    finally:
        for read, write, value in before:
            now = _value(read)
            if value is not read and now != value and now == ours.get(read, now):
                with warnings.catch_warnings(), contextlib.suppress(*_UNKNOWN):
                    warnings.simplefilter("ignore")
                    write(value)


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restores signal handlers at the end, in the main thread, which alone may set them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)


@contextlib.contextmanager
def _own_thread_kept() -> Iterator[None]:
    """Restores what each thread has for itself: whether gradients are on, and the current GPU."""
    gradients = torch.is_grad_enabled()
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_grad_enabled(gradients)
        if gpu is not None:
            torch.cuda.set_device(gpu)


@contextlib.contextmanager
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


def _default_device() -> str:
    """Returns the kind of torch's default device."""
    try:
        return torch.get_default_device().type
    except AttributeError:  # after set_default_device(None), torch's way back to the CPU (to 2.9 at least)
        return "cpu"


@contextlib.contextmanager
def _nothing_around() -> Iterator[None]:
    """Switches gradients on, autocast off and the default device to CPU, whatever the caller's contexts."""
    with contextlib.ExitStack() as entered:
        if torch.is_inference_mode_enabled():
            entered.enter_context(torch.inference_mode(False))
        entered.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                entered.enter_context(torch.autocast(kind, enabled=False))
        if _default_device() != "cpu":  # else not: a device context slows each call of torch
            entered.enter_context(torch.device("cpu"))
        yield


@contextlib.contextmanager
def process_state_kept() -> Iterator[None]:
    """Starts with default settings, and undoes at the end what the training has set in this process.

    These are torch's random state and switches (`switches_kept`, of each attempt), what was put on
    `sys.path`, and the error handlers of the standard streams; of this thread also gradients, autocast, the
    current GPU, its CPUs, and signal handlers. The current folder, which a task may leave, is restored, too.
    """
    with state_kept():
        import rich.style  # noqa: F401  (it draws from random when it is imported)
    with (
        any_character(),
        folder_kept(),
        folders_closed(),
        cpus_kept(),
        _handlers_kept(),
        _own_thread_kept(),
        _randomness_kept(),
        _nothing_around(),
    ):
        yield
