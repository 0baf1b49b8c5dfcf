"""The libraries that the benches can be run against, each in a module of its own.

A bench asks a module for a function by name (`accumulate`, `train_tiny`); a module without it has nothing
that this bench could measure. The modules import their library inside these functions, so that the list of
who offers what needs no library.
"""

import importlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any, NamedTuple

import trainer
from benchmarks.conditions import conditions
from benchmarks.options import picked
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
    wanted = {name: known[name] for name in picked(names, known, "--against", "library of this bench")}
    for name in wanted:
        version(name)
    return wanted


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


class Judged(NamedTuple):
    """Result of a case.

    Attributes:
        name: The library's, or "trainer".
        variant: Where there are several ways, which one.
        case: The case.
        score: None: it wasn't measured.
        note: How the library was used, or why it wasn't.
    """

    name: str
    variant: str
    case: Any
    score: Any
    note: str

    @property
    def label(self) -> str:
        """Name, version and variant."""
        return ", ".join(filter(None, (titled(self.name), self.variant)))


def print_judged(
    found: Iterable[Judged], head: Sequence[str], cells: Callable[[Judged], Sequence[str]], legend: str
) -> list[Any]:
    """Prints a table of cases while they are measured, then the legend and the notes.

    Returns:
        The trainer's scores.
    """
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    print("\n".join([f"{conditions()}\n", *lines]), flush=True)
    ours, notes = [], []
    for one in found:
        if one.score is not None:
            print(f"| {' | '.join(cells(one))} |", flush=True)
        if one.name == "trainer":
            ours.append(one.score)
        notes.append(f"{one.label}: {one.note}")
    print("\n- ".join([f"\n{legend}", *dict.fromkeys(notes)]))
    return ours


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
