"""`fit`: a run from Python, in this process; what a notebook calls."""

import contextlib
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override, read_recipe
from trainer.config.section import validated
from trainer.config.task_file import text_hash
from trainer.errors import EXIT_DONE, BadInputError
from trainer.models.weights import load_initial
from trainer.tasks import Task
from trainer.tasks.custom import CustomTask
from trainer.train.attempt import train_rank
from trainer.train.resume import RUNS, Mode
from trainer.train.run import check_files, check_request, make_task
from trainer.train.run_folder import new_folder


@dataclass(frozen=True)
class Fitted:
    """A finished run.

    Attributes:
        folder: The run folder.
        task: What was learned.
        metrics: Those of the last evaluation, by name.
    """

    folder: Path
    task: Task
    metrics: dict[str, float]

    def rows(self, kind: str = "train") -> list[dict[str, Any]]:
        """Rows of metrics.jsonl: "train" (each log.every steps) or "evaluation"; for plots."""
        lines = (self.folder / "metrics.jsonl").read_text("utf-8").splitlines()
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    def model(self) -> nn.Module:
        """A model with the final weights (their moving average if the run kept one), to be evaluated."""
        model = self.task.model()
        files = (self.folder / name for name in ("ema.safetensors", "model.safetensors"))
        load_initial(model, next(file for file in files if file.exists()), ())
        return model.eval()


def fit(
    task: str | Path | object,
    settings: Mapping[str, Any] | None = None,
    *,
    out: str | Path | None = None,
    resume: Mode = "auto",
) -> Fitted:
    """Trains here and now, on one GPU or on the CPU: what `trainer train` does, without its launcher.

    Interrupted, it can be called again with the same `out` and goes on from the newest checkpoint.

    Args:
        task: A recipe's name, a YAML or Python file, or an object (or class) with the methods of a task of
            one's own (`trainer new`); of such an object RECIPE, if it has that, is the configuration.
        settings: Configuration keys, `{"epochs": 3, "optim.lr": 0.1}`.
        out: Run folder; default: a new one below runs.
        resume: As for `trainer train`.

    Raises:
        BadInputError: What is wrong, and the remedy.
    """
    # JSON is YAML, so this is what --set takes.
    words = [f"{key}={json.dumps(value, default=_plain)}" for key, value in (settings or {}).items()]
    if isinstance(task, str | Path):
        name = Path(task).stem
        recipe = validated(Recipe, override(read_recipe(str(task)), words), str(task))
        opened = make_task(recipe)
    else:
        own = task() if isinstance(task, type) else task
        name = type(own).__name__
        values = {"epochs": 1, **getattr(own, "RECIPE", {}), "task": "own"}
        recipe = validated(Recipe, override(values, words), name)
        opened = CustomTask(own, name)
        with contextlib.suppress(OSError, TypeError):  # where there is no source, nothing can be compared
            opened.source_hash = text_hash(inspect.getsource(type(own)))
    with _random_state_kept():
        check_request(recipe, opened, 1)
        check_files(recipe, opened)
    folder = new_folder(RUNS, name, recipe) if out is None else Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    try:
        with _random_state_kept():
            code = train_rank(recipe, name, folder, resume, task=opened)
    finally:
        torch.set_num_threads(threads)
    if code != EXIT_DONE:
        raise BadInputError(
            f'{folder}: stopped before its end (code {code}); go on by fit(…, out="{folder}")'
        )
    run = Fitted(folder, opened, {})
    evaluations = run.rows("evaluation")
    known = {"kind", "step", "epoch", "time", "seconds"}
    run.metrics.update({n: v for n, v in (evaluations[-1] if evaluations else {}).items() if n not in known})
    return run


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Of the CPU, and of a GPU in use. CUDA must not begin here: its allocator is still to be chosen."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield


def _plain(value: Any) -> Any:
    """Paths as text, numpy's numbers as Python's."""
    return value.item() if hasattr(value, "item") else str(value)
