"""One rank's side of a launch: it registers, runs, and leaves word of how it ended.

Under the launcher the word is a file, because torchrun turns every exit code into 1; under a plain
`torchrun -m trainer` a rank prints its own traceback and exits with its own code.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

from trainer.config.redact import redact_text
from trainer.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_REQUEUE,
    BadInputError,
    DivergedError,
    OutOfMemory,
)
from trainer.host.affinity import bind
from trainer.host.files import write_whole
from trainer.host.processes import children
from trainer.launch import signals as preempt
from trainer.launch.as_launcher import PATH_VARIABLE
from trainer.launch.exit_record import Outcome, dead_worker
from trainer.launch.nodes.discover import is_launcher_task

FOLDER_VARIABLE = "TRAINER_LAUNCH_FOLDER"
PARENT_VARIABLE = "TRAINER_LAUNCH_PARENT"
LOGS_VARIABLE = "TRAINER_LAUNCH_LOGS"
_PR_SET_PDEATHSIG = 1

# What the end of a traceback says where another rank left first: such a failure is not the cause.
_CONSEQUENCES = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "failed to recv, got 0 bytes",
    "remote process exited",
    "ncclRemoteError",
    "communicator was aborted",
)


class _State:
    """Where this rank leaves word; None without our launcher."""

    folder: Path | None = None
    registered = False


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether this process is one of the ranks that torchrun, our launcher or Slurm started."""
    there = all(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return there and not is_launcher_task(environ)


def run_rank(main: Callable[[], int | None]) -> int:
    """Runs `main` as a rank; call it before the slow imports, and exit with what it returns.

    Signals set the flag of `trainer.launch.signals` from here on. A return value is the exit code (None: 0),
    BadInputError means 2, Stopped, DivergedError and OutOfMemory 1, each with one line; any other exception
    means 1 with its traceback.
    """
    register()
    outcome = _outcome(main)
    _leave_word(outcome)
    return _code_for_torchrun(outcome.code)


def leave_now(
    code: int,
    line: str,
    trace: str = "",
    *,
    for_all: bool = False,
    consequence: bool = False,
    linger: float = 0.0,
) -> NoReturn:
    """Ends this rank from any thread: a watchdog's way out while the main thread hangs in a collective.

    Args:
        code: The exit code.
        line: For people.
        trace: What to show below it: where the main thread is.
        for_all: Whether the line speaks for the whole job.
        consequence: Whether another rank is to blame.
        linger: Seconds to stay after the word is left, for others who need this process.
    """
    now = time.monotonic()
    _leave_word(Outcome(_rank(), code, line, trace, now, for_all=for_all, consequence=consequence))
    time.sleep(linger)
    for child in children(os.getpid()):  # a loader worker that hangs would stay
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
    os._exit(_code_for_torchrun(code))


def register() -> None:
    """Makes this process a rank that signals can't kill, that is no orphan, and that the launcher finds."""
    if _State.registered:
        return
    _State.registered = True
    preempt.install()
    die_with_parent()
    bind()
    _write_to_a_log_of_its_own()
    # Taken out of the environment: a program that the rank starts must not write into this launch.
    os.environ.pop(PATH_VARIABLE, None)
    folder = os.environ.pop(FOLDER_VARIABLE, None)
    if folder is None:
        if sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)
        return
    _State.folder = Path(folder)
    # Stays open for the life of the process: a segmentation fault writes its traceback there.
    faulthandler.enable((_State.folder / f"rank-{_rank()}.fault").open("w"))
    # Last: from this file on the launcher sends signals.
    write_whole(_State.folder / f"rank-{_rank()}.pid", str(os.getpid()))


def _write_to_a_log_of_its_own() -> None:
    """With several nodes, all ranks but the first write to files: what libraries say there would mix."""
    folder = os.environ.pop(LOGS_VARIABLE, None)
    if folder is None or _rank() == 0:
        return
    with contextlib.suppress(OSError):  # then to the terminal, as else
        Path(folder).mkdir(parents=True, exist_ok=True)
        with (Path(folder) / f"rank-{_rank()}.log").open("ab") as log:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(log.fileno(), stream.fileno())


def die_with_parent() -> None:
    """Lets the kernel end this process with the thread that started it (Linux): kill -9 leaves no orphan.

    For processes that a rank starts, too: the first thing that a loader worker should call.
    """
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != int(parent):  # it ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _outcome(main: Callable[[], int | None]) -> Outcome:
    """Runs `main` and puts its end into words."""
    try:
        return Outcome(_rank(), main() or EXIT_DONE, time=time.monotonic())
    except BadInputError as error:
        line = " ".join(str(error).split())
        return Outcome(_rank(), EXIT_BAD_INPUT, line, time=time.monotonic(), for_all=True)
    except (preempt.Stopped, DivergedError, OutOfMemory) as error:
        for_all = not isinstance(error, OutOfMemory)  # which can be of one rank alone
        return Outcome(_rank(), EXIT_FAILED, str(error), time=time.monotonic(), for_all=for_all)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return Outcome(_rank(), error.code or EXIT_DONE, time=time.monotonic())
        return Outcome(_rank(), EXIT_FAILED, str(error.code), time=time.monotonic())
    except BaseException as error:
        return _raised(error)


def _raised(error: BaseException) -> Outcome:
    now = time.monotonic()
    if dead := dead_worker(error):
        return Outcome(_rank(), EXIT_FAILED, dead, time=now)
    frames = error.__traceback__ and error.__traceback__.tb_next  # without the frame of this module
    text = "".join(traceback.format_exception(type(error), error, frames))
    line = traceback.format_exception_only(type(error), error)[-1].strip()
    consequence = any(sign in text[-2000:] for sign in _CONSEQUENCES)
    return Outcome(_rank(), EXIT_FAILED, line, text, now, consequence=consequence)


def _leave_word(outcome: Outcome) -> None:
    """Tells the launcher, or else the user."""
    outcome = replace(outcome, line=redact_text(outcome.line), traceback=redact_text(outcome.traceback))
    text = f"trainer: {outcome.line}\n" if outcome.line else ""
    text = text + outcome.traceback if outcome.for_all else outcome.traceback or text
    if _State.folder is not None:
        try:
            write_whole(_State.folder / f"rank-{outcome.rank}.json", json.dumps(asdict(outcome)))
            return
        except OSError as error:  # the disk is full, or the launcher is gone
            text += f"trainer: {error}\n"
    print(text, end="", file=sys.stderr, flush=True)


def _code_for_torchrun(code: int) -> int:
    """The exit code: under our launcher a requeue looks like success.

    Otherwise torchrun would stop the other ranks, and their loader workers, while they write the checkpoint.
    """
    return EXIT_DONE if _State.folder is not None and code == EXIT_REQUEUE else code
