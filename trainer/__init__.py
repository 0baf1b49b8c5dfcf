"""A reference trainer for PyTorch: `trainer train RECIPE`, or `from trainer import fit` in a notebook."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Not at import: torch takes two seconds, which most commands don't need.
    if name == "fit":
        from trainer.host.threads import wait_passively

        wait_passively()
        from trainer.train.from_python import fit

        return fit
    raise AttributeError(f"module 'trainer' has no attribute '{name}'")
