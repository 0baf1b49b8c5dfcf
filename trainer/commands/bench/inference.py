"""Latency and throughput of a trained model, over batch sizes and ways to run it."""

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.progress import track

from trainer.commands.bench.inference_ways import WAYS, Call, Unavailable, WayTiming, chosen_ways, make_way
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_NOT_MEASURED, BadInputError
from trainer.host.limits import read_limits, threads_per_rank
from trainer.models.export_formats import LIMITS, ModelTensors, leaves, relative_error
from trainer.observe.conditions import conditions
from trainer.train.components.task import device_kind
from trainer.train.model_of_run import OpenedRun, inputs_of, open_run, read_samples, some_samples

_ROUNDS = 5


def bench_inference(
    folder: Path,
    settings: Sequence[str],
    batches: str,
    seconds: float,
    ways: str,
    as_json: bool,
    trust: bool = False,
) -> int:
    """Measures latency and throughput of a run's model, and prints them.

    Args:
        folder: The run folder.
        settings: KEY=VALUE, where the data lies.
        batches: Batch sizes, separated by commas.
        seconds: For each way and batch size.
        ways: Names of `WAYS`, separated by commas; all if empty.
        as_json: Whether to print for machines.
        trust: As for `open_run`.

    Returns:
        0, 1 if a way computes something else than eager, 3 if there was nothing to measure.

    Raises:
        BadInputError: If the run can't be opened, or a way doesn't exist.
    """
    sizes, names = _sizes(batches), chosen_ways(ways)
    if not 0 < seconds < 3600:
        print("nothing measured: --seconds must be above 0")
        return EXIT_NOT_MEASURED
    run = open_run(folder, settings, trust=trust)
    threads = threads_per_rank(read_limits(), 1)
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads)
        with torch.no_grad():
            figures = [figure for size in sizes for figure in _at(run, size, names, seconds)]
    device = "GPU" if device_kind(run.recipe) == "cuda" else f"CPU, {threads} thread{'s' * (threads > 1)}"
    title = f"{run.folder.resolve().name}, {run.weights}, {device}"
    if as_json:
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
