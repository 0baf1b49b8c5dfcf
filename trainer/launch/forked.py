"""A rank as a fork of its launcher, in which torch is imported already."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from runpy import run_module
from typing import Any, NamedTuple

from trainer.host.processes import openmp_threads
from trainer.host.reading import text_of

_ENDING_S = 1.0  # for threads that are about to end

# What a launcher hands to a rank that is a fork of it: a user's task, so that its file is run once.
handed: list[Any] = []


_pool_at_fork = False
_without_pool = False


def _before_fork() -> None:
    global _pool_at_fork  # noqa: PLW0603
    _pool_at_fork = bool(openmp_threads())


def _in_a_fork() -> None:
    global _without_pool  # noqa: PLW0603
    _without_pool = _without_pool or _pool_at_fork


os.register_at_fork(before=_before_fork, after_in_child=_in_a_fork)


def hangs_in_parallel() -> bool:
    """True in a fork of a process in which torch had computed with several threads: here that would hang.

    OpenMP's threads don't come through a fork, and the library waits for them. One thread can compute.
    """
    return _without_pool


class Footprint(NamedTuple):
    """Resources of this process that a fork doesn't share safely with it.

    Attributes:
        threads: Ids of native threads, those of OpenBLAS (which survives a fork) among them.
        files: Open file descriptors, with what each is open on.
    """

    threads: frozenset[str]
    files: frozenset[tuple[str, str]]


def footprint() -> Footprint:
    """Returns the threads and the open files of this process; none where /proc lacks them."""
    files = set[tuple[str, str]]()
    with suppress(OSError):
        for link in list(Path("/proc/self/fd").iterdir()):
            with suppress(OSError):  # the descriptor that listed them is closed again
                files.add((link.name, str(link.readlink())))
        tasks = Path("/proc/self/task").iterdir()
        return Footprint(frozenset(task.name for task in tasks), frozenset(files))
    return Footprint(frozenset(), frozenset())


def can_fork(before: Footprint, *, files: bool) -> bool:
    """True if a fork of this process can replace a new process.

    That needs Linux, no other Python thread, and no native thread that was started since `before`: those of a
    library are missing in a fork, and a call that waits for one hangs (OpenMP's, pyarrow's, a tracker's). A
    process that is such a fork itself can't.

    Args:
        before: Footprint before any code was run that may start threads.
        files: True to require, too, that no file was opened and left open since: LMDB's environments and
            sockets belong to the process that opened them.
    """
    now, late = footprint(), time.monotonic() + _ENDING_S
    while any(map(_is_running, now.threads - before.threads)) and time.monotonic() < late:
        time.sleep(0.001)
        now = footprint()
    # By id: OpenBLAS's threads end where a process is forked, and as many of another library may follow.
    alone = threading.active_count() == 1 and now.threads and now.threads <= before.threads
    able = sys.platform == "linux" and bool(alone) and not hangs_in_parallel()
    return able and not (files and now.files - before.files)


def _is_running(thread: str) -> bool:
    """True unless a thread sleeps, as a library's does; one that Python has joined is seen until its end."""
    return text_of(f"/proc/self/task/{thread}/stat").rpartition(") ")[2][:1] != "S"


class ForkedRank:
    """A fork that runs a module as `as_launcher` does, with the methods of `subprocess.Popen`."""

    def __init__(
        self,
        words: Sequence[str],
        variables: Mapping[str, str],
        path: Sequence[str],
        output: int | None = None,
        closed: int | None = None,
    ) -> None:
        """Starts the process in a session of its own.

        Args:
            words: The module, and its arguments: the folder of the launch first.
            variables: Environment variables in addition to this process's.
            path: Its module search path.
            output: File descriptor for its standard output; None: this process's.
            closed: File descriptor to close in it.
        """
        context = multiprocessing.get_context("fork")
        self._process = context.Process(
            target=_run, args=(list(words), dict(variables), list(path), output, closed), name="MainProcess"
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def sentinel(self) -> int:
        """File descriptor for `multiprocessing.connection.wait`, ready at the process's end."""
        return self._process.sentinel

    @property
    def returncode(self) -> int | None:
        """Exit code, as `Popen.returncode`."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Returns the exit code if the process has ended, as `Popen.poll`."""
        return self._process.exitcode

    def wait(self) -> int:
        """Waits for the end, as `Popen.wait`."""
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def kill(self) -> None:
        """Kills the process, as `Popen.kill`."""
        self._process.kill()


def _run(
    words: list[str], variables: Mapping[str, str], path: list[str], output: int | None, closed: int | None
) -> None:
    gc.freeze()  # no collection need look at what was imported, and copy its pages
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):  # the launcher's handlers
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if output is not None:
        os.dup2(output, 1)
    if closed is not None:
        os.close(closed)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    # torchrun takes defaults from PET_ variables, which are for those who start it without us.
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]
    os.environ.update(variables)
    sys.path[:], sys.argv[:] = path, words
    run_module(words[0], run_name="__main__", alter_sys=True)
