"""The current process as a rank: signals, CPUs and logs while it is one, and its exit record.

Under the launcher a rank writes an exit record to a file, because torchrun turns every exit code into 1;
under a plain `torchrun -m trainer` it prints its own traceback and exits with its own code.

All that is one per process is here: the flag of `signals`, the exit record, what must stay until the end.
(`observe.phases` has its timer, which a training without a rank also restarts.)
"""

import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TextIO

from trainer.config.redact import redact_text
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE
from trainer.host.affinity import CpuShares, bind
from trainer.host.environment import RANK_MARK
from trainer.host.files import open_own, own_folder, write_whole
from trainer.host.processes import children
from trainer.host.startup import print_anything
from trainer.launch import signals
from trainer.launch.exit_record import ExitRecord, record_of, said_of
from trainer.launch.folder import LEFT, Launch, read_launch, take_request, write_content
from trainer.launch.nodes import LOGS, mark_of_rank
from trainer.observe.console import tell, tell_as

_PR_SET_PDEATHSIG = 1
_ADDED = os.O_WRONLY | os.O_APPEND | os.O_CREAT

_current: "Worker | None" = None
_interrupted: signal.Signals | None = None  # of fit
_dumps = False  # whether faulthandler waits
_held = list[object]()
atexit.register(_held.clear)


class Worker:
    """The current process as a rank, while the context is open; open it before slow imports.

    From then on no signal kills it (`signals.StopFlag`), it dies with its parent, keeps to its CPUs, and the
    launcher finds it. What is raised inside ends with the context: it is in the exit record.

    Attributes:
        rank: Its global number.
        code: Its exit code (see `trainer.errors`); None counts as 0. An exception overrides it, see
            `exit_record.record_of`.
        record: Its exit record; None before its end.
        launch: Settings of the launch; None without our launcher.
        hang_file: See `dump_unless_called_within`; None without our launcher.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        """Takes the folder of the launch (`trainer.launch.folder`); None without our launcher."""
        self.rank = int(os.environ.get("RANK", "0"))
        self.code: int | None = EXIT_DONE
        self.record: ExitRecord | None = None
        self.launch: Launch | None = None
        self._pid = os.getpid()
        self._folder = None if folder is None else Path(folder)
        self._flag = signals.StopFlag()
        self._resumable: Callable[[], bool] | None = None
        self._prepared = False  # once this rank has read the command
        self._record_lock = threading.Lock()
        self._stack = contextlib.ExitStack()
        self.hang_file: TextIO | None = None

    @property
    def requested(self) -> signal.Signals | None:
        """Returns the first signal that asked this rank to stop, or None."""
        return self._flag.requested

    @cached_property
    def request(self) -> dict[str, Any]:
        """Returns the request to the ranks of this launch."""
        assert self._folder is not None, "only a launcher starts this module"
        return take_request(self._folder, self.rank)

    @property
    def exit_code(self) -> int:
        """Returns the exit code, once the context is closed. Under our launcher a requeue exits with 0.

        Otherwise torchrun would stop the other ranks, and their loader workers, while they write the
        checkpoint.
        """
        assert self.record is not None
        return EXIT_DONE if self._folder and self.record.code == EXIT_REQUEUE else self.record.code

    def leave_for_launcher(self, values: Mapping[str, Any]) -> None:
        """Leaves values for the launcher that outlive this process: they change the request of a restart."""
        if self._folder is not None:
            write_content(self._folder / LEFT, values)

    def prepares(self, resumable: Callable[[], bool] | None) -> None:
        """Sets what a signal does: it ends this rank at once, as no work is lost; or it is noted.

        Args:
            resumable: Returns whether the run folder has a checkpoint, for the exit code; None: signals are
                noted from now on.
        """
        self._resumable, self._prepared = resumable, True
        if resumable is not None and self._flag.requested is not None:
            self._end_where_nothing_is_lost(self._flag.requested)

    def _note(self, number: signal.Signals) -> None:
        self._flag.note(number)
        self._end_where_nothing_is_lost(number)

    def _end_where_nothing_is_lost(self, number: signal.Signals) -> None:
        if (resumable := self._resumable) is None or os.getpid() != self._pid:
            return
        self._resumable = None
        code = EXIT_REQUEUE if resumable() else EXIT_FAILED
        line = signals.before_it_began(number, code == EXIT_REQUEUE)
        if code == EXIT_REQUEUE and self._folder is not None and self.rank == 0:
            tell(f"trainer: {line}\n", "warning")  # of a job that is requeued the launcher says nothing
        said = self.rank and (code == EXIT_REQUEUE or self._folder is None)
        leave_now(code, "" if said else line, for_all=True, stopped=True)

    def __enter__(self) -> "Worker":
        """Takes the signals, registers with the launcher, and ties this process to its parent's life."""
        global _current  # noqa: PLW0603
        assert _current is None, "this process is a rank already"
        with contextlib.ExitStack() as stack:
            stack.enter_context(signals.taken(self._note))
            stack.callback(signals.block)  # from then on nothing changes the exit code
            stack.callback(os.environ.pop, RANK_MARK, None)
            os.environ.update(mark_of_rank(os.environ))
            # The launcher starts ranks with the signals blocked, so that none kills them before this line.
            signals.unblock()
            self.launch = None if self._folder is None else read_launch(self._folder)
            if self.launch is not None:
                tell_as(self.launch.told, self.rank)
            die_with_parent(None if self.launch is None else self.launch.parent)
            bind(cpu_shares_of(self.launch))
            print_anything()
            self._write_faults(stack)
            _current = self
            stack.callback(_forget)
            if self._folder is not None:  # last: from this file on the launcher sends signals
                write_whole(self._folder / f"rank-{self.rank}.pid", str(os.getpid()))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        """Writes the exit record, and gives back signals and resources."""
        if os.getpid() != self._pid:  # a fork in somebody's code came through to here: it is no rank
            os._exit(0 if error is None else EXIT_FAILED)
        self.write_exit_record(record_of(self.rank, self.code, error))
        self._stack.close()
        return True

    def write_exit_record(self, record: ExitRecord) -> None:
        """Writes the exit record for the launcher, or prints it without one: once, by the first caller."""
        with self._record_lock:
            if self.record is not None:
                return
            self.record = replace(
                record, line=redact_text(record.line), traceback=redact_text(record.traceback)
            )
        self._tell(self.record)  # without the lock: on a disk that hangs the other thread can still leave

    def _tell(self, record: ExitRecord) -> None:
        text = said_of(record) if record.line else ""
        if record.code == EXIT_BAD_INPUT and self._folder is None and self._another_says_it(record):
            text = ""
        text = text + record.traceback if record.for_all else record.traceback or text
        if self._folder is not None:
            try:
                write_whole(self._folder / f"rank-{record.rank}.json", json.dumps(asdict(record)))
                return
            except OSError as error:  # the disk is full, or the launcher is gone
                text += f"trainer: {error}\n"
        if text:
            tell(text, "error")

    def _another_says_it(self, record: ExitRecord) -> bool:
        """True for what the first rank of this host refuses, too, or what another rank has refused."""
        return record.told or (not self._prepared and os.environ.get("LOCAL_RANK", "0") != "0")

    def write_to_a_log_of_its_own(self, run: Path) -> None:
        """Redirects output to a file of the run folder in jobs with several nodes, for all ranks but the
        first.
        """
        if self.launch is None or not self.launch.logs or self.rank == 0:
            return
        logs = run / LOGS
        with contextlib.suppress(OSError):  # then to the terminal, as else
            logs.parent.mkdir(parents=True, exist_ok=True)
            number = open_own(own_folder(logs) / f"rank-{self.rank}.log", _ADDED)
            with os.fdopen(number, "ab") as log:
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                    os.dup2(log.fileno(), stream.fileno())

    def _write_faults(self, stack: contextlib.ExitStack) -> None:
        """Lets faulthandler write tracebacks of crashes to a file for the launcher, or to the terminal."""
        if self._folder is not None:
            file = stack.enter_context((self._folder / f"rank-{self.rank}.fault").open("w"))
            faulthandler.enable(file)
            hangs = self._folder / f"rank-{self.rank}.hang"
            self.hang_file = stack.enter_context(hangs.open("a"))  # to be emptied while it is written
            stack.callback(dump_no_more)
        elif sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)
        stack.callback(faulthandler.disable)


def current() -> Worker | None:
    """Returns the rank of this process, if it is one."""
    return _current


def requested() -> signal.Signals | None:
    """Returns the first signal that asked this process to stop, or None."""
    return _interrupted if _current is None else _current.requested


@contextlib.contextmanager
def interrupt_noted() -> Iterator[None]:
    """A context in which the first Ctrl-C of a caller of `fit` asks for a stop; a second one is Python's own.

    Outside of the main thread, in a rank, and beside a handler of the user's nothing changes.
    """
    global _interrupted  # noqa: PLW0603
    in_main = threading.current_thread() is threading.main_thread()
    if (
        _current is not None
        or not in_main
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return

    def note(*_: object) -> None:
        global _interrupted  # noqa: PLW0603
        _interrupted = signal.SIGINT
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _interrupted = None


def note_signals() -> None:
    """Lets a signal be noted from now on, see `Worker.prepares`."""
    if _current is not None:
        _current.prepares(None)


def cpu_shares() -> CpuShares:
    """Returns the CPUs of the ranks of this host."""
    return cpu_shares_of(None if _current is None else _current.launch)


def cpu_shares_of(launch: Launch | None) -> CpuShares:
    """Returns the CPUs of a launch's ranks; without our launcher they aren't bound."""
    return CpuShares() if launch is None else launch.cpus


def hold(thing: object) -> None:
    """Keeps an object until this process ends."""
    _held.append(thing)


def leave_now(
    code: int,
    line: str,
    trace: str = "",
    *,
    for_all: bool = False,
    consequence: bool = False,
    told: bool = False,
    stopped: bool = False,
    linger: float = 0.0,
) -> NoReturn:
    """Ends this rank from any thread: a watchdog's way out while the main thread hangs in a collective.

    Args:
        code: The exit code.
        line: The message for the user.
        trace: The traceback of the main thread, to show below it.
        for_all: Whether the line speaks for the whole job.
        consequence: Whether another rank is to blame.
        told: Whether code and line are those of another rank that failed.
        stopped: Whether a signal ends it.
        linger: Seconds to stay after the record is written, for others who need this process.
    """
    now, worker = time.monotonic(), _current or Worker()
    how = (for_all, consequence, told, stopped)
    worker.write_exit_record(ExitRecord(worker.rank, code, line, trace, now, *how))
    time.sleep(linger)
    for child in children(os.getpid()):  # a loader worker that hangs would stay
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
    os._exit(worker.exit_code)


def dump_unless_called_within(seconds: float, where: str) -> None:
    """Lets faulthandler write all stacks, unless this is called again in time.

    For code that holds the GIL, so that no thread of ours runs. Under the launcher it writes into a file,
    again and again; the second dump counts as a hang, as the first may come of a job that was suspended as a
    whole. Without the launcher the process ends, with code 1, after five times as long.

    Args:
        seconds: The time.
        where: A line on where this rank is.
    """
    global _dumps  # noqa: PLW0603
    if _current is None:
        return
    dump_no_more()
    _dumps = True
    if (file := _current.hang_file) is None:
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(5 * seconds, exit=True, file=sys.__stderr__)
        return
    file.truncate(0)
    file.write(where)
    file.flush()
    faulthandler.dump_traceback_later(seconds, repeat=True, file=file)


def dump_no_more() -> None:
    """Ends what `dump_unless_called_within` began."""
    global _dumps  # noqa: PLW0603
    if _dumps:
        faulthandler.cancel_dump_traceback_later()
    _dumps = False


def die_with_parent(parent: int | None) -> None:
    """Lets the kernel end this process with the thread that started it (Linux): kill -9 leaves no orphan.

    Args:
        parent: Process id of the expected parent; None if unknown.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:  # it ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def _forget() -> None:
    global _current  # noqa: PLW0603
    _current = None


def _in_a_fork() -> None:
    """Resets a fork of a rank, such as a loader worker: it isn't this rank."""
    if _current is not None:
        _forget()
        signals.leave_to_rank()


# A fork of a process in which faulthandler waits would hang where it ends that wait: at its exit at latest.
os.register_at_fork(before=dump_no_more, after_in_child=_in_a_fork)
