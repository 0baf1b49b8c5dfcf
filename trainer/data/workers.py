"""How loader workers are started, and what they must not do."""

import ast
import ctypes
import gc
import io
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from trainer.config.beside import MAIN
from trainer.data.dataset import Dataset
from trainer.data.shared import Columns
from trainer.errors import BadInputError

_PR_SET_PDEATHSIG = 1


def start_method(configured: str) -> str:
    """How workers are started: as configured, or by what is safe."""
    if configured != "auto":
        return configured
    if sys.platform != "linux":
        return "spawn"
    # A fork leaves the other threads behind, with whatever lock they held.
    return "fork" if threading.active_count() == 1 else "forkserver"


def unsendable(dataset: Dataset, method: str, error: Exception) -> str:
    """One line that names the attribute of a data set that can't be sent to a worker."""
    where, value = type(dataset).__name__, dataset
    while True:
        parts = getattr(value, "__dict__", {})
        part = next((name for name, inner in parts.items() if not _can_be_sent(inner)), None)
        if part is None:
            break
        where, value = f"{where}.{part}", parts[part]
    return (
        f"data.start_method={method}: {where} ({type(value).__name__}) can't be sent to a loader worker "
        f"({str(error).splitlines()[0]}); make it where it is first used, or set data.start_method=fork"
    )


def check_known_there(dataset: Dataset, method: str) -> None:
    """Makes sure that a worker that isn't forked can import the class of a data set, and what it calls.

    Raises:
        BadInputError: If one of them is of a task's own file, or of a notebook; or if the script, which a
            worker imports, would train again.
    """
    if method != "fork" and (line := _runs_anew()):
        raise BadInputError(
            f"data.start_method={method}: a loader worker imports the script, which would train again in "
            f'line {line}: put that under if __name__ == "__main__":, or set data.workers=0'
        )
    for thing in (dataset, *getattr(dataset, "brought", ())):
        module = getattr(thing, "__module__", "")
        notebook = module == "__main__" and not hasattr(sys.modules["__main__"], "__file__")
        if method != "fork" and (module.endswith(MAIN) or notebook):
            name = getattr(thing, "__name__", type(thing).__name__)
            raise BadInputError(
                f"data.start_method={method}: a worker can't import {name} from a task's "
                "file or a notebook; import it from a module of yours, or set data.workers=0"
            )


def _runs_anew() -> int | None:
    """The line of this process's script that led here, if it is run when the script is imported."""
    main, frame, line = sys.modules["__main__"], sys._getframe(), None
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_globals is vars(main) and frame.f_code.co_name == "<module>":
            line = frame.f_lineno
    if line is None or not getattr(main, "__file__", None):
        return None
    try:
        tree = ast.parse(Path(str(main.__file__)).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    tests = [node.test for node in tree.body if isinstance(node, ast.If) and node.lineno <= line]
    named = (node for test in tests for node in ast.walk(test) if isinstance(node, ast.Name))
    return None if any(node.id == "__name__" for node in named) else line


class _PickleTrial(pickle.Pickler):
    """Passes over what only a starting process can send."""

    def persistent_id(self, value: Any) -> str | None:
        return "shared" if isinstance(value, Columns) else None


def _can_be_sent(value: Any) -> bool:
    try:
        _PickleTrial(io.BytesIO()).dump(value)
    except (TypeError, AttributeError, pickle.PicklingError):
        return False
    return True


class CurrentBatches:
    """A sampler whose batches can be set anew while the workers stay."""

    def __init__(self, numbers: list[range]) -> None:
        self._numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers[0])

    def __len__(self) -> int:
        return len(self._numbers[0])


def begin_worker(parent: int | None, _worker: int) -> None:
    """What a worker does at its start; the parent is the process whose end is its own, if it is its child."""
    if sys.platform == "linux" and parent is not None:
        # torch's workers look for their parent every five seconds, and for the wrong one if it ended before.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    # What it got from its parent is never garbage: looking through it would copy page after page.
    gc.freeze()
    # Ctrl-C and a scheduler's signal reach every process of the job (Slurm's scancel, systemd), but the rank
    # needs its workers until it has reached the step at which all ranks save a checkpoint.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def end_by_kill(workers: Iterable[BaseProcess]) -> None:
    """Lets torch and multiprocessing end these by SIGKILL: they ignore the SIGTERM that both would send."""
    for worker in workers:
        worker._popen.terminate = worker._popen.kill  # type: ignore[attr-defined]
