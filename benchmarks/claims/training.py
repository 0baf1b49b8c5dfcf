"""Ablations of what a step does: precision, layout, compilation, memory, optimizer, reading values."""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.claims.claim import Series
from benchmarks.claims.measuring import Ablation, Measurement, Scene, Side, Size, chosen, measure_steps
from benchmarks.overhead import TinyTask, by_trainer, tiny_recipe
from benchmarks.paired import interleaved
from trainer.config.recipe_file import override, read_recipe
from trainer.host.limits import read_limits, threads_per_rank
from trainer.train.reduction import FixedGradients
from trainer.train.state import Run

_IMAGES_ON_CPU = (
    "precision.mode=fp32 model.channels_last=false model.name=small_resnet model.width=16 data.image_size=32 "
    "data.samples=256 data.classes=10 data.global_batch_size=16 data.micro_batch_size=16"
)
_IMAGES = "precision.mode=fp32 model.channels_last=false data.global_batch_size=64 data.micro_batch_size=64"
_TEXT_ON_CPU = (
    "data.name=synthetic precision.mode=fp32 compile.mode=none language.layers=4 language.heads=4 "
    "language.width=96 language.vocabulary=512 language.sequence_length=128 data.global_batch_size=4 "
    "data.micro_batch_size=4"
)
_TEXT = (
    "data.name=synthetic precision.mode=bf16 compile.mode=none data.global_batch_size=12 "
    "data.micro_batch_size=12"
)
IMAGES = Scene("resnet50-synthetic", _IMAGES_ON_CPU.split(), _IMAGES.split())
TEXT = Scene("gpt2-124m", _TEXT_ON_CPU.split(), _TEXT.split())
_LOG_STEPS = 200


def _settings(**sides: str) -> dict[str, Side]:
    return {name: Side(tuple(settings.split())) for name, settings in sides.items()}


def _steps(scene: Scene, sides: dict[str, Side], memory: bool = False) -> Callable[..., Measurement]:
    def measure(wanted: Sequence[str], size: Size) -> Measurement:
        return measure_steps(scene, chosen(sides, wanted), size, memory=memory)

    return measure


def _accumulation(wanted: Sequence[str], size: Size) -> Measurement:
    values = override(read_recipe(TEXT.recipe), list(TEXT.settings))
    batch = values["data"]["global_batch_size"]
    sides = {"one micro-batch": Side(), "4 micro-batches": Side((f"data.micro_batch_size={batch // 4}",))}
    return measure_steps(TEXT, chosen(sides, wanted), size, memory=True)


def _with_optimizer(foreach: bool, run: Run) -> None:
    """Puts torch's own AdamW in the fused one's place, with a rate that doesn't change."""
    state = run.state
    groups: list[dict[str, Any]] = [
        {"params": group["params"], "weight_decay": group["weight_decay"]}
        for group in state.optimizer.param_groups
    ]
    betas = state.optimizer.param_groups[0]["betas"]
    state.optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=betas, foreach=foreach, fused=False)


def _keep_gradients(run: Run) -> None:
    """Gradients are set to zero after a step and stay, as with zero_grad(set_to_none=False)."""
    object.__setattr__(run, "gradients", FixedGradients(run.state.model))  # as it does for CUDA graphs


def _read_loss(run: Run) -> float:
    return run.state.loss.item()


def _threads(wanted: Sequence[str], size: Size) -> Measurement:
    quota = threads_per_rank(read_limits(), 1)
    counts = {"1 thread": 1, "the quota": quota, "twice the quota": 2 * quota}
    sides = {name: Side((f"parallel.threads={count}",)) for name, count in counts.items()}
    on_cpu = Scene(IMAGES.recipe, *[[*IMAGES.cpu, "device=cpu"]] * 2)
    return measure_steps(on_cpu, chosen(sides, wanted), size)


def _logging(wanted: Sequence[str], size: Size) -> Measurement:
    """The trainer's whole loop, with its files, a row of metrics for each step or every 50."""
    recipe, task = tiny_recipe(_LOG_STEPS), TinyTask()
    sides = {"each step": 1, "every 50": 50}
    with tempfile.TemporaryDirectory(dir=size.scratch) as name:
        loops = []
        for every in chosen(sides, wanted).values():
            side = recipe.model_copy(update={"log": recipe.log.model_copy(update={"every": every})})
            loops.append(partial(by_trainer, task, side, Path(name)))
        seconds = interleaved(loops, size.rounds, shown=False)
    per_step = [[s / _LOG_STEPS * 1e6 for s in series] for series in seconds]
    series = Series(dict(zip(chosen(sides, wanted), per_step, strict=True)), "us a step")
    return Measurement(
        "the smallest step there is, of `python -m benchmarks overhead`, on a CPU", {"time": series}
    )


_PRECISIONS = _settings(
    fp32="", tf32="precision.mode=tf32", fp16="precision.mode=fp16", bf16="precision.mode=bf16"
)
_CUDNN = _settings(heuristics="cudnn_benchmark=false", timed="cudnn_benchmark=true")
_LAYOUTS = _settings(NCHW="model.channels_last=false", NHWC="model.channels_last=true")
_CHECKPOINTING = _settings(
    none="memory.checkpointing=none",
    some="memory.checkpointing=blocks memory.every=2",
    all="memory.checkpointing=blocks memory.every=1",
)
_MODES = ("none", "default", "reduce-overhead", "max-autotune")
_COMPILED = {name: Side((f"compile.mode={name}",)) for name in _MODES}
_OPTIMIZERS = {
    "for-loop": Side(prepare=partial(_with_optimizer, False)),
    "foreach": Side(prepare=partial(_with_optimizer, True)),
    "fused": Side(),
}
TRAINING = {
    "precision": Ablation(_steps(IMAGES, _PRECISIONS, memory=True)),
    "cudnn": Ablation(_steps(IMAGES, _CUDNN), ("cuda",)),
    "layout": Ablation(_steps(IMAGES, _LAYOUTS)),
    "compile": Ablation(_steps(TEXT, _COMPILED), ("compiler",), 120.0, quick=False),
    "accumulation": Ablation(_accumulation),
    "checkpointing": Ablation(_steps(TEXT, _CHECKPOINTING, memory=True)),
    "optimizer": Ablation(_steps(TEXT, _OPTIMIZERS)),
    "gradients": Ablation(
        _steps(TEXT, {"zeros": Side(prepare=_keep_gradients), "None": Side()}, memory=True)
    ),
    "item": Ablation(_steps(IMAGES, {"read": Side(each=_read_loss), "not read": Side()})),
    "logging": Ablation(_logging),
    "threads": Ablation(_threads, ("2 CPUs",)),
}
