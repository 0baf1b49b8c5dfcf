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

import trainer
from trainer.config.suggest import nearest
from trainer.errors import BadInputError

# Name on the command line (and of the module) -> name of the distribution.
LIBRARIES = {
    "lightning": "lightning",
    "fabric": "lightning",
    "accelerate": "accelerate",
    "ignite": "pytorch-ignite",
    "timm": "timm",
    "torchvision": "torchvision",
    "webdataset": "webdataset",
}


class NotMeasured(Exception):  # noqa: N818
    """Raised where a library can't be measured on a case, with the reason; the bench continues without it."""


class LibraryFailed(Exception):  # noqa: N818
    """Raised where a library failed; the message is its error's type and first line.

    Attributes:
        name: The library's.
    """

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why)  # both, or it couldn't be handed over to another process
        self.name, self.why = name, why

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


@contextmanager
def blamed(name: str) -> Iterator[None]:
    """Puts a library's name on whatever goes wrong while it works.

    Raises:
        LibraryFailed: For any error but those that aren't its own, and those that have a name already.
    """
    try:
        yield
    except (BadInputError, NotMeasured, LibraryFailed):
        raise
    except Exception as error:
        words = str(error).strip().partition("\n")[0]
        raise LibraryFailed(name, ": ".join(filter(None, (type(error).__name__, words)))) from error


def offering(function: str) -> dict[str, Callable[..., Any]]:
    """The libraries whose module has this function, by name."""
    modules = {name: importlib.import_module(f"{__name__}.{name}") for name in LIBRARIES}
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
        return metadata.version(LIBRARIES[name])
    except metadata.PackageNotFoundError as error:
        raise BadInputError(
            f"--against {name}: {LIBRARIES[name]} is not installed; install the libraries with "
            '`pip install .[bench]` or `make venv GROUPS="train bench"`'
        ) from error


def installed(name: str) -> bool:
    """Whether a library is installed."""
    try:
        version(name)
    except BadInputError:
        return False
    return True


def titled(name: str) -> str:
    """A library, or the trainer itself, with its version."""
    return f"{name} {trainer.__version__ if name == 'trainer' else version(name)}"


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
