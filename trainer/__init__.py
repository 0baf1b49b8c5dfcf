"""A reference trainer for PyTorch: `trainer train RECIPE`, or `from trainer import fit` in a notebook.

The names below stay; everything else in the package may move. docs/api.md is made of their docstrings.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer.version import __version__ as __version__

if TYPE_CHECKING:  # for type checkers and editors: at run time a name is imported when it is asked for
    from trainer.commands.check.check import Report as Report, check as check
    from trainer.config.model import ModelConfig as ModelConfig
    from trainer.config.recipe_file import make_recipe as make_recipe
    from trainer.data.batch import Batch as Batch
    from trainer.data.dataset import Dataset as Dataset, Field as Field
    from trainer.distributed.parallel import World as World
    from trainer.errors import (
        BadInputError as BadInputError,
        DivergedError as DivergedError,
        Finish as Finish,
        StopRun as StopRun,
    )
    from trainer.host.limits import read_limits as read_limits
    from trainer.models.images import build_model as build_model
    from trainer.observe.log import Sink as Sink
    from trainer.runs.tracking.tracker import Tracker as Tracker
    from trainer.tasks import Task as Task
    from trainer.tasks.values import means as means
    from trainer.train.components.run import build as build
    from trainer.train.components.task import make_task as make_task
    from trainer.train.hooks import Hook as Hook, HookError as HookError
    from trainer.train.start.from_python import Fitted as Fitted, fit as fit
    from trainer.train.step import train_step as train_step

# By the chapters of docs/api.md: where each name is.
PUBLIC = {
    "A run": {
        "fit": "train.start.from_python",
        "Fitted": "train.start.from_python",
        "BadInputError": "errors",
        "DivergedError": "errors",
    },
    "A check": {
        "check": "commands.check.check",
        "Report": "commands.check.check",
    },
    "A custom task": {
        "Task": "tasks",
        "Batch": "data.batch",
        "means": "tasks.values",
        "Dataset": "data.dataset",
        "Field": "data.dataset",
    },
    "Hooks and sinks": {
        "Hook": "train.hooks",
        "HookError": "train.hooks",
        "StopRun": "errors",
        "Finish": "errors",
        "Sink": "observe.log",
        "Tracker": "runs.tracking.tracker",
    },
    "The parts of a run": {
        "make_recipe": "config.recipe_file",
        "make_task": "train.components.task",
        "World": "distributed.parallel",
        "build": "train.components.run",
        "train_step": "train.step",
        "read_limits": "host.limits",
    },
    "Weights in plain Python": {
        "ModelConfig": "config.model",
        "build_model": "models.images",
    },
}
_MODULES = {name: module for names in PUBLIC.values() for name, module in names.items()}


def __getattr__(name: str) -> Any:
    # Not at import: torch takes two seconds, which most commands don't need.
    if name not in _MODULES:
        raise AttributeError(f"module 'trainer' has no attribute '{name}'")
    from trainer.host.startup import choose_waiting

    choose_waiting()
    return getattr(import_module(f"trainer.{_MODULES[name]}"), name)
