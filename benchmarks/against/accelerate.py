"""Accelerate's Accelerator, in a hand-written loop."""

import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.accumulation import Case, Recorded, Recorder
from benchmarks.cut_run import BATCHES, EPOCHS, Resumed, Steps, augment, optimized, shuffled, small_model
from benchmarks.overhead import TinySteps


def accumulate(case: Case) -> list[Recorded]:
    """Runs both loops of its guide to gradient accumulation: `accumulate()`, and that for variable sizes."""
    return [
        loop(_accelerator(gradient_accumulation_steps=case.accumulation), case)
        for loop in (_by_micro_batches, _by_tokens)
    ]


def _by_micro_batches(accelerator: Any, case: Case) -> Recorded:
    recorded = Recorded(
        "`with accelerator.accumulate(model)`, model, optimizer and loader prepared", variant="accumulate()"
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
        "the loop that its guide gives for samples of variable size, which counts the tokens of each step "
        "itself and doesn't use accumulate()",
        variant="tokens counted in the loop",
    )
    model, optimizer, loader = accelerator.prepare(recorded.model, Recorder(recorded), case.loader())
    batches = iter(loader)
    while step := list(islice(batches, case.accumulation)):
        tokens = sum((y != -100).sum() for _, y in step)
        tokens = accelerator.gather(tokens).sum().item()
        for x, y in step:
            loss = recorded.loss(model, x, y, "sum")
            # backward() divides by the accumulation, whatever the step holds.
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
    """Model and optimizer prepared, its own backward and clipping; returns seconds."""
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


def resume(cut: int) -> list[Resumed]:
    """`save_state` and `load_state`, then the loader with its first batches skipped."""
    way = (
        "the same set_seed() in both runs, DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0), "
        "all prepared, save_state() after the cut; load_state(), set_epoch(), and in the epoch of the cut "
        "skip_first_batches()"
    )
    # It reads a batch ahead, and a loader without a generator draws from the global one when it begins: where
    # the augmentation draws, and what the loader is given, may matter.
    return [
        _resumed(cut, True, False, "augmented as read", f"{way}; the data set augments"),
        _resumed(cut, False, False, "augmented in the loop", f"{way}; the loop augments"),
        _resumed(
            cut,
            False,
            True,
            "augmented in the loop, DataLoader(generator)",
            f"{way}; the loop augments, and the DataLoader is given a generator",
        ),
    ]


def _resumed(cut: int, as_read: bool, generator: bool, variant: str, way: str) -> Resumed:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = _train(folder, 0, cut, as_read, generator)
        return Resumed(whole, _train(folder, cut, 0, as_read, generator), way, variant)


def _train(folder: Path, start: int, cut: int, as_read: bool, generator: bool) -> Steps:
    """Trains from an update, 0 or that of the state in the folder; saves after update `cut`."""
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(0)
    settings = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    accelerator = _accelerator(dataloader_config=settings)
    model = small_model()
    optimizer, scheduler = optimized(model)
    loader = shuffled(as_read, torch.Generator().manual_seed(0) if generator else None)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if start:
        accelerator.load_state(folder)
    steps, done = Steps(), start
    first, skipped = divmod(start, BATCHES)
    model.train()
    for epoch in range(first, EPOCHS):
        loader.set_epoch(epoch)
        skip = skipped if epoch == first else 0
        batches = accelerator.skip_first_batches(loader, skip) if skip else loader
        batches.set_epoch(epoch)
        for index, x, y in batches:
            loss: torch.Tensor = F.cross_entropy(model(x if as_read else augment(x)), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            steps.add(index, loss)
            done += 1
            if done == cut:
                accelerator.save_state(folder)
    steps.end(model)
    return steps
