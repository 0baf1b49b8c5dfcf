"""Promise, on a GPU: no host synchronization in the loop, and the same results as on the CPU."""

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.gpu import GPU, MARKS
from tests.helpers.toys import make_recipe, rows_to
from trainer.checkpoint.store import newest_good, write
from trainer.data.loader import Source, make_loader
from trainer.distributed.parallel import World
from trainer.models.compiling import missing_for_compiling
from trainer.observe.checksums import Checksums, fingerprints_of
from trainer.train import loop
from trainer.train.components.run import build
from trainer.train.components.task import make_task
from trainer.train.loop import train
from trainer.train.state import Run, load_tensors, tensors_of
from trainer.train.step import train_step

pytestmark = MARKS

DATA = {"global_batch_size": 64, "micro_batch_size": 16, "augment": "affine"}
DIGITS: dict[str, Any] = {"max_steps": 30, "epochs": 2, "data": DATA, "log": {"every": 5}}
DIGITS |= {"model": {"width": 16, "dropout": 0.1}, "optim": {"lr": 0.01, "max_grad_norm": 1.0}}
DIGITS["ema"] = {"decay": 0.9}


def losses_on(device: torch.device, strict: bool, **sections: Any) -> list[float]:
    recipe = make_recipe(**{**DIGITS, **sections})
    run = build(recipe, make_task(recipe), World(0, 1, 0, device, None), workers=2)
    rows: list[Any] = []
    traced: list[Any] = []
    trace = Checksums(fingerprints_of(run.state.model), lambda _, prints: traced.append(prints))

    def strict_after_warm_up(done: int) -> None:
        if strict and done == 10:
            torch.cuda.set_sync_debug_mode("error")

    out = rows_to(run, rows.append, checksums=trace, each_step=[strict_after_warm_up])
    try:
        with mock.patch.object(loop, "next_evaluation", lambda *_: 0):
            train(run, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        run.close()
    return [row["loss"] for row in rows if row["kind"] == "train"]


@pytest.mark.parametrize("mode", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("resident", [True, False])
def test_the_loop_never_waits_for_the_gpu(mode: str, resident: bool) -> None:
    data = DATA | {"resident": resident, "workers": "auto" if resident else 2}
    losses = losses_on(GPU, strict=True, precision={"mode": mode}, data=data)
    assert len(losses) == 6 and all(math.isfinite(loss) for loss in losses)


PARTS: dict[str, dict[str, Any]] = {
    "muon": {"optim": {"name": "muon", "lr": 0.02, "layer_decay": 0.7}},
    "muon-fp16": {"optim": {"name": "muon", "lr": 0.02}, "precision": {"mode": "fp16"}},
    "wsd": {"optim": {"name": "sgd", "lr": 0.02, "schedule": "wsd"}, "ema": {"decay": 0.9, "every": 2}},
    "mixing": {"regularization": {"mixup": 0.2, "cutmix": 1.0, "stochastic_depth": 0.2}},
    "keep_fp32": {"precision": {"mode": "bf16", "keep_fp32": ["head", "*.norm*"]}},
    "debug": {"precision": {"mode": "fp16", "debug": True}},
    "checkpointing": {"memory": {"checkpointing": "blocks"}},
}


@pytest.mark.parametrize("part", PARTS)
def test_no_part_of_the_recipe_waits_either(part: str) -> None:
    losses = losses_on(GPU, strict=True, **PARTS[part])
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.skipif(missing_for_compiling(GPU) is not None, reason="nothing to compile with")
@pytest.mark.parametrize("micro_batch_size", [64, 16])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_compiled_and_replayed_graphs_learn_the_same(mode: str, micro_batch_size: int) -> None:
    """With accumulation, too: a replayed graph must not overwrite the gradients of the micro-batch before."""
    data = DATA | {"micro_batch_size": micro_batch_size}
    sections: dict[str, Any] = {"data": data, "model": {"width": 16}}
    torch._dynamo.reset()
    eager = losses_on(GPU, strict=False, **sections)
    compiled = losses_on(GPU, strict=False, compile={"mode": mode}, **sections)
    assert compiled == pytest.approx(eager, rel=1e-2)


@pytest.mark.parametrize("mode", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("cut", [1, 13, 29])
def test_a_deterministic_run_that_was_cut_has_the_same_bits(mode: str, cut: int, tmp_path: Path) -> None:
    sections = DIGITS | {"deterministic": True, "precision": {"mode": mode}, "parallel": {"threads": 1}}
    sections["regularization"] = {"mixup": 0.2, "stochastic_depth": 0.1}
    recipe = make_recipe(**sections)

    def fresh() -> Run:
        return build(recipe, make_task(recipe), World(0, 1, 0, GPU, None), 0)

    def steps(run: Run, numbers: range) -> None:
        source = Source(run.task.train_data, run.share, run.task.train_data.uniforms + run.task.uniforms)
        loader = make_loader(source, GPU, recipe.data, 2)
        batches = loader(run.share.batches(numbers.start))
        for step in numbers:
            train_step(run, batches, step)
        loader.close()

    whole, first, second = fresh(), fresh(), fresh()
    steps(whole, range(30))
    steps(first, range(cut))
    write(tmp_path, cut, tensors_of(first.state), {})
    found, skipped = newest_good(tmp_path)
    assert found is not None and not skipped
    load_tensors(second.state, cut, found.tensors)
    steps(second, range(cut, 30))
    ends = [tensors_of(run.state) for run in (whole, second)]
    for file, tensors in ends[0].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, ends[1][file][name]), f"{file}: {name}"


def test_gpu_and_cpu_agree() -> None:
    plain: dict[str, Any] = {"model": {"width": 16}}
    on_gpu = losses_on(GPU, strict=False, **plain)
    assert on_gpu == pytest.approx(losses_on(torch.device("cpu"), strict=False, **plain), rel=1e-2)


def test_fingerprints_are_those_of_the_cpu() -> None:
    convolution = torch.nn.Conv2d(3, 70, 5)
    model = torch.nn.Sequential(convolution, torch.nn.BatchNorm2d(70), torch.nn.Linear(300, 301))
    there = fingerprints_of(model.cuda())().tolist()
    assert there == fingerprints_of(model.cpu())().tolist()
    assert len(set(there)) > 5
