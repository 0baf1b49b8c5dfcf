"""Latency and throughput of a trained model, over batch sizes and ways to run it."""

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import track
from torch import nn

from benchmarks.conditions import conditions
from benchmarks.options import picked
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_NOT_MEASURED, BadInputError
from trainer.host.latest import run_path
from trainer.host.limits import read_limits, threads_per_rank
from trainer.models.compiling import missing_for_compiling
from trainer.models.export_formats import (
    INSTALL_ONNX,
    LIMITS,
    ModelTensors,
    exported_program,
    leaves,
    missing_packages,
    quiet,
    relative_error,
    write_onnx,
)
from trainer.runs.flags import add_settings, add_task
from trainer.train.components.task import device_kind
from trainer.train.model_of_run import OpenedRun, inputs_of, open_run, read_samples, some_samples

_ROUNDS = 5

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
    """Traces a model by TorchScript and freezes its weights as constants, which also folds BatchNorm."""
    call: Call = torch.jit.freeze(torch.jit.trace(model, tuple(inputs), check_trace=False))
    return call


def _fused(model: nn.Module, inputs: ModelTensors) -> Call:
    if inputs[0].device.type != "cpu":
        raise Unavailable("oneDNN is for CPUs")
    if not torch.backends.mkldnn.is_available():
        raise Unavailable("this torch was built without oneDNN")
    return _frozen(model, inputs)


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


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    bench.add_argument("folder", type=run_path, metavar="RUN", help="run folder, or latest")
    bench.add_argument("--batches", default="1,8,64", metavar="LIST", help="batch sizes (default: 1,8,64)")
    bench.add_argument(
        "--seconds", type=float, default=2.0, metavar="S", help="for each way and batch size (default: 2)"
    )
    bench.add_argument("--ways", default="", metavar="LIST", help="which to measure (default: all)")
    bench.add_argument("--json", action="store_true", help="print JSON")
    add_settings(bench, "where the data lies now")
    add_task(bench)
    bench.set_defaults(run=bench_inference)


def bench_inference(options: argparse.Namespace) -> int:
    """Measures latency and throughput of a run's model, and prints them.

    Returns:
        0, 1 if a way computes something else than eager, 3 if there was nothing to measure.

    Raises:
        BadInputError: If the run can't be opened, or a way doesn't exist.
    """
    sizes, seconds = _sizes(options.batches), options.seconds
    names = list(dict.fromkeys(["eager", *(picked(options.ways, WAYS, "--ways", "way") or WAYS)]))
    if not 0 < seconds < 3600:
        print("nothing measured: --seconds must be above 0")
        return EXIT_NOT_MEASURED
    run = open_run(options.folder, options.set)
    threads = threads_per_rank(read_limits(), 1)
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads)
        with torch.no_grad():
            figures = [figure for size in sizes for figure in _at(run, size, names, seconds)]
    device = "GPU" if device_kind(run.recipe) == "cuda" else f"CPU, {threads} thread{'s' * (threads > 1)}"
    title = f"{run.folder.resolve().name}, {run.weights}, {device}"
    if options.json:
        print(
            json.dumps({"conditions": conditions(), "what": title, "figures": [f._asdict() for f in figures]})
        )
    else:
        print(f"{conditions()}\n{title}: {_ROUNDS} interleaved rounds, {seconds:g} s for each way and batch")
        print(_table(figures))
    return EXIT_FAILED if any(figure.why.startswith("WRONG") for figure in figures) else EXIT_DONE


def _sizes(batches: str) -> list[int]:
    try:
        sizes = [int(word) for word in batches.split(",")]
    except ValueError as error:
        raise BadInputError(f"--batches {batches}: give numbers such as 1,8,64") from error
    if min(sizes) < 1 or max(sizes) > 1 << 16:
        raise BadInputError(f"--batches {batches}: give numbers from 1 to 65536")
    return list(dict.fromkeys(sizes))


def _at(run: OpenedRun, batch: int, names: Sequence[str], seconds: float) -> list[WayTiming]:
    """Prepares the ways for a batch size, compares their outputs with eager's, and times them in turn."""
    device = torch.device(device_kind(run.recipe))
    model = run.model.to(device)
    dataset = run.task.evaluation_data
    try:
        batches = read_samples(dataset, some_samples(dataset, batch))
        inputs: ModelTensors = [value.to(device) for value in inputs_of(run, batches)]
        wanted = leaves(model(*inputs))
    except (MemoryError, RuntimeError) as error:  # too large a batch; the smaller ones were measured
        why = f"can't ({(str(error).splitlines() or ['out of memory'])[0][:120]})"
        return [WayTiming(name, batch, why) for name in names]
    calls, errors, figures = dict[str, Call](), dict[str, float](), dict[str, WayTiming]()
    for name in track(names, f"batch {batch}: making ready", transient=True):
        try:
            call = make_way(name, model, inputs)
            errors[name] = relative_error(wanted, leaves(call(*inputs)))
        except Unavailable as reason:
            figures[name] = WayTiming(name, batch, str(reason))
            continue
        if not errors[name] <= LIMITS["bf16" if WAYS[name].low else "fp32"]:
            figures[name] = WayTiming(name, batch, f"WRONG: differs from eager by {errors[name]:.1e}")
            continue
        calls[name] = call
    latencies = _interleaved(calls, inputs, seconds)
    for name, series in latencies.items():
        ordered = sorted(series)
        figures[name] = WayTiming(
            name,
            batch,
            calls=len(ordered),
            p50=statistics.median(ordered),
            p99=ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
            samples_per_s=batch * len(ordered) / sum(ordered),
            error=errors[name],
        )
    return [figures[name] for name in names]


def _interleaved(calls: dict[str, Call], inputs: ModelTensors, seconds: float) -> dict[str, list[float]]:
    """Measures the latencies of each way, in seconds: in rounds, each beginning with another way."""
    names = list(calls)
    latencies: dict[str, list[float]] = {name: [] for name in names}
    if not names:
        return latencies
    for number in track(range(_ROUNDS), "measuring", transient=True):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            call = calls[name]
            call(*inputs)  # another way had the caches
            _wait(inputs)
            until = time.perf_counter() + seconds / _ROUNDS
            while True:
                began = time.perf_counter()
                call(*inputs)
                _wait(inputs)
                ended = time.perf_counter()
                latencies[name].append(ended - began)
                if ended >= until:
                    break
    return latencies


def _wait(inputs: ModelTensors) -> None:
    if inputs[0].device.type == "cuda":
        torch.cuda.synchronize(inputs[0].device)


def _table(figures: Sequence[WayTiming]) -> str:
    rows = [
        "| way | batch | p50 ms | p99 ms | samples/s | of eager | error |",
        "|---|---|---|---|---|---|---|",
    ]
    eager = {figure.batch: figure.samples_per_s for figure in figures if figure.way == "eager"}
    for figure in figures:
        if figure.why:
            rows.append(f"| {figure.way} | {figure.batch} | {figure.why.replace('|', '/')} | | | | |")
            continue
        rows.append(
            f"| {figure.way} | {figure.batch} | {figure.p50 * 1e3:.3f} | {figure.p99 * 1e3:.3f} | "
            f"{figure.samples_per_s:,.0f} | {_of_eager(figure, eager)} | "
            f"{figure.error:.0e} |"
        )
    return "\n".join(rows)


def _of_eager(figure: WayTiming, eager: Mapping[int, float]) -> str:
    base = eager.get(figure.batch)
    return f"{figure.samples_per_s / base:.2f} x" if base else ""
