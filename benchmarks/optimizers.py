"""Accuracy of each optimizer after the same number of updates: the trainer's own, and LAMB for comparison.

Each gets the same number of learning rates to choose from, on one seed, by held-out loss; what is reported
comes from other seeds at the best one. Model, data, augmentation, schedule and clipping are those of the
recipe digits; label smoothing and averaging of weights are off, because they change the held-out loss too.
The second model is a transformer of patches. It is a small problem with short runs: it can tell optimizers
apart here, and is a hint at most of how they do elsewhere.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import math
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from rich.progress import track
from torch import nn

from benchmarks.conditions import conditions
from benchmarks.paired import interleaved, median_interval, one_thread
from benchmarks.setting import timed_steps
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import read_recipe
from trainer.config.tasks import RegularizationConfig
from trainer.distributed.parallel import World
from trainer.errors import EXIT_DONE, EXIT_NOT_MEASURED
from trainer.host.limits import read_limits
from trainer.optim.optimizers import LRScheduler
from trainer.tasks.classification import Classification
from trainer.train.components.run import build
from trainer.train.evaluate import evaluate
from trainer.train.state import Run
from trainer.train.step import train_step

Figures = npt.NDArray[np.float64]

# Half a decade apart. AdamW's are Muon's too: that is its promise.
RATES = {
    "adamw": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    "sgd": (3e-2, 1e-1, 3e-1, 1.0, 3.0),
    "muon": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    "lamb": (3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
}
_TUNING_SEED, _SEEDS = 0, (1, 2, 3)
_EVALUATIONS = 10
_ALONE = World(0, 1, 0, torch.device("cpu"), None)


class Setting(NamedTuple):
    """Model (resnet or transformer), samples per update, updates; the schedule ends with these."""

    model: str
    batch: int
    updates: int


class Job(NamedTuple):
    """A training run."""

    setting: Setting
    optimizer: str
    rate: float
    seed: int


class Learnt(NamedTuple):
    """The best learning rate, and its curves: held-out loss and accuracy, (seeds, evaluations, 2)."""

    rate: float
    curves: Figures


# Updates are multiples of the number of evaluations.
SETTINGS = [
    Setting("resnet", 64, 160),
    Setting("resnet", 512, 40),
    Setting("transformer", 64, 240),
    Setting("transformer", 512, 50),
]


class PatchTransformer(nn.Module):
    """Two layers of attention over 16 patches of 2 x 2 pixels (Dosovitskiy et al., 2021, without a token)."""

    def __init__(self, width: int = 32, classes: int = 10) -> None:
        """Weights as torch makes them."""
        super().__init__()
        self.stem = nn.Conv2d(1, width, 2, stride=2)
        self.position = nn.Parameter(torch.randn(16, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Classifies: float (n, 1, 8, 8) to logits (n, classes)."""
        hidden = self.layers(self.stem(image).flatten(2).mT + self.position)
        logits: torch.Tensor = self.head(self.norm(hidden).mean(1))
        return logits


class _Patches(Classification):
    def model(self) -> nn.Module:
        return PatchTransformer()


@cache
def _task(model: str) -> Classification:
    digits = Recipe.model_validate(read_recipe("digits"))
    kind = _Patches if model == "transformer" else Classification
    return kind(digits.data, digits.model, RegularizationConfig(), seed=0)


def prepare(job: Job) -> Run:
    """Builds a job as the trainer does; for lamb with timm's optimizer instead."""
    model, batch, updates = job.setting
    task = _task(model)
    digits = read_recipe("digits")
    digits["data"] |= {"global_batch_size": batch, "micro_batch_size": batch}
    digits["optim"] |= {"lr": job.rate}
    digits["ema"] = {"decay": 0.0}
    if job.optimizer == "sgd":  # its weight decay is part of the gradient; the recipe's would stop it
        digits["optim"] |= {"name": "sgd", "momentum": 0.9, "weight_decay": 5e-4}
    elif job.optimizer == "muon":
        digits["optim"] |= {"name": "muon", "momentum": 0.95}
    epochs = math.ceil(updates * batch / len(task.train_data))
    sections = {"seed": job.seed, "epochs": epochs, "max_steps": updates, "parallel": {"threads": 1}}
    run = build(Recipe.model_validate(digits | sections), task, _ALONE, workers=0)
    if job.optimizer == "lamb":
        keys = ("params", "weight_decay")
        groups = [{key: group[key] for key in keys} for group in run.state.optimizer.param_groups]
        assert isinstance(run.state.lr, LRScheduler)
        run.state.optimizer = importlib.import_module("timm.optim").Lamb(groups, lr=run.state.lr.current)
    return run


def learn(job: Job) -> Figures:
    """Trains; returns held-out loss and accuracy over the run, (evaluations, 2)."""
    torch.set_num_threads(1)
    recipe = Recipe.model_validate(read_recipe("digits"))
    run = prepare(job)
    batches = run.loader(run.share.batches())
    figures = []
    for step in range(job.setting.updates):
        train_step(run, batches, step)
        if (step + 1) % (job.setting.updates // _EVALUATIONS) == 0:
            measured = evaluate(
                run.task,
                run.state.model,
                run.evaluation_loader,
                run.evaluation_share,
                _ALONE,
                recipe.precision,
            )
            figures.append((measured["loss"], measured["accuracy"]))
    return np.array(figures)


def best_of(rates: Sequence[float], losses: Sequence[float]) -> float:
    """The rate with the smallest loss; a loss that isn't a number is the largest."""
    return rates[int(np.argmin(np.nan_to_num(losses, nan=np.inf)))]


def tune_and_learn(
    pool: Executor,
    cases: Sequence[tuple[Setting, str]],
    rates: dict[str, Sequence[float]],
    seeds: Sequence[int],
) -> dict[tuple[Setting, str], Learnt]:
    """Chooses each case's learning rate on the tuning seed and learns with it on the others."""

    def results(jobs: list[Job], what: str) -> dict[Job, Figures]:
        done = track(pool.map(learn, jobs), what, total=len(jobs), transient=True)
        return dict(zip(jobs, done, strict=True))

    tuned = results([Job(*case, rate, _TUNING_SEED) for case in cases for rate in rates[case[1]]], "tuning")
    best = {
        case: best_of(
            rates[case[1]], [tuned[Job(*case, rate, _TUNING_SEED)][-1, 0] for rate in rates[case[1]]]
        )
        for case in cases
    }
    learnt = results([Job(*case, best[case], seed) for case in cases for seed in seeds], "learning")
    return {
        case: Learnt(best[case], np.stack([learnt[Job(*case, best[case], seed)] for seed in seeds]))
        for case in cases
    }


def updates_to(target: float, losses: Figures, updates: int) -> int | None:
    """Updates until losses (evaluations,) are first at most `target`; None if they never are."""
    reached = np.flatnonzero(losses <= target)
    return (int(reached[0]) + 1) * updates // _EVALUATIONS if len(reached) else None


def step_ratios(setting: Setting, names: Sequence[str], rounds: int) -> dict[str, tuple[float, float, float]]:
    """Time of a training step over AdamW's, of each round: median and its 95 % interval."""
    steps = max(1, 640 // setting.batch)
    longer = setting._replace(updates=steps * (rounds + 1))

    runs = [prepare(Job(longer, name, RATES[name][1], _TUNING_SEED)) for name in names]
    loops = [timed_steps(run, steps, torch.device("cpu")) for run in runs]
    times = dict(zip(names, interleaved(loops, rounds), strict=True))
    return {
        name: median_interval((np.array(series) / times["adamw"]).tolist()) for name, series in times.items()
    }


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    bench.add_argument("--quick", action="store_true", help="a tenth of the work, to see that it runs")
    bench.set_defaults(run=lambda options: bench_optimizers(options.quick))


def bench_optimizers(quick: bool) -> int:
    """Measures and prints.

    Args:
        quick: A tenth of the work, to see that it runs. Its figures decide nothing.

    Returns:
        0, or 3 if AdamW diverged everywhere, so that there is nothing to compare with.
    """
    settings = [s._replace(updates=_EVALUATIONS) for s in SETTINGS] if quick else SETTINGS
    rates: dict[str, Sequence[float]] = {n: r[1:4:2] if quick else r for n, r in RATES.items()}
    seeds = _SEEDS[:1] if quick else _SEEDS
    timm = importlib.metadata.version("timm") if importlib.util.find_spec("timm") else None
    names = [name for name in RATES if name != "lamb" or timm]
    # Processes of one thread: the same for every job, and all CPUs are used.
    workers = max(1, int(read_limits().cpus))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        learnt = tune_and_learn(pool, [(s, n) for s in settings for n in names], rates, seeds)
    if not any(np.isfinite(learnt[s, "adamw"].curves).all() for s in settings):
        print("nothing measured: AdamW diverged everywhere")
        return EXIT_NOT_MEASURED
    print(
        f"{conditions()}, timm {timm or 'not installed'}\n"
        f"best of {len(rates['adamw'])} learning rates on one seed, then {len(seeds)} other seeds: mean "
        "(least to most);\n* at an end of the rates tried\n"
        "reached: updates until the mean loss is the one that adamw ends with\n"
        "step: time of a training step over adamw's on 1 thread, median of interleaved rounds (95 % interval)"
    )
    with one_thread():
        for setting in settings:
            ratios = step_ratios(setting, names, rounds=2 if quick else 12)
            print(_table(setting, {name: learnt[setting, name] for name in names}, ratios), flush=True)
    if quick:
        print("\nonly to see that it runs: no measurement")
    return EXIT_DONE


def _table(setting: Setting, learnt: dict[str, Learnt], ratios: dict[str, tuple[float, float, float]]) -> str:
    target = float(learnt["adamw"].curves[:, -1, 0].mean())
    lines = [
        f"\n{setting.model}, {setting.updates} updates of {setting.batch} samples",
        f"{'':8}{'best lr':>8}  {'held-out loss':<26}{'accuracy':<26}{'reached':<9}step",
    ]
    for name in RATES:
        if name not in learnt:
            lines.append(f"  {name:<6}not measured: timm isn't installed")
            continue
        rate, curves = learnt[name]
        loss, accuracy = (_spread(curves[:, -1, column]) for column in (0, 1))
        reached = updates_to(target, curves[:, :, 0].mean(0), setting.updates)
        middle, low, high = ratios[name]
        end = "*" if rate in (RATES[name][0], RATES[name][-1]) else " "
        lines.append(
            f"  {name:<6}{rate:8g}{end} {loss:<26}{accuracy:<26}{reached or '-':<9}"
            f"{middle:.2f} ({low:.2f} to {high:.2f})"
        )
    return "\n".join(lines)


def _spread(values: Figures) -> str:
    return f"{values.mean():.4f} ({values.min():.4f} to {values.max():.4f})"
