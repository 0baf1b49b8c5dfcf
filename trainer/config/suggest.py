"""Nearest name, for messages about a name that doesn't exist."""

import difflib
from collections.abc import Iterable

# tests/config/test_config.py has slips that are found with this, and words that are slips of no name.
_CUTOFF = 0.7

# Keys by their names in other tools, and by former names here.
MEANT = {
    "epochs": "epochs",
    "seed": "seed",
    "device": "device",
    "workers": "data.workers",
    "lr": "optim.lr",
    "learning_rate": "optim.lr",
    "clip": "optim.max_grad_norm",
    "grad_clip": "optim.max_grad_norm",
    "gradient_clip_val": "optim.max_grad_norm",
    "batch_size": "data.global_batch_size",
    "train_batch_size": "data.global_batch_size",
    "per_device_train_batch_size": "data.micro_batch_size",
    "accumulation": "data.global_batch_size",
    "accumulate_grad_batches": "data.global_batch_size",
    "gradient_accumulation_steps": "data.global_batch_size",
    "num_workers": "data.workers",
    "num_train_epochs": "epochs",
    "max_epochs": "epochs",
    "max_windows": "max_steps",
    "warmup": "optim.warmup_steps",
    "limit_train_batches": "data.limit",
    "limit_val_batches": "data.limit",
    "overfit_batches": "data.limit",
    "max_train_samples": "data.limit",
}


def slip_of(name: str, known: Iterable[str]) -> str:
    """Returns the name that was probably meant: a near one, or the only one with this prefix; else ""."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=_CUTOFF)
    begun = [one for one in names if one.startswith(f"{name}_")]
    return close[0] if close else begun[0] if len(begun) == 1 else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'x'?", or ""."""
    found = slip_of(name, known)
    return f"; did you mean '{found}'?" if found else ""
