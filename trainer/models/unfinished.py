"""Backward passes that an error ended, of which torch's engine keeps what it hadn't begun."""

import atexit

import torch


def ends_at_exit() -> None:
    """Lets the process end after such an error.

    Else the main thread's queue is destroyed after Python is, and waits for Python's lock for ever where a
    tensor has the memory of a NumPy array.
    """
    atexit.unregister(drop_unfinished)
    atexit.register(drop_unfinished)


def drop_unfinished() -> None:
    """Removes what this thread's queue holds of failed backward passes."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        last = torch.zeros((), device="cpu", requires_grad=True) * 1
    if last.grad_fn is not None:
        # Younger functions come first, and the failed ones are skipped.
        last.grad_fn._set_sequence_nr(0)  # type: ignore[attr-defined]
        last.backward()
