"""Promise: `--profile` shows the time by operator and module, and doesn't change the run."""

import gc
import gzip
import json
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.clock import Clock
from trainer.observe import phases, profile as profile_module
from trainer.observe.phases import PHASE_TIMER, Phase, enter_phase
from trainer.observe.profile import TRACE, Profile

pytestmark = pytest.mark.compat
CPU = torch.device("cpu")


class Slow(nn.Module):
    """Takes its time in the operators that it calls, forward and backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.ones(384, 384) * x.mean()
        for _ in range(6):
            wide = wide @ torch.ones(384, 384) / 384
        return x + wide.mean()


@pytest.fixture(autouse=True)
def fresh_phases() -> Iterator[None]:
    PHASE_TIMER.reset()
    PHASE_TIMER.on_device = None
    yield
    PHASE_TIMER.on_device = None


def train(model: nn.Module, profile: Profile | None, steps: int) -> list[float]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        enter_phase("data")
        x = torch.randn(2, 1, 12, 12)
        enter_phase("forward")
        loss = model(x).square().mean()
        enter_phase("backward")
        loss.backward()
        enter_phase("update")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        enter_phase("host")
        if profile is not None:
            profile.step_done(step + 1)
    return losses


def make_net() -> nn.Module:
    torch.manual_seed(1)
    blocks = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True))
    return nn.Sequential(OrderedDict(stem=nn.Conv2d(1, 4, 3), slow=Slow(), blocks=blocks))


def test_phases_and_modules_are_shown_and_the_run_stays_as_it_is(tmp_path: Path) -> None:
    heard: list[Phase] = []
    PHASE_TIMER.on_device = heard.append
    profile = Profile(tmp_path, model := make_net(), CPU, skip=2, warm_up=1, active=3)
    losses = train(model, profile, 9)
    text = profile.close()
    assert PHASE_TIMER.on_device == heard.append
    assert len(heard) == 9 * 5  # and it heard every mark
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    plain = make_net()
    assert train(plain, None, 9) == losses
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    events = json.loads(gzip.decompress((tmp_path / TRACE).read_bytes()))["traceEvents"]
    names = [event.get("name", "") for event in events if event.get("ph") == "X"]
    modules = ("stem", "slow", "blocks", "blocks.0", "blocks.1")
    shown = [f"phase/{phase}" for phase in ("data", "forward", "backward", "update")]
    for name in (*shown, *(f"module/{module}" for module in modules)):
        assert names.count(name) == 3, name
    assert len({name for name in names if name.startswith("ProfilerStep#")}) == 3
    operators, table, trace = text.split("\n\n")
    assert len(operators.splitlines()) == 21 and "aten::mm " in operators
    assert "module/" not in operators and "phase/" not in operators
    assert {row.split()[0]: row.split()[1] for row in table.splitlines()[1:]} == dict.fromkeys(modules, "3")
    assert trace.startswith(f"trace: {tmp_path / TRACE}")


def test_what_the_profiler_takes_is_no_phase_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To begin, to read it all and to write the trace: a second each, on a clock that nothing else moves."""
    clock = Clock()
    for module in (phases, profile_module):
        monkeypatch.setattr(module, "time", clock.time)
    monkeypatch.setattr(phases, "_now", clock.nanoseconds)

    def dear(function: Any) -> Any:
        return lambda self: (clock.move(1.0), function(self))[1]

    for name in ("_start", "_stop"):
        monkeypatch.setattr(Profile, name, dear(getattr(Profile, name)))
    PHASE_TIMER.reset()
    profile = Profile(tmp_path, model := make_net(), CPU, skip=2, warm_up=1, active=3)
    train(model, profile, 9)
    assert {phase: ns / 1e9 for phase, ns in PHASE_TIMER.read().items() if ns} == {"start": 2.0}
    assert PHASE_TIMER.count == 9 * 5  # and no mark is made that other ranks don't make


def test_it_does_nothing_outside_its_steps(tmp_path: Path) -> None:
    profile = Profile(tmp_path, nn.Linear(1, 1), CPU, skip=1 << 60)
    calls: list[str] = []
    gc.disable()  # its callbacks would be calls as well
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if "call" in event else None)
    try:
        for step in range(100):
            profile.step_done(step)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert calls == ["step_done"] * 100 + [test_it_does_nothing_outside_its_steps.__name__]  # setprofile
