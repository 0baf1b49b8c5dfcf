"""Collectives of a run, by one rank: with gloo on a CPU, with NCCL and gloo on a GPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.helpers.steps import go, saved
from tests.helpers.toys import make_recipe
from trainer.checkpoint.background import BackgroundWriter
from trainer.checkpoint.store import newest_good
from trainer.distributed.parallel import World, check_agreement, gather_rows, joined_world, words_of_ranks
from trainer.train.components.run import build
from trainer.train.components.task import make_task
from trainer.train.evaluate import evaluate_run
from trainer.train.saving import Checkpoints
from trainer.train.state import Run, load_tensors, tensors_of
from trainer.train.step import take_metrics

STEPS = 4
DIGITS: dict[str, Any] = {"max_steps": STEPS, "data": {"global_batch_size": 32, "micro_batch_size": 16}}
DIGITS |= {"model": {"width": 8}, "optim": {"lr": 0.01, "max_grad_norm": 1.0}}
# Of a recipe, and how near its losses are to those of a rank without a group.
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "ddp": ({}, 1e-4),
    "ddp-bf16": ({"parallel": {"threads": 1, "compress": "bf16"}}, 3e-2),
    "ddp-unused": ({"parallel": {"threads": 1, "find_unused_parameters": True}}, 1e-4),
    "ddp-fp16": ({"precision": {"mode": "fp16"}}, 1e-3),
    "sync-batchnorm": ({"parallel": {"threads": 1, "sync_batchnorm": True}}, 1e-4),
    "tree": ({"parallel": {"threads": 1, "reduction": "tree"}}, 1e-4),
    "fsdp": ({"parallel": {"threads": 1, "strategy": "fsdp"}}, 1e-4),
    "fsdp-average": ({"parallel": {"threads": 1, "strategy": "fsdp"}, "ema": {"decay": 0.9}}, 1e-4),
}


class Life(NamedTuple):
    """Results of a run: its losses, figures, gathered record, and its state read back."""

    losses: list[float]
    figures: dict[str, float]
    restored: bool


@contextmanager
def one_rank(device: torch.device) -> Iterator[World]:
    """Joins a world of one as ranks of a run join theirs: with a group, and one of gloo for CPU tensors."""
    store = TCPStore("127.0.0.1", 0, 1, is_master=True)
    original = dist.init_process_group

    def join(backend: str, **given: Any) -> None:
        original(backend, **{**given, "world_size": 1})

    with pytest.MonkeyPatch.context() as patch:
        names = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": device.index or 0, "MASTER_PORT": store.port}
        for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
            names[name] = int(os.environ.get(name, "2000"))
        for name, value in {**names, "MASTER_ADDR": "127.0.0.1"}.items():
            patch.setenv(name, str(value))
        patch.setattr(dist, "init_process_group", join)
        with joined_world("cuda" if device.type == "cuda" else "cpu", 120, store) as world:
            yield replace(world, size=1)


def steps_of(world: World, sections: dict[str, Any]) -> tuple[Run, list[float]]:
    """Trains; the losses of each step."""
    recipe = make_recipe(**DIGITS | sections)
    run = build(recipe, make_task(recipe), world, 0)
    return run, go(run, range(STEPS))


def life_of(world: World, way: str, folder: Path) -> Life:
    """Trains, writes a row, measures, saves, and reads it back into a new run."""
    sections, _ = WAYS[way]
    run, losses = steps_of(world, sections)
    take_metrics(run)
    gathered = gather_rows(world, torch.arange(3, dtype=torch.float64))
    assert gathered.device.type == world.device.type and gathered.tolist() == [[0.0, 1.0, 2.0]]
    check_agreement("the same", world)
    assert words_of_ranks("a word", world) == ["a word"]
    figures, _ = evaluate_run(run)
    run.state.step = STEPS
    writer = BackgroundWriter(folder, 2, pytest.fail)
    checkpoints = Checkpoints(run, writer)
    checkpoints.save()
    before = saved(run)
    assert checkpoints.newest() == STEPS
    checkpoints.close()
    found, skipped = newest_good(folder)
    assert found is not None and not skipped
    recipe = make_recipe(**DIGITS | sections)
    again = build(recipe, make_task(recipe), world, 0)
    load_tensors(again.state, STEPS, found.tensors)
    now = tensors_of(again.state)
    same = all(torch.equal(t, now[kind][name]) for kind, group in before.items() for name, t in group.items())
    run.close()
    again.close()
    return Life(losses, figures, same)


def check_life(device: torch.device, way: str, folder: Path) -> None:
    """Compares a life in a group with one without."""
    alone, losses = steps_of(World(0, 1, 0, device, None), {**WAYS[way][0], "parallel": {"threads": 1}})
    figures, _ = evaluate_run(alone)
    alone.close()
    with one_rank(device) as world:
        life = life_of(world, way, folder)
    near = WAYS[way][1]
    assert life.losses == pytest.approx(losses, rel=near)
    assert life.figures == pytest.approx(figures, rel=max(near, 1e-3), abs=0.03)
    assert life.restored


def check_abort(device: torch.device) -> None:
    """Leaves a group in the middle of a collective, and joins another one."""
    for error in (RuntimeError("as if a kernel had failed"), None):
        try:
            with one_rank(device) as world:
                work = dist.all_reduce(torch.ones(4, device=device), group=world.group, async_op=True)
                if error is not None:
                    raise error
                work.wait()
        except RuntimeError as left:
            assert left is error
        assert not dist.is_initialized()
