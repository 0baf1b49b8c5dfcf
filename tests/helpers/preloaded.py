"""Processes of Python that don't import torch again: forks of a server that has imported it.

Exit codes, signals and output are those of whole processes, started as users start them: `python -m trainer`.
Each would import torch anew, 3 to 10 s on a busy machine. `run` and `Popen` here take the same words and
give them a fork instead, with a process id, session, streams, environment and signals of its own; the Pythons
that it starts (ranks, also those under torchrun) are its forks in turn, so parents and children are who they
would be. Not the same: /proc/PID/environ and cmdline, what a variable does while a library is imported, the
threads of a process that isn't told how many (one), and the interpreter's own end. Where that is the subject
a test takes `subprocess`.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import inspect
import io
import json
import logging
import multiprocessing.util
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
_SIGNATURE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_getfqdn = socket.getfqdn
_TOLD = 12  # characters of a number that the server tells: a process may have ended before its id is read


def run(
    words: Sequence[str | Path], timeout: float = 900, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """`subprocess.run` with its output captured as text, of `sys.executable`, a program and its arguments.

    The program is `-m MODULE`, `-c CODE` or a file; options are those of `Popen`.
    """
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(words, **{**streams, "text": True, **options}) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as late:
            process.send_signal(signal.SIGABRT)  # its stacks, if it has faulthandler on
            out, err = process.communicate()
            raise AssertionError(f"no end after {timeout:g} s: {late.cmd}\n{out}\n{err}") from None
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def call(function: Callable[..., object], *words: str | Path, **options: Any) -> str:
    """Calls a module's function in a process of its own, with texts; returns what it prints.

    What the function raises fails the test; options are those of `Popen`.
    """
    code = f"import sys; from {function.__module__} import {function.__name__} as f; f(*sys.argv[1:])"
    done = run([sys.executable, "-c", code, *map(str, words)], **{"cwd": ROOT, **options})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class _Forking(subprocess.Popen[Any]):
    """A Popen whose Pythons are forks; other programs start as ever."""

    def _execute_child(self, *given: Any) -> None:
        asked = _SIGNATURE.bind(self, *given).arguments
        listed = isinstance(asked["args"], (list, tuple))
        words = [os.fspath(word) for word in asked["args"]] if listed else []
        if words[:1] != [sys.executable] or not _runs_a_program(words[1:]) or asked["preexec_fn"]:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        ends = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
        streams = [number if end == -1 else end for number, end in enumerate(ends)]
        environment = os.environ if asked["env"] is None else asked["env"]
        request = {
            "words": words[1:],
            "folder": os.fspath(asked["cwd"] or Path.cwd()),
            "environment": {name: os.fspath(value) for name, value in environment.items()},
            "session": bool(asked["start_new_session"]),
        }
        self.pid = self._start(request, streams)
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in pipes))  # type: ignore[attr-defined]

    def _start(self, request: dict[str, Any], streams: list[int]) -> int:
        return _fork(request, streams)


class Popen(_Forking):
    """`subprocess.Popen` for a Python that is a fork of the server."""

    _status: socket.socket | None = None  # of a fork; other programs are this process's own children

    def _start(self, request: dict[str, Any], streams: list[int]) -> int:
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as text:
            text.write(json.dumps(request).encode())
            text.flush()
            with _server_lock:
                socket.send_fds(_server()[0], [b"."], [*streams, text.fileno(), theirs.fileno()])
        theirs.close()
        told = ours.recv(_TOLD)
        assert told, "the server of preloaded processes is gone"
        self._status = ours
        return int(told)

    def poll(self) -> int | None:
        return super().poll() if self._status is None else self._ended(self._status, 0)

    def wait(self, timeout: float | None = None) -> int:
        if self._status is None:
            return super().wait(timeout)
        if (code := self._ended(self._status, timeout)) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def _ended(self, status: socket.socket, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([status], [], [], timeout)[0]:
            self.returncode = int(status.recv(_TOLD))
            status.close()
        return self.returncode


_server_lock = threading.Lock()
_servers: dict[int, tuple[socket.socket, int]] = {}


def parent() -> int:
    """Process id of the parent of this process's forks."""
    with _server_lock:
        return _server()[1]


def _server() -> tuple[socket.socket, int]:
    """The way to this process's server, started when it is first needed, and its process id."""
    if os.getpid() not in _servers:
        ours, theirs = socket.socketpair()
        words = [sys.executable, "-m", __name__, str(theirs.fileno())]
        # It ends when the socket is closed, so with this process.
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True}
        # OpenMP reads it when torch is imported; threads that spin while they wait starve a busy machine.
        options["env"] = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        server = subprocess.Popen(words, cwd=ROOT, pass_fds=[theirs.fileno()], **options)
        theirs.close()
        _servers[os.getpid()] = ours, server.pid
    return _servers[os.getpid()]


def _serve(control: socket.socket) -> None:
    """Forks whatever is asked for, and tells its process id and then its exit code."""
    _preload()
    gc.collect()
    gc.freeze()
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            for pid in list(running):
                ended, how = os.waitpid(pid, os.WNOHANG)
                if ended:
                    _tell(running[pid], os.waitstatus_to_exitcode(how))
                    os.close(running.pop(pid))
        if control in ready:
            data, fds, _, _ = socket.recv_fds(control, 1, 5)
            if not data:
                return
            *streams, text, status = fds
            with os.fdopen(text, "rb") as file:
                file.seek(0)
                request = json.load(file)
            pid = _fork(request, streams)
            running[pid] = status
            _tell(status, pid)
            for stream in streams:
                os.close(stream)


def _tell(status: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits any more
        os.write(status, f"{number:{_TOLD}}".encode())


def _preload() -> None:
    subprocess.Popen = _Forking  # type: ignore[misc]  # first of all: torchrun's modules keep what they import
    import trainer
    from tests.helpers.late import import_late

    for module in pkgutil.walk_packages(trainer.__path__, "trainer."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    importlib.import_module("torch.distributed.run")
    importlib.import_module("torch.utils.tensorboard")
    import_late()


def _runs_a_program(words: Sequence[str]) -> bool:
    words = words[1:] if words[:1] == ["-u"] else words
    if words[1:2] == ["trainer.commands.export.reload"]:  # meant to be fresh; as a fork it hung at times
        return False
    return bool(words) and (words[0] in ("-m", "-c") or words[0].endswith(".py"))


def _fork(request: Mapping[str, Any], streams: Sequence[int]) -> int:
    """Starts the process that was asked for; returns its id once its session is its own, as Popen does."""
    ready, begun = os.pipe()
    before = _open_files()
    pid = os.fork()
    if not pid:
        # What a library has opened anew in this fork, as libuv does, it closes by number in the next one.
        kept = {number for number, file in _open_files().items() if before.get(number) != file}
        if request["session"]:
            os.setsid()
        os.close(begun)
        _become(request, streams, kept)
    os.close(begun)
    os.read(ready, 1)
    os.close(ready)
    return pid


def _open_files() -> dict[int, str]:
    files = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (often, and quick)
        with contextlib.suppress(OSError):  # the folder itself
            files[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return files


def _become(request: Mapping[str, Any], streams: Sequence[int], kept: set[int]) -> NoReturn:
    """Turns this fork into the process that was asked for; it ends with it."""
    code = 1
    try:
        _forget()
        _take_streams(streams, kept)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        if "TRAINER_TEST" in os.environ:
            from tests.mutants.contexts import take_context

            take_context()
        code = _run(list(request["words"]))
    except BaseException:
        traceback.print_exc()
    finally:
        _end(code)


def _forget() -> None:
    """Resets the state of the parent: handlers, exit functions, and torchrun's settings."""
    signal.set_wakeup_fd(-1)
    for name in ("TERM", "USR1", "USR2", "HUP", "CHLD", "ABRT"):
        signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.disable()
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    logging.disable(logging.NOTSET)
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.filterwarnings("ignore", category=kind)
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # they are there
    socket.getfqdn = _getfqdn
    tempfile.tempdir = None  # this process's own TMPDIR decides
    from trainer.config.user_file import folders_closed

    with folders_closed():  # those of the launcher
        pass
    _servers.clear()


def _take_streams(streams: Sequence[int], kept: set[int]) -> None:
    high = [os.dup(stream) for stream in streams]  # none of them may be overwritten by another
    for number, source in enumerate(high):
        os.dup2(source, number)
    for number in {*_open_files()} - kept:
        if number > 2:
            with contextlib.suppress(OSError):
                os.close(number)
    names = ("stdin", "stdout", "stderr")
    _left.extend(getattr(sys, name) for name in names)
    for number, name in enumerate(names):
        raw = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
        buffered: Any = io.BufferedReader(raw) if number == 0 else io.BufferedWriter(raw)
        errors = "backslashreplace" if number == 2 else "strict"
        stream = io.TextIOWrapper(buffered, "utf-8", errors, line_buffering=number == 2 or raw.isatty())
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


# Whose buffers hold what the parent has still to write: kept, because at their end they would write it here.
_left: list[Any] = []


def _run(words: list[str]) -> int:
    """Runs a program as the interpreter would; returns its exit code."""
    import torch

    # OpenMP's threads don't survive a fork, and what this process starts are forks: a launcher computes
    # alone, and tells its ranks how many they are to have.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if words[0] == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        del words[0]
    kind = words.pop(0) if words[0] in ("-m", "-c") else ""
    first = str(Path(words[0]).resolve().parent) if not kind else str(Path.cwd()) if kind == "-m" else ""
    further = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [first, *further, *_PATH]
    if further:
        sys.modules.pop("sitecustomize", None)
        importlib.invalidate_caches()
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module("sitecustomize")
    try:
        if kind == "-c":
            main = types.ModuleType("__main__")
            sys.modules["__main__"] = main
            sys.argv[:] = ["-c", *words[1:]]
            exec(compile(words[0], "<string>", "exec"), main.__dict__)
        elif kind:
            sys.argv[:] = words
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        print(left.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """Ends as an interpreter does, but for taking its objects apart."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BaseException:
        code = code or 120
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


_PATH = [path for path in sys.path if path not in ("", str(ROOT))]

if __name__ == "__main__":
    # As a module, not as __main__, which the programs that it runs will be.
    importlib.import_module("tests.helpers.preloaded")._serve(socket.socket(fileno=int(sys.argv[1])))
