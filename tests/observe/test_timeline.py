"""Promise: a run's time is split into phases, by the host's clock and the device's events, over all ranks."""

import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, strategies as st

from tests.helpers.clock import Clock
from tests.helpers.toys import TokenTask, build_alone, make_recipe, rows_to
from trainer.data.batch import Batch
from trainer.observe import advice, log, phases, timeline
from trainer.observe.advice import host_clock
from trainer.observe.flops import Count, peak_flops
from trainer.observe.phases import PHASE_TIMER, PHASES, Phase, enter_phase
from trainer.observe.timeline import OF_DEVICE, DeviceTimeline, DeviceTimes, clock_reading, split_between
from trainer.train import loop
from trainer.train.components.operations import count_operations
from trainer.train.loop import train

CPU = torch.device("cpu")
NAP, TICK = 0.004, 0.001


class Slow(TokenTask):
    """Its model, and the gradient of its model, move the clock."""

    def __init__(self, clock: Clock, forward: float = 0.0, backward: float = 0.0) -> None:
        super().__init__(48, ragged=False)
        self._clock, self._naps = clock, (forward, backward)

    def loss(self, model: Any, batch: Batch) -> torch.Tensor:
        loss = super().loss(model, batch)
        self._clock.move(self._naps[0])
        if loss.requires_grad:
            loss.register_hook(lambda _: (self._clock.move(self._naps[1]), None)[1])
        return loss


def rows_of(task: Any, nap: Callable[[str], object]) -> list[dict[str, Any]]:
    """Trains 12 steps of two micro-batches; the rows of metrics. `nap` is called in each phase."""
    recipe = make_recipe(epochs=3, data={"global_batch_size": 8, "micro_batch_size": 4}, log={"every": 4})
    run = build_alone(recipe, task)
    rows: list[Any] = []
    PHASE_TIMER.reset()
    out = rows_to(run, rows.append)
    load, step, saved = run.loader, run.state.optimizer.step, out.checkpoints.due

    def batches(wanted: range) -> Iterator[Batch]:
        for batch in load(wanted):
            nap("data")
            yield batch

    def update(*arguments: Any, **named: Any) -> Any:
        nap("update")
        return step(*arguments, **named)

    def evaluate(_: Any) -> tuple[dict[str, float], bool]:
        nap("evaluation")
        return {}, False

    def due(done: int) -> bool:
        enter_phase("checkpoint")
        nap("checkpoint")
        return saved(done)

    object.__setattr__(run, "loader", batches)
    run.state.optimizer.step = update  # type: ignore[method-assign]
    with (
        mock.patch.object(out.checkpoints, "due", due),
        mock.patch.object(loop, "next_evaluation", lambda _recipe, _plan, done: done + 1),
        mock.patch.object(loop, "evaluate_run", evaluate),
    ):
        train(run, out, until=12)
    rows.append({"kind": "train", **out.logger.rest()})
    return [row for row in rows if row["kind"] == "train"]


# How often each of them happens in a step.
TIMES = {"data": 2, "forward": 2, "backward": 2, "update": 1, "evaluation": 1, "checkpoint": 1}


@pytest.mark.parametrize("phase", list(TIMES))
def test_time_is_found_where_it_was_spent(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the nanosecond: the clock moves in one phase alone, and by a tick in each update."""
    clock = Clock()
    monkeypatch.setattr(phases, "_now", clock.nanoseconds)
    for module in (phases, timeline, log):
        monkeypatch.setattr(module, "time", clock.time)
    model = {phase: NAP} if phase in ("forward", "backward") else {}

    def nap(name: str) -> None:
        clock.move(NAP * (name == phase) + TICK * (name == "update"))

    rows = rows_of(Slow(clock, **model), nap)
    assert len(rows) == 13
    expected = dict.fromkeys((*PHASES, "unexplained"), 0.0)
    expected["update"] = 12 * TICK
    expected[phase] += 12 * TIMES[phase] * NAP
    assert {name: sum(row[f"time/{name}"] for row in rows) for name in expected} == pytest.approx(expected)
    assert sum(row["time/wall"] for row in rows) == pytest.approx(sum(expected.values()))


class Box:
    """A host and a device that does what it is told one after another; nothing here takes real time."""

    def __init__(self) -> None:
        self.now = self.free_at = 0.0

    def launch(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.now) + seconds

    def event(self) -> "Event":
        return Event(self)


class Event:
    def __init__(self, clock: Box) -> None:
        self._clock, self.at = clock, 0.0

    def record(self) -> None:
        self.at = max(self._clock.free_at, self._clock.now)

    def query(self) -> bool:
        return self._clock.now >= self.at

    def elapsed_time(self, end_event: Any) -> float:
        return float(end_event.at - self.at) * 1e3


def test_a_device_that_waits_for_data_says_so() -> None:
    clock, work = Box(), {"forward": 0.010, "backward": 0.020, "update": 0.002}
    marks = DeviceTimeline(clock.event, first=0)
    for step in range(1, 17):
        PHASE_TIMER.step = step
        for phase in ("data", "host", "forward", "backward", "update", "logging"):
            marks(phase)
            clock.now += 0.050 if phase == "data" else 10e-6
            if phase in work:
                clock.launch(work[phase])
    clock.now = clock.free_at
    split = marks.read()
    assert split.steps == 4
    assert split.seconds["data"] / 4 == pytest.approx(0.050 - 0.032, rel=0.02)
    assert split.seconds["backward"] / 4 == pytest.approx(0.020, rel=0.02)


def test_steps_that_are_not_over_yet_are_read_later() -> None:
    clock = Box()
    marks = DeviceTimeline(clock.event, every=1, first=0)
    for step in (1, 2):
        PHASE_TIMER.step = step
        for phase in ("data", "forward", "logging"):
            marks(phase)
            clock.launch(1.0 if phase == "forward" else 0.0)
    clock.now = 1.5
    nothing: dict[Phase, float] = dict.fromkeys(OF_DEVICE, 0.0)
    assert marks.read() == DeviceTimes({**nothing, "forward": 1.0}, 1, 0, nothing)
    clock.now = 2.5
    assert marks.read().seconds["forward"] == 1.0
    assert marks.read().steps == 0


def test_the_first_steps_explain_themselves_alone() -> None:
    """Loading cuDNN and compiling take seconds of the first steps: of those, and of no others."""
    clock, start, log_every = Box(), 0.0, 4
    marks, rows = DeviceTimeline(clock.event), list[dict[str, float]]()
    PHASE_TIMER.reset()
    host = clock_reading(0)
    for step in range(1, 101):
        PHASE_TIMER.step = step
        for phase in ("data", "forward", "backward", "update", "logging"):
            marks(phase)
            clock.now += 10e-6
            if phase == "forward":
                clock.now += {1: 30.0, 2: 5.0}.get(step, 0.0)
            if phase != "logging":
                clock.launch(0.010)
        if step % log_every == 0:
            clock.now = clock.free_at
            begin, end = (host._replace(wall=wall) for wall in (start, clock.now))
            begin, end = begin._replace(step=step - log_every), end._replace(step=step)
            rows.append(split_between(begin, end, marks.read()))
            start = clock.now
    forward, backward, unexplained = (
        sum(row[f"time/{name}"] for row in rows) for name in ("forward", "backward", "unexplained")
    )
    assert forward == pytest.approx(35.0 + len(rows) * log_every * 0.010, rel=0.02)
    assert backward == pytest.approx(len(rows) * log_every * 0.010, rel=0.1)
    assert unexplained < 0.01 * start


def test_what_a_device_says_replaces_what_the_host_says() -> None:
    PHASE_TIMER.reset()
    start = clock_reading(0)._replace(wall=0.0)
    host = {**start.host, "backward": start.host["backward"] + 0.5, "evaluation": 2.0}
    end = start._replace(wall=10.0, host=host, step=8)
    seconds: dict[Phase, float] = dict.fromkeys(OF_DEVICE, 0.0)
    seconds |= {"data": 0.5, "forward": 0.5, "backward": 0.9}
    metrics = split_between(start, end, DeviceTimes(seconds, 2, 1))
    assert metrics["time/backward"] == pytest.approx(3.6)
    assert metrics["time/evaluation"] == pytest.approx(2.0, abs=1e-3)
    assert metrics["time/unexplained"] == pytest.approx(10 - 4 * 1.9 - 2.0, abs=1e-3)
    assert metrics["gpu/caught_up"] == 0.5
    # Slower steps happened to be sampled: no more is explained than there was.
    slow = split_between(start, end._replace(wall=5.0), DeviceTimes(seconds, 2, 1))
    assert slow["time/unexplained"] == pytest.approx(0.0, abs=1e-9)
    assert slow["time/backward"] / slow["time/data"] == pytest.approx(1.8)


OWN = [phase for phase in PHASES if phase != "communication"]
ONE_RANK = st.lists(st.floats(0, 100), min_size=len(PHASES), max_size=len(PHASES))


@given(st.lists(ONE_RANK, min_size=2, max_size=5), st.integers(0, 4), st.sampled_from(OWN))
def test_the_slowest_rank_is_named_with_its_phase(seconds: list[list[float]], rank: int, phase: str) -> None:
    rank %= len(seconds)
    seconds[rank][PHASES.index(phase)] += 10_000.0
    found = timeline.straggler(seconds, wall=20_000.0)
    assert (found["slow_rank"], found["slow_phase"]) == (rank, phase)
    assert 0.4 < float(found["slow_excess"]) < 0.6


# Per sample 5 tokens through 3 x 6 and 6 x 4, a multiplication and an addition each; backward twice that, but
# for the gradient of the input, which nobody wants.
OPERATIONS = 5 * 2 * (3 * 6 + 6 * 4) + 5 * 2 * (3 * 6 + 2 * 6 * 4)


@pytest.mark.compat
@pytest.mark.parametrize("device", [CPU, torch.device("cuda")])
def test_operations_are_those_of_the_matrix_products(device: torch.device) -> None:
    """Of a GPU with shapes alone."""
    task = TokenTask(48, ragged=False, dtype=torch.float32)
    assert count_operations(task, task.model(), 4, device) == Count(OPERATIONS, "")


class Waits(TokenTask):
    """Its model asks for a value in each step."""

    def model(self) -> torch.nn.Module:
        model = super().model()
        model.register_forward_hook(lambda _, __, y: y * (y.max().item() < 1e9))  # the line that is named
        return model


@pytest.mark.compat
@pytest.mark.parametrize("device", [CPU, torch.device("cuda")])
def test_who_waits_for_the_device_is_named_with_its_line(device: torch.device) -> None:
    task = Waits(48, ragged=False, dtype=torch.float32)
    count = count_operations(task, task.model(), 4, device)
    file, _, number = count.waits.rpartition(":")
    assert file == __file__
    assert "the line that is named" in open(file).read().splitlines()[int(number) - 1]  # noqa: PTH123, SIM115
    assert count.per_sample == OPERATIONS  # where shapes alone don't do, a few samples


@pytest.mark.parametrize(
    ("bf16", "names"),
    [
        (989.5, ["NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB"]),
        (312, ["NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB", "NVIDIA A100 80GB PCIe"]),
        # Cut down, of a laptop, a slice, or without bf16: no figure, not a wrong one.
        (0, ["NVIDIA GeForce RTX 4090 D", "NVIDIA RTX A1000 Laptop GPU", "NVIDIA A100X", "NVIDIA L20"]),
        (0, ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "GRID A100-40C", "Some other", "", "Tesla T4"]),
    ],
)
def test_the_peak_of_a_gpu_is_that_of_its_whole_name(bf16: float, names: list[str]) -> None:
    assert [peak_flops(name, "bf16") for name in names] == [bf16 * 1e12 or None] * len(names)


def test_the_garbage_collector_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock moves by a second each time that it is looked at: before a collection, and after it."""
    clock = Clock()

    def look() -> float:
        clock.move(1.0)
        return clock()

    monkeypatch.setattr(advice, "time", SimpleNamespace(perf_counter=look))
    gc.disable()
    PHASE_TIMER.reset()
    try:
        with host_clock() as take:
            gc.collect(0)  # the start's own
            assert take()["time/gc"] == 0
            enter_phase("forward")
            for collections in (2, 0, 1):
                for _ in range(collections):
                    gc.collect(0)  # all that the tests before have left needn't be looked through
                assert take()["time/gc"] == collections
    finally:
        gc.enable()
    assert not any("host_clock" in getattr(one, "__qualname__", "") for one in gc.callbacks)
