"""`--profile`: a few steps under torch's profiler, or with NVTX ranges for Nsight Systems.

The trace opens in https://ui.perfetto.dev and chrome://tracing, and TensorBoard's profiler plugin takes it.
It has the phases of `trainer.observe.phases` and the calls of each module as ranges. See
https://docs.pytorch.org/docs/stable/profiler.html.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from trainer.host.files import own_folder, written_whole
from trainer.observe.phases import PHASE_TIMER, Phase
from trainer.observe.text import table

ProfileKind = Literal["torch", "nvtx"]

TRACE = Path("profile") / "rank0.pt.trace.json.gz"
_ROWS = 20
_MODULE, _PHASE, _STEP = "module/", "phase/", "ProfilerStep"


class Profile:
    """Profile of some steps of a run, after those that compile and warm up.

    Outside of them it does nothing. Within them the run is slower: the profile shows where time is spent, not
    absolute times.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        device: torch.device,
        *,
        kind: ProfileKind = "torch",
        skip: int = 5,
        warm_up: int = 2,
        active: int = 5,
        modules: bool = True,
    ) -> None:
        """Prepares the profile; records nothing yet.

        Args:
            model: The bare model, for the names of its modules.
            kind: "torch" writes a trace; "nvtx" leaves ranges for `nsys profile -c cudaProfilerApi`, and
                nothing where there is no CUDA.
            skip: First steps of this attempt, without the profiler.
            warm_up: Steps with the profiler whose events are discarded.
            active: Steps to record.
            modules: Whether modules get ranges; not if they are compiled, which would recompile them.
        """
        self._folder, self._model, self._device, self._kind = folder, model, device, kind
        self._begin, self._end = skip, skip + warm_up + active
        self._warm_up, self._active, self._modules = warm_up, active, modules
        self._done, self._text, self._frames = 0, "", _frames_compiled()
        self._ranges: _Ranges | None = None
        self._closing = contextlib.ExitStack()
        self._step: Callable[[], None] = lambda: None

    def step_done(self, done: int) -> None:  # noqa: ARG002  (counted from the start of the attempt)
        """Starts, continues or ends the profile; called between two steps."""
        self._done += 1
        if not self._begin <= self._done <= self._end:
            return
        with _not_counted():
            if self._ranges is not None:
                with self._ranges.apart():  # a step's range must not end inside one of ours
                    self._step()
            if self._done == self._begin:
                self._start()
            elif self._done == self._end:
                self._stop()

    def close(self) -> str:
        """Ends the profile, if the run ended first; returns its tables as text."""
        self._stop()
        if not self._text and self._kind == "torch":
            return f"--profile: the run ended before step {self._end} of this attempt: nothing was recorded"
        return self._text

    def _start(self) -> None:
        if self._kind == "nvtx" and self._device.type != "cuda":
            return
        if self._kind == "nvtx":
            torch.cuda.profiler.start()
            self._closing.callback(torch.cuda.profiler.stop)
            self._closing.enter_context(torch.autograd.profiler.emit_nvtx())
        else:
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            else:  # else it warns that there is no GPU
                os.environ.setdefault("KINETO_LOG_LEVEL", "5")
            profiler = profile(
                activities=activities,
                schedule=schedule(wait=0, warmup=self._warm_up, active=self._active, repeat=1),
                on_trace_ready=self._keep,
            )
            self._closing.enter_context(profiler)
            self._step = profiler.step
        # Hooks of modules would recompile parts that the model compiled itself.
        self._modules = self._modules and _frames_compiled() == self._frames
        self._ranges = self._closing.enter_context(_Ranges(self._model if self._modules else None))

    def _stop(self) -> None:
        self._closing.close()  # the ranges first
        self._ranges, self._step = None, lambda: None

    def _keep(self, profiler: profile) -> None:
        trace = self._folder / TRACE
        written = f"trace: {trace} (https://ui.perfetto.dev reads it)"
        try:
            own_folder(trace.parent)
            with written_whole(trace, lasting=False) as beside:
                profiler.export_chrome_trace(str(beside))
        except (OSError, RuntimeError) as error:
            written = f"no trace could be written to {trace}: {error}"
        self._text = f"{_tables(profiler, self._device.type)}\n\n{written}"


def _tables(profiler: profile, device: str) -> str:
    """Formats the operators with the most time of their own, and the modules by the time of their forward."""
    events = [event for event in profiler.key_averages() if not event.key.startswith((_PHASE, _STEP))]
    on_gpu = device == "cuda"
    own = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    whole = "device_time_total" if on_gpu else "cpu_time_total"
    kinds = (
        (f"operator, {device}", own, [event for event in events if not event.key.startswith(_MODULE)]),
        (f"module, forward, {device}", whole, [event for event in events if event.key.startswith(_MODULE)]),
    )
    tables = []
    for title, attribute, found in kinds:
        times = {event.key.removeprefix(_MODULE): (event.count, getattr(event, attribute)) for event in found}
        total = sum(us for _, us in times.values()) or 1.0
        most = sorted(times.items(), key=lambda item: -item[1][1])[:_ROWS]
        rows = [(name, f"{calls:,}", f"{us / 1e3:,.2f}", f"{us / total:.1%}") for name, (calls, us) in most]
        if rows:
            tables.append(table((title, "calls", "ms", "share"), rows))
    return "\n\n".join(tables)


def _frames_compiled() -> int:
    """Frames that dynamo has compiled in this process, without importing it."""
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return int(counters["frames"]["total"])


@contextlib.contextmanager
def _not_counted() -> Iterator[None]:
    """Counts the profiler's own time as phase "start", which no verdict is about.

    It puts no mark into the device's stream, as the other ranks put none here.
    """
    PHASE_TIMER.read()
    try:
        yield
    finally:
        now = time.perf_counter_ns()
        PHASE_TIMER.spent["start"] += now - PHASE_TIMER.since
        PHASE_TIMER.since = now


class _Ranges(contextlib.AbstractContextManager["_Ranges"]):
    """Ranges for the phases, by the marks of this thread, and for the calls of a model's modules."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._thread = threading.get_ident()
        self._calls = threading.local()  # backward, in a thread of its own, may compute modules again
        self._phase: record_function | None = None
        self._others: Callable[[Phase], None] | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> "_Ranges":
        for name, module in self._model.named_modules() if self._model is not None else ():
            if name:
                self._handles += [
                    module.register_forward_pre_hook(partial(self._enter, _MODULE + name)),
                    module.register_forward_hook(self._leave),
                ]
        self._others, PHASE_TIMER.on_device = PHASE_TIMER.on_device, self._mark
        self._open(PHASE_TIMER.phase)
        return self

    def __exit__(self, *_: object) -> None:
        PHASE_TIMER.on_device = self._others
        self._shut()
        for handle in self._handles:
            handle.remove()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Closes the phase's range for a moment."""
        self._shut()
        yield
        self._open(PHASE_TIMER.phase)

    def _mark(self, phase: Phase) -> None:
        if self._others is not None:
            self._others(phase)
        if threading.get_ident() == self._thread:
            self._shut()
            self._open(phase)

    def _open(self, phase: Phase) -> None:
        self._phase = record_function(_PHASE + phase)
        self._phase.__enter__()

    def _shut(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None

    def _enter(self, name: str, *_: object) -> None:
        if not hasattr(self._calls, "open"):
            self._calls.open = []
        call = record_function(name)
        call.__enter__()
        self._calls.open.append(call)

    def _leave(self, *_: object) -> None:
        self._calls.open.pop().__exit__(None, None, None)
