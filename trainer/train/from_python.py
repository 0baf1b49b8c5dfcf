"""`fit`: a run from Python, in this process; what a notebook calls."""

import contextlib
import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config.recipe_file import load_recipe, make_recipe
from trainer.config.task_file import text_hash
from trainer.errors import EXIT_DONE, BadInputError
from trainer.models.weights import load_initial
from trainer.observe.rows import FILES, OWN
from trainer.tasks import Task
from trainer.tasks.custom import CustomTask
from trainer.train.begin import find_beginning, keep_beginning
from trainer.train.hooks import find_hooks
from trainer.train.operations import random_state_kept
from trainer.train.pretrained import resolve_pretrained
from trainer.train.request import Request
from trainer.train.resume import Mode, check_beginning, parse_source
from trainer.train.run import check_files, check_request, make_task
from trainer.train.run_folder import RUNS, new_folder, read_rows, read_stored
from trainer.train.trainer import train_rank


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
        """Rows: "train" (each log.every steps, before evaluations), "eval", "memory", "verdict" or "end"."""
        if kind not in FILES:
            raise BadInputError(f"rows({kind!r}): the kinds are {', '.join(FILES)}")
        return list(read_rows(self.folder, kind))

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
    from_run: str | Path | None = None,
    hooks: Sequence[Any] = (),
) -> Fitted:
    """Trains here and now, on one GPU or on the CPU: what `trainer train` does, without its launcher.

    Interrupted, it can be called again with the same `out` and goes on from the newest checkpoint.

    Args:
        task: A recipe's name, a YAML or Python file, or an object (or class) with the methods of a task of
            one's own (`trainer new`); of such an object RECIPE, if it has that, is the configuration.
        settings: Configuration keys, `{"epochs": 3, "optim.lr": 0.1}`.
        out: Run folder; default: a new one below runs.
        resume: As for `trainer train`.
        from_run: As `trainer train --from`: a run folder, with @STEP or @best after it.
        hooks: Objects or classes with `after_step`, `after_evaluation` or `after_checkpoint`.

    Raises:
        BadInputError: What is wrong, and the remedy.
    """
    # JSON is YAML, so this is what --set takes.
    words = [f"{key}={json.dumps(value, default=_plain)}" for key, value in (settings or {}).items()]
    if isinstance(task, str | Path):
        name = Path(task).stem
        recipe = load_recipe(str(task), words)
        opened = make_task(recipe)
    else:
        own = task() if isinstance(task, type) else task
        name = type(own).__name__
        values = {"epochs": 1, **getattr(own, "RECIPE", {}), "task": "own"}
        recipe = make_recipe(values, words, name)
        opened = CustomTask(own, name)
        with contextlib.suppress(OSError, TypeError):  # where there is no source, nothing can be compared
            opened.source_hash = text_hash(inspect.getsource(type(own)))
    source = None if from_run is None else parse_source(str(from_run))
    folder_given = None if out is None else Path(out)
    stored = None if folder_given is None else read_stored(folder_given)
    recipe, pretrained, fresh = resolve_pretrained(recipe, stored, folder_given, resume, source)
    with random_state_kept():
        check_request(recipe, opened, 1, fresh)
        find_hooks(recipe.hooks, hooks)
        check_files(recipe, opened)
    begun_from = None
    if source is not None:
        if stored is not None:
            check_beginning(Path(str(out)), stored, source)
        else:
            with random_state_kept():
                begun_from = find_beginning(source, recipe, opened)
    folder = new_folder(RUNS, name, recipe) if out is None else Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    if begun_from is not None:
        keep_beginning(folder, begun_from)
    threads = torch.get_num_threads()
    try:
        with random_state_kept():
            request = Request(recipe, name, folder, resume, begun_from=begun_from, pretrained=pretrained)
            code = train_rank(request, opened, hooks)
    finally:
        torch.set_num_threads(threads)
    if code != EXIT_DONE:
        raise BadInputError(
            f'{folder}: stopped before its end (code {code}); go on by fit(…, out="{folder}")'
        )
    run = Fitted(folder, opened, {})
    evaluations = run.rows("eval")
    last = evaluations[-1] if evaluations else {}
    run.metrics.update({n: math.nan if v is None else v for n, v in last.items() if n not in OWN})
    return run


def _plain(value: Any) -> Any:
    """Paths as text, numpy's numbers as Python's."""
    return value.item() if hasattr(value, "item") else str(value)
