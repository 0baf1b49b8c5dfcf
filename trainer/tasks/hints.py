"""Hints for tasks written for other trainers: the method here that corresponds to one of theirs."""

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

PAGE = "docs/from-other-trainers.md"
# Methods of Lightning, of HF's Trainer and of timm's habits.
_COUNTERPARTS = {
    "training_step": "loss(model, batch), a value for each sample",
    "compute_loss": "loss(model, batch), a value for each sample",
    "validation_step": "measure(model, batch)",
    "test_step": "measure(model, batch)",
    "compute_metrics": "measure(model, batch), and summarize(values)",
    "configure_optimizers": "optimizer(model) and scheduler(optimizer, steps), or the keys optim.*",
    "create_optimizer": "optimizer(model), or the keys optim.*",
    "train_dataloader": "data(), which gives the data sets",
    "val_dataloader": "data(), which gives the data sets",
    "get_train_dataloader": "data(), which gives the data sets",
    "log": "what measure gives, or several losses by name",
    "log_dict": "what measure gives, or several losses by name",
    "manual_backward": "what loss gives; the trainer calls backward",
    "optimizers": "optimizer(model), with a parameter group for each half",
    "hparams": "an attribute of the class, or a key of RECIPE",
    "save_hyperparameters": "an attribute of the class, or a key of RECIPE",
}


def of_class(own: Any) -> str:
    """Returns a hint on methods that have another name here, or on a class that is a model; else ""."""
    if renamed := [f"{theirs} is {ours}" for theirs, ours in _COUNTERPARTS.items() if theirs in dir(own)]:
        return f"; of its methods, {'; '.join(renamed[:3])} (more in {PAGE})"
    if isinstance(own, nn.Module):
        return f"; this is a module: a task is a class whose model() gives it ({PAGE})"
    return ""


def of_error(error: Exception) -> str:
    """Returns a hint on a missing attribute that another trainer's base class has, or on a batch; else ""."""
    if isinstance(error, TypeError) and "'Batch' object is not iterable" in str(error):
        return ' (a field has a name: batch["x"], of tuples "0", "1" and so on)'
    name = getattr(error, "name", None) if isinstance(error, AttributeError) else None
    return f" ({name} is here {_COUNTERPARTS[name]}; see {PAGE})" if name in _COUNTERPARTS else ""


def of_data(given: Any) -> str:
    """Returns the remedy where `data` gave a DataLoader; else ""."""
    parts = given if isinstance(given, tuple | list) else (given,)
    if not any(isinstance(part, torch.utils.data.DataLoader) for part in parts):
        return ""
    return (
        "data gave a DataLoader; give the data sets themselves (loader.dataset), and the task a collate if "
        "there is a collate_fn: batch size, order and workers are the keys data.global_batch_size, seed and "
        "data.workers"
    )


def of_updates(method: str, given: Any) -> str:
    """Returns the remedy where `optimizer` or `scheduler` gave a form that another trainer takes; else ""."""
    if isinstance(given, ReduceLROnPlateau):
        return (
            "scheduler gave a ReduceLROnPlateau, which waits for a metric; here the rate follows from the "
            "number of the update: take another scheduler or optim.schedule, and evaluation.patience to end "
            "early"
        )
    if isinstance(given, list | tuple | dict):
        return (
            f"{method} gave a {type(given).__name__}; give one optimizer by optimizer(model), with a "
            "parameter group for each half of a GAN, and one scheduler by scheduler(optimizer, steps) "
            f"({PAGE})"
        )
    return ""
