"""State of the user's process that `fit` restores at its end."""

import contextlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from trainer.config.beside import imports_kept
from trainer.host.here import folder_kept
from trainer.host.limits import cpus_kept
from trainer.host.startup import any_character
from trainer.train.components.operations import random_state_kept

_PRECISIONS = ("cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn", "mkldnn.matmul", "mkldnn.conv")
# Reader and setter; a switch that this version of torch lacks or can't read is left out.
_Switch = tuple[Callable[[], Any], Callable[[Any], object]]


def _attribute(thing: Any, name: str) -> _Switch:
    return lambda: getattr(thing, name), lambda value: setattr(thing, name, value)


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _set_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _set_handlers(before: list[logging.Handler]) -> None:
    logging.root.handlers[:] = before


def _set_current_gpu(number: int | None) -> None:
    if number is not None:
        torch.cuda.set_device(number)


def _switches() -> Sequence[_Switch]:
    backends = torch.backends
    return (
        (torch.get_num_threads, torch.set_num_threads),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_default_device, _set_default_device),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
        *(
            _attribute(backends.cudnn, name)
            for name in ("enabled", "benchmark", "benchmark_limit", "deterministic", "allow_tf32")
        ),
        (backends.cuda.cudnn_sdp_enabled, backends.cuda.enable_cudnn_sdp),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        _attribute(backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
        _attribute(backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
        # Since torch 2.9; after the two older switches above, which set some of these.
        *(
            _attribute(attrgetter(place)(backends), "fp32_precision")
            for place in _PRECISIONS
            if hasattr(backends, "fp32_precision")
        ),
        (np.geterr, lambda before: np.seterr(**before)),
        (lambda: torch.cuda.current_device() if torch.cuda.is_initialized() else None, _set_current_gpu),
        (lambda: dict(os.environ), _set_environment),
        (lambda: list(logging.root.handlers), _set_handlers),
        _attribute(logging.root, "level"),
        *(
            _attribute(module.config, "cache_size_limit")
            for module in [sys.modules.get("torch._dynamo")]
            if module is not None
        ),
    )


@contextlib.contextmanager
def _switches_kept() -> Iterator[None]:
    unknown = (AttributeError, RuntimeError, OSError, ValueError)
    with warnings.catch_warnings():
        kept = []
        for read, write in _switches():
            with warnings.catch_warnings(), contextlib.suppress(*unknown):
                warnings.simplefilter("ignore")
                kept.append((read, write, read()))
        try:
            yield
        finally:
            warnings.simplefilter("ignore")
            for read, write, before in kept:
                with contextlib.suppress(*unknown):
                    now: Any = contextlib  # differs from any value, if the switch can't be read now
                    with contextlib.suppress(*unknown):
                        now = read()
                    if now != before:
                        write(before)


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
def _gpu_randomness_kept() -> Iterator[None]:
    """Restores the random state of all GPUs; if CUDA was initialized meanwhile, seeds it by torch's seed."""
    before = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        if before is not None:
            torch.cuda.set_rng_state_all(before)
        elif torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(torch.initial_seed())


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
        if torch.get_default_device().type != "cpu":  # else not: a device context slows each call of torch
            entered.enter_context(torch.device("cpu"))
        yield


@contextlib.contextmanager
def process_state_kept() -> Iterator[None]:
    """Starts with default settings, and restores those of the process at the end.

    These are torch's switches, threads, random state, default dtype and device; the current folder,
    environment, search path, signal handlers, warning filters, root logger and CPUs.
    """
    with (
        any_character(),
        folder_kept(),
        imports_kept(),
        cpus_kept(),
        _handlers_kept(),
        _switches_kept(),
        _gpu_randomness_kept(),
        random_state_kept(),
        _nothing_around(),
    ):
        yield
