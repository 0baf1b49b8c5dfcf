"""The libraries that the benches can be run against, each in a module of its own.

A bench asks a module for a function by name (`accumulate`, `train_tiny`); a module without it has nothing
that this bench could measure. The modules import their library inside these functions, so that the list of
who offers what needs no library.
"""

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from trainer.errors import BadInputError
from trainer.suggest import nearest

# Name on the command line (and of the module) -> name of the distribution.
_DISTRIBUTIONS = {
    "lightning": "lightning",
    "fabric": "lightning",
    "accelerate": "accelerate",
    "ignite": "pytorch-ignite",
    "timm": "timm",
    "torchvision": "torchvision",
    "webdataset": "webdataset",
}


class NotMeasured(Exception):  # noqa: N818
    """A library can't be measured on a case; the message says why, and the bench goes on without it."""


def offering(function: str) -> dict[str, Callable[..., Any]]:
    """The libraries whose module has this function, by name."""
    modules = {name: importlib.import_module(f"{__name__}.{name}") for name in _DISTRIBUTIONS}
    return {name: getattr(module, function) for name, module in modules.items() if hasattr(module, function)}


def chosen(names: str, function: str) -> dict[str, Callable[..., Any]]:
    """The function of each library in a comma-separated list.

    Raises:
        BadInputError: If a name isn't known for this bench, or its library isn't installed.
    """
    known = offering(function)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise BadInputError(
                f"--against: this bench doesn't know '{name}'{nearest(name, known)} "
                f"(it knows {', '.join(known)})"
            )
        version(name)
    return {name: known[name] for name in wanted}


def version(name: str) -> str:
    """Version of a library that is installed.

    Raises:
        BadInputError: If it isn't.
    """
    try:
        return metadata.version(_DISTRIBUTIONS[name])
    except metadata.PackageNotFoundError as error:
        raise BadInputError(
            f"--against {name}: {_DISTRIBUTIONS[name]} is not installed; install the libraries with "
            '`pip install .[bench]` or `make venv GROUPS="train bench"`'
        ) from error


@contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """Keeps what libraries say about their own settings out of a bench's output."""
    levels = {logger: logging.getLogger(logger).level for logger in loggers}
    for logger in loggers:
        logging.getLogger(logger).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logging.getLogger(logger).setLevel(level)
