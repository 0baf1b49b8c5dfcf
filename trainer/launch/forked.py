"""A rank as a fork of its launcher, in which torch is imported already."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from runpy import run_module

# They have threads that a fork lacks and waits for.
_UNFORKABLE = ("fsspec", "pyarrow", "wandb", "mlflow")


def can_fork() -> bool:
    """Whether a fork of this process can replace a new process.

    That needs Linux, no other Python thread, and no library that breaks in a fork. The caller must not have
    computed with several threads: OpenMP's don't survive a fork either.
    """
    return (
        sys.platform == "linux"
        and threading.active_count() == 1
        and not any(name in sys.modules for name in _UNFORKABLE)
    )


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
