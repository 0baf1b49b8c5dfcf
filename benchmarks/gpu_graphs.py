"""A small model's step with CUDA graphs: the trainer's loop beside one written by hand, in turn.

The model's kernels are so short that launching one after the other takes longer than they do: that is what
CUDA graphs are for. Both loops compile the model with `mode="reduce-overhead"`, which replays its forward and
its backward pass, and do the rest of a step eagerly: the loss, clipping, fused AdamW, the weights' average.
The one by hand gathers each batch into the very tensors that its graphs read, so that nothing is copied
there. The trainer's does all that it does in a run between evaluations and checkpoints, but for the console:
anomaly detection, fingerprints of the weights, a row of metrics every 50 steps into JSONL and TensorBoard and
judged, and a thread that watches the machine. That thread lives as long as the loop: it wakes up beside all
loops.
"""

import math
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.array_task import ArrayTask
from benchmarks.overhead import logging_to
from benchmarks.paired import interleaved, median_interval
from benchmarks.setting import now
from trainer.config.recipe import Recipe
from trainer.data.batch import Batch
from trainer.distributed.parallel import World
from trainer.errors import BadInputError
from trainer.models.compiling import missing_for_compiling, torch_mode
from trainer.train.anomaly import AnomalyDetector
from trainer.train.components.run import build
from trainer.train.loop import train

_CLASSES, _BATCHES = 16, 64  # batches: of an epoch, at whose end rows tell of the memory
_EMA_DECAY = 0.99
_MODES = ("reduce-overhead", "none")


class Residual(nn.Module):
    """x + gelu(linear(norm(x))), float (n, width)."""

    def __init__(self, width: int) -> None:
        """Initializes the weights."""
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns an output of the same shape."""
        return x + F.gelu(self.linear(self.norm(x)))


class SmallTask(ArrayTask):
    """Random vectors to classes, by eight residual layers."""

    def __init__(self, batch: int, width: int) -> None:
        """Makes so many samples that an epoch has 64 batches."""
        random = np.random.Generator(np.random.Philox(0))
        self.width = width
        self.x = random.standard_normal((_BATCHES * batch, width), dtype=np.float32)
        self.y = random.integers(0, _CLASSES, len(self.x))
        super().__init__({"x": self.x, "y": self.y}, evaluated=1)

    def model(self) -> nn.Module:
        """New."""
        layers = [Residual(self.width) for _ in range(8)]
        return nn.Sequential(*layers, nn.Linear(self.width, _CLASSES))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Cross entropy, summed."""
        return F.cross_entropy(model(batch.fields["x"]), batch.fields["y"], reduction="sum")


def small_recipe(mode: str, batch: int, steps: int) -> Recipe:
    """Returns the recipe of `SmallTask`."""
    values: dict[str, Any] = {
        "epochs": -(-steps // _BATCHES),
        "max_steps": steps,
        "evaluation": {"every": "end"},
        "data": {"global_batch_size": batch, "micro_batch_size": batch, "resident": True},  # as by hand
        "optim": {"lr": 1e-3, "max_grad_norm": 1.0, "warmup_steps": 0.0, "weight_decay": 0.01},
        "ema": {"decay": _EMA_DECAY},
        "precision": {"mode": "bf16"},
        "compile": {"mode": mode},
    }
    return Recipe.model_validate(values)


def by_trainer(
    task: SmallTask, recipe: Recipe, device: torch.device, steps: int, folder: Path, stack: ExitStack
) -> Callable[[], float]:
    """The trainer's loop with its default logging; each call does its next steps and returns the seconds.

    Its files are in the folder; they are open and its thread runs until the stack is closed.
    """
    run = build(recipe, task, World(0, 1, 0, device, None), workers=0)
    out = logging_to(folder, run, stack)
    assert run.recent is not None
    detector = AnomalyDetector(recipe.anomaly, run.recent, None, 0, run.state.history)

    def turn() -> float:
        began = now(device)
        train(run, out, detector, until=run.state.step + steps)
        return now(device) - began

    return turn


def by_hand(
    task: SmallTask, recipe: Recipe, device: torch.device, steps: int, compiled: bool
) -> Callable[[], float]:
    """The loop that one would write for this model and nothing else; compiled or not."""
    optim, total = recipe.optim, recipe.max_steps or 1
    model = task.model().to(device)
    params = list(model.parameters())
    average, weights = [p.detach().clone() for p in params], [p.detach() for p in params]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, fused=True)
    all_x, all_y = torch.from_numpy(task.x).to(device), torch.from_numpy(task.y).to(device)
    batch = recipe.data.micro_batch_size
    x, y = all_x[:batch].clone(), all_y[:batch].clone()

    def forward(x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(x)
        return logits

    call: Callable[[torch.Tensor], torch.Tensor] = forward
    if compiled:
        from torch._dynamo import mark_static_address  # here: it takes three seconds

        mark_static_address(x)
        # Of a function of its own: compiled code and graphs of the trainer's model aren't looked through.
        call = torch.compile(forward, mode=torch_mode(recipe.compile, device), dynamic=False)
    done = 0
    order: tuple[torch.Tensor, ...] = ()

    def turn() -> float:
        nonlocal done, order
        began = now(device)
        for step in range(done, done + steps):
            if step % _BATCHES == 0:
                order = torch.randperm(len(all_x), device=device).split(batch)
            torch.index_select(all_x, 0, order[step % _BATCHES], out=x)
            torch.index_select(all_y, 0, order[step % _BATCHES], out=y)
            with torch.autocast(device.type, torch.bfloat16):
                loss = F.cross_entropy(call(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(params, optim.max_grad_norm, foreach=True)
            for group in optimizer.param_groups:
                group["lr"] = optim.lr * (1 + math.cos(math.pi * step / total)) / 2
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            torch._foreach_lerp_(average, weights, max(1 - _EMA_DECAY, 9 / (10 + step)))
        done += steps
        return now(device) - began

    return turn


def graphs(mode: str = _MODES[0], rounds: int = 0, steps: int = 0) -> dict[str, Any]:
    """Times the loops in turn.

    Args:
        mode: Of torch.compile, or "none"; on a CPU, which has no graphs, reduce-overhead is "default".
        rounds: Interleaved; 0: 20, on a CPU 3.
        steps: In each; 0: 500, on a CPU 2.

    Returns:
        ratio, low, high: median of the rounds' ratios, trainer to by hand, and its 95 % interval.
        trainer_us, by_hand_us, eager_us: medians per step; eager is the loop by hand with nothing compiled.
        skipped: how often torch gave up a graph.
        measured: whether there was a GPU.

    Raises:
        BadInputError: If there is nothing to compile with.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    cuda = device.type == "cuda"
    if mode != "none" and (missing := missing_for_compiling(device)):
        raise BadInputError(f"compile.mode={mode}: {missing}")
    # Rows explain themselves every quarter of a second, by the clock: shorter turns would each do it once.
    rounds, steps = rounds or (20 if cuda else 3), steps or (500 if cuda else 2)
    batch, width = (1024, 1024) if cuda else (32, 64)
    task, recipe = SmallTask(batch, width), small_recipe(mode, batch, (rounds + 1) * steps)
    with tempfile.TemporaryDirectory(prefix="trainer-graphs-") as folder, ExitStack() as stack:
        loops = {
            "trainer": by_trainer(task, recipe, device, steps, Path(folder), stack),
            "by_hand": by_hand(task, recipe, device, steps, mode != "none"),
            "eager": by_hand(task, recipe, device, steps, compiled=False),
        }
        found = interleaved(list(loops.values()), rounds, shown=False)
    seconds = dict(zip(loops, found, strict=True))
    pairs = zip(seconds["trainer"], seconds["by_hand"], strict=True)
    ratio, low, high = median_interval([ours / hand for ours, hand in pairs])
    each = {f"{name}_us": float(np.median(series)) / steps * 1e6 for name, series in seconds.items()}
    metrics = {"ratio": ratio, "low": low, "high": high, **each, "rounds": rounds, "steps": steps}
    return {**metrics, "mode": torch_mode(recipe.compile, device), "skipped": _skipped(), "measured": cuda}


def _skipped() -> int:
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])
