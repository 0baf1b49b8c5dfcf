"""A reference trainer for PyTorch: `trainer train RECIPE`, or `from trainer import fit` in a notebook."""

from typing import Any

from trainer.version import __version__ as __version__


def __getattr__(name: str) -> Any:
    # Not at import: torch takes two seconds, which most commands don't need.
    if name == "fit":
        from trainer.host.threads import wait_passively

        wait_passively()
        from trainer.train.from_python import fit

        return fit
    raise AttributeError(f"module 'trainer' has no attribute '{name}'")
