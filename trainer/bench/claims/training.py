"""Ablations of what a window does: precision, layout, compilation, memory, optimiser, reading values."""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.bench.claims.claim import Series
from trainer.bench.claims.measuring import (
    Ablation,
    Measurement,
    Scene,
    Side,
    Size,

    chosen,
    measure_windows,
)
from trainer.bench.overhead import by_trainer, interleaved
from trainer.config import override, read_recipe, validated
from trainer.limits import read_limits, threads_per_rank
from trainer.recipe import Recipe
from trainer.run import Parts, make_task
from trainer.step import Training

_ON_CPU = ("precision.mode=fp32", "model.channels_last=false", "model.name=small_resnet", "model.width=16")
_SMALL = ("data.image_size=32", "data.samples=256", "data.classes=10")
IMAGES = Scene(
    "resnet50-synthetic",
    (*_ON_CPU, *_SMALL, "data.global_batch=16", "data.micro_batch=16"),
    ("precision.mode=fp32", "model.channels_last=false", "data.global_batch=64", "data.micro_batch=64"),
)
_TEXT_ON_CPU = ("language.layers=4", "language.heads=4", "language.width=96", "language.vocabulary=512")
TEXT = Scene(
    "gpt2-124m",
    (
        *("data.name=synthetic", "precision.mode=fp32", "compile.mode=none", *_TEXT_ON_CPU),
        *("language.sequence_length=128", "data.global_batch=4", "data.micro_batch=4"),
    ),
    (
        *("data.name=synthetic", "precision.mode=bf16", "compile.mode=none"),
        *("data.global_batch=12", "data.micro_batch=12"),
    ),
)
_LOG_WINDOWS = 50


def _settings(**sides: Sequence[str]) -> dict[str, Side]:
    return {name.replace("_", " "): Side(tuple(settings)) for name, settings in sides.items()}


def _windows(scene: Scene, sides: dict[str, Side], memory: bool = False) -> Callable[..., Measurement]:
    def measure(wanted: Sequence[str], size: Size) -> Measurement:
        return measure_windows(scene, chosen(sides, wanted), size, memory=memory)

    return measure


def _accumulation(wanted: Sequence[str], size: Size) -> Measurement:
    values = override(read_recipe(TEXT.recipe), list(TEXT.settings))
    batch = values["data"]["global_batch"]
    sides = {
        "one micro-batch": Side(),
        "4 micro-batches": Side((f"data.micro_batch={batch // 4}",)),
    }
    return measure_windows(TEXT, chosen(sides, wanted), size, memory=True)


def _with_optimizer(foreach: bool, parts: Parts) -> None:
    """Puts torch's own AdamW in the fused one's place, with a rate that doesn't change."""
    training = parts.training
    groups: list[dict[str, Any]] = [
        {"params": group["params"], "weight_decay": group["weight_decay"]}
        for group in training.optimizer.param_groups
    ]
    betas = training.optimizer.param_groups[0]["betas"]
    training.optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=betas, foreach=foreach, fused=False)


def _keep_gradients(parts: Parts) -> None:
    """Gradients are set to zero after a window and stay, as with zero_grad(set_to_none=False)."""
    training = parts.training
    training.cuda_graphs = True  # for which it does just that
    for parameter in training.parameters:
        parameter.grad = torch.zeros_like(parameter)


def _read_loss(training: Training) -> float:
    return training.loss.item()


def _threads(wanted: Sequence[str], size: Size) -> Measurement:
    quota = threads_per_rank(read_limits(), 1)
    counts = {"1 thread": 1, "the quota": quota, "twice the quota": 2 * quota}
    sides = {name: Side((f"parallel.threads={count}",)) for name, count in counts.items()}
    on_cpu = Scene(IMAGES.recipe, (*IMAGES.cpu, "device=cpu"), (*IMAGES.cpu, "device=cpu"))
    return measure_windows(on_cpu, chosen(sides, wanted), size)


def _logging(wanted: Sequence[str], size: Size) -> Measurement:
    """The trainer's whole loop, with its files, a row of figures for each window or every 50."""
    sides = {"each window": 1, "every 50": _LOG_WINDOWS}
    with tempfile.TemporaryDirectory(dir=size.scratch) as name:
        loops, batch = [], 0
        for side in chosen(sides, wanted):
            length = ["epochs=1000000000", f"max_windows={_LOG_WINDOWS}", f"log.every={sides[side]}"]
            values = override(read_recipe(IMAGES.recipe), [*IMAGES.settings, *_LOGGED, *length])
            recipe = validated(Recipe, values, IMAGES.recipe)
            batch = recipe.data.global_batch
            loops.append(partial(by_trainer, make_task(recipe), recipe, Path(name)))
        threads = torch.get_num_threads()
        torch.set_num_threads(threads_per_rank(read_limits(), 1))
        seconds = interleaved(loops, size.rounds)
        torch.set_num_threads(threads)
    per_window = [[s / _LOG_WINDOWS * 1e3 for s in series] for series in seconds]
    series = Series(dict(zip(chosen(sides, wanted), per_window, strict=True)), "ms a window")
    return Measurement(
        f"{IMAGES.recipe}: small_resnet, {batch} images of 8 x 8 a window, on a CPU", {"time": series}
    )


# The loop that is timed is the overhead bench's, which knows CPUs alone; small, so that rows weigh something.
_LOGGED = (
    *(*_ON_CPU, "model.width=4", "device=cpu", "data.image_size=8", "data.samples=256"),
    *("data.classes=10", "data.global_batch=8", "data.micro_batch=8"),
)

_PRECISIONS = _settings(
    fp32=[], tf32=["precision.mode=tf32"], fp16=["precision.mode=fp16"], bf16=["precision.mode=bf16"]
)
TRAINING = {
    "precision": Ablation(_windows(IMAGES, _PRECISIONS, memory=True)),
    "cudnn": Ablation(
        _windows(IMAGES, _settings(heuristics=["cudnn_benchmark=false"], timed=["cudnn_benchmark=true"])),
        ("cuda",),
    ),
    "layout": Ablation(
        _windows(
            IMAGES,
            _settings(NCHW=["model.channels_last=false"], NHWC=["model.channels_last=true"]),
        )
    ),
    "compile": Ablation(
        _windows(
            TEXT,
            {
                name: Side((f"compile.mode={name}",))
                for name in ("none", "default", "reduce-overhead", "max-autotune")
            },
        ),
        ("compiler",),
        120.0,
        quick=False,
    ),
    "accumulation": Ablation(_accumulation),
    "checkpointing": Ablation(
        _windows(
            TEXT,
            _settings(
                none=["memory.checkpointing=none"],
                some=["memory.checkpointing=blocks", "memory.every=2"],
                all=["memory.checkpointing=blocks", "memory.every=1"],
            ),
            memory=True,
        )
    ),
    "optimizer": Ablation(
        _windows(
            TEXT,
            {
                "for-loop": Side(prepare=partial(_with_optimizer, False)),
                "foreach": Side(prepare=partial(_with_optimizer, True)),
                "fused": Side(),
            },
        )
    ),
    "gradients": Ablation(
        _windows(TEXT, {"zeros": Side(prepare=_keep_gradients), "None": Side()}, memory=True)
    ),
    "item": Ablation(_windows(IMAGES, {"read": Side(each=_read_loss), "not read": Side()})),
    "logging": Ablation(_logging),
    "threads": Ablation(_threads, ("2 CPUs",)),
}

