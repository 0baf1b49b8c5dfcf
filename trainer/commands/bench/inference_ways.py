"""Ways to run a trained model: each makes a call that takes the model's inputs and returns its outputs."""

import copy
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from trainer.config.suggest import nearest
from trainer.errors import BadInputError
from trainer.models.compiling import missing_for_compiling
from trainer.models.export_formats import (
    INSTALL_ONNX,
    ModelTensors,
    exported_program,
    frozen_trace,
    missing_packages,
    quiet,
    write_onnx,
)

Call = Callable[..., Any]


class Unavailable(Exception):  # noqa: N818  (the outcome of a request)
    """Raised where a way can't be used on this machine; the text says why."""


class Way(NamedTuple):
    """A way to run a model.

    Attributes:
        make: Takes the model, in evaluation mode on its device, and example inputs, and returns the call;
            raises `Unavailable`, or an error of torch.
        fused: Whether oneDNN's fusion of whole graphs is switched on during a call.
        low: Whether it computes in bfloat16.
    """

    make: Callable[[nn.Module, ModelTensors], Call]
    fused: bool = False
    low: bool = False


class WayTiming(NamedTuple):
    """Measurements of one way at one batch size.

    Attributes:
        way: Its name.
        batch: Samples of a call.
        why: Why nothing was measured; "" where something was.
        calls: Number of timed calls.
        p50: Median latency in seconds.
        p99: 99th percentile of the latency, in seconds.
        samples_per_s: Samples over the sum of the latencies: one call after another.
        error: Relative error against eager.
    """

    way: str
    batch: int
    why: str = ""
    calls: int = 0
    p50: float = 0.0
    p99: float = 0.0
    samples_per_s: float = 0.0
    error: float = 0.0


def _eager(model: nn.Module, _: ModelTensors) -> Call:
    return model


def _channels_last(model: nn.Module, inputs: ModelTensors) -> Call:
    if not any(value.ndim == 4 and value.is_floating_point() for value in inputs):
        raise Unavailable("the model takes no images")
    model = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def call(*values: torch.Tensor) -> Any:
        images = (v.contiguous(memory_format=torch.channels_last) if v.ndim == 4 else v for v in values)
        return model(*images)

    return call


def _bf16(model: nn.Module, inputs: ModelTensors) -> Call:
    device = inputs[0].device
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8:
        raise Unavailable("this GPU has no bfloat16")

    def call(*values: torch.Tensor) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            return model(*values)

    return call


def _compiled(mode: str, model: nn.Module, inputs: ModelTensors) -> Call:
    device = inputs[0].device
    if mode == "reduce-overhead" and device.type == "cpu":
        raise Unavailable("a CPU has no CUDA graphs: the same as compiled")
    if missing := missing_for_compiling(device):
        raise Unavailable(missing)
    import torch._dynamo

    torch._dynamo.reset()
    call: Call = torch.compile(copy.deepcopy(model), mode=mode, dynamic=False)
    if mode != "reduce-overhead":
        return call
    # A graph's next replay overwrites its outputs.
    return lambda *values: [value.clone() for value in _tensors(call(*values))]


def _tensors(output: Any) -> list[torch.Tensor]:
    return [output] if isinstance(output, torch.Tensor) else list(output)


def _frozen(model: nn.Module, inputs: ModelTensors) -> Call:
    return frozen_trace(model, inputs)


def _fused(model: nn.Module, inputs: ModelTensors) -> Call:
    if inputs[0].device.type != "cpu":
        raise Unavailable("oneDNN is for CPUs")
    if not torch.backends.mkldnn.is_available():
        raise Unavailable("this torch was built without oneDNN")
    return frozen_trace(model, inputs)


def _exported(model: nn.Module, inputs: ModelTensors) -> Call:
    call: Call = exported_program(model, inputs).module()
    return call


def _onnx(model: nn.Module, inputs: ModelTensors) -> Call:
    if inputs[0].device.type != "cpu":
        raise Unavailable("only on CPUs here")
    if missing := missing_packages("onnx", "onnxscript", "onnxruntime"):
        raise Unavailable(f"needs {missing}: {INSTALL_ONNX}")
    from trainer.models.onnx_session import onnx_session

    with tempfile.TemporaryDirectory(prefix="trainer-bench-") as folder:
        run = onnx_session(write_onnx(model, inputs, Path(folder)), torch.get_num_threads())
    return lambda *values: [torch.from_numpy(one) for one in run(*(value.numpy() for value in values))]


WAYS: dict[str, Way] = {
    "eager": Way(_eager),
    "channels_last": Way(_channels_last),
    "bf16": Way(_bf16, low=True),
    "compiled": Way(partial(_compiled, "default")),
    "reduce-overhead": Way(partial(_compiled, "reduce-overhead")),
    "frozen": Way(_frozen),
    "onednn": Way(_fused, fused=True),
    "torch-export": Way(_exported),
    "onnx": Way(_onnx),
}


def chosen_ways(names: str) -> list[str]:
    """Returns the ways that a list names, eager first; all if it is empty.

    Raises:
        BadInputError: If there is no such way.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(WAYS)
    for name in wanted:
        if name not in WAYS:
            raise BadInputError(
                f"--ways: no way '{name}'{nearest(name, list(WAYS))} (there are: {', '.join(WAYS)})"
            )
    return list(dict.fromkeys(["eager", *wanted]))


def make_way(name: str, model: nn.Module, inputs: Sequence[torch.Tensor]) -> Call:
    """Makes a way ready to be timed: its first calls, which compile, are done.

    Raises:
        Unavailable: If it can't be used on this machine, with the reason.
    """
    way = WAYS[name]
    try:
        with quiet():
            call = switched(way.make(model, inputs), way.fused)
            for _ in range(3):  # a profiling executor is ready after two; CUDA graphs are recorded in them
                call(*inputs)
    except Unavailable:
        raise
    except Exception as error:  # whatever the model's code leads torch to
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise Unavailable(f"torch can't ({first[:120]})") from error
    return call


def switched(call: Call, fused: bool) -> Call:
    """Wraps a call in oneDNN's graph fusion if `fused`: a switch of the whole process, off between calls."""
    if not fused:
        return call

    def on(*values: torch.Tensor) -> Any:
        torch.jit.enable_onednn_fusion(True)
        try:
            return call(*values)
        finally:
            torch.jit.enable_onednn_fusion(False)

    return on
