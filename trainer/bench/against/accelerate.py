"""Accelerate's Accelerator, in a loop of one's own."""

import time
from itertools import islice
from typing import Any

from trainer.bench.accumulation import Case, Recorded, Recorder
from trainer.bench.overhead import TinySteps


def accumulate(case: Case) -> Recorded:
    """The loop of its guide to gradient accumulation; the one for samples of variable size where they are."""
    accelerator = _accelerator(gradient_accumulation_steps=case.accumulation)
    return _by_tokens(accelerator, case) if case.tokens_vary else _by_micro_batches(accelerator, case)


def _by_micro_batches(accelerator: Any, case: Case) -> Recorded:
    recorded = Recorded(
        "all tokens valid: `with accelerator.accumulate(model)`, model, optimiser and loader prepared"
    )
    model, optimizer, loader = accelerator.prepare(recorded.model, Recorder(recorded), case.loader())
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(recorded.loss(model, *batch))
            optimizer.step()
            optimizer.zero_grad()
    return recorded


def _by_tokens(accelerator: Any, case: Case) -> Recorded:
    recorded = Recorded(
        "valid tokens vary: the loop that its guide gives for samples of variable size, which counts the "
        "tokens of each window itself and doesn't use accumulate()"
    )
    model, optimizer, loader = accelerator.prepare(recorded.model, Recorder(recorded), case.loader())
    batches = iter(loader)
    while window := list(islice(batches, case.accumulation)):
        tokens = sum((y != -100).sum() for _, y in window)
        tokens = accelerator.gather(tokens).sum().item()
        for x, y in window:
            loss = recorded.loss(model, x, y, "sum")
            # backward() divides by the accumulation, whatever the window holds.
            scale = case.accumulation * accelerator.num_processes / tokens
            accelerator.backward(loss * scale)
        optimizer.step()
        optimizer.zero_grad()
    return recorded


def _accelerator(**settings: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    # Both are shared by all Accelerators of a process; a second one would go on where the first stopped.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **settings)


def train_tiny(tiny: TinySteps) -> float:
    """Model and optimiser prepared, its own backward and clipping; returns seconds."""
    accelerator = _accelerator()
    model, optimizer = accelerator.prepare(tiny.model, tiny.optimizer)
    start = time.perf_counter()
    for step, (x, y) in enumerate(tiny.batches()):
        loss = tiny.loss(model, x, y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), tiny.clip)
        tiny.before(step)
        optimizer.step()
        optimizer.zero_grad()
        tiny.after(step)
    return time.perf_counter() - start
