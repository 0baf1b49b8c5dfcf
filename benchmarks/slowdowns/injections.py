"""Injected slowdowns: each is a function of its `Run` that returns a context manager around it.

Most of it comes from outside: signals, control groups, a slow network or disk, other processes. Needs Linux,
and some of it root. All that is started or made is taken away at the end.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.slowdowns.run import Injection, Run
from tests.helpers.remote import S3, Web, files_below

_HERE = Path(__file__).parent
_CGROUPS = Path("/sys/fs/cgroup")
_AFTER_MARK = "trainer-slowdown"


def _injection(make: Callable[[Run], Iterator[None]]) -> Injection:
    return contextlib.contextmanager(make)


@functools.cache
def _shim() -> str:
    folder = Path(tempfile.gettempdir(), f"trainer-slow-calls-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    library, source = folder / "slow_calls.so", _HERE / "slow_calls.c"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        command = ["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"]
        subprocess.run(command, check=True)
    return str(library)


def slow_calls(below: str = "", **variables: int | str) -> Injection:
    """System calls that take longer, see slow_calls.c.

    Args:
        below: "run" (the run folder), or a folder of the data.
        variables: open_us, read_us, write_us, fsync_us, mb_us, socket_us, socket_mb_us, name, rank.
    """

    def inject(run: Run) -> Iterator[None]:
        run.environment["LD_PRELOAD"] = _shim()
        if below:
            run.environment["SLOW_BELOW"] = str(run.folder if below == "run" else run.work / below)
        run.environment |= {f"SLOW_{name.upper()}": str(value) for name, value in variables.items()}
        yield

    return _injection(inject)


def inside(what: str, **arguments: float) -> Injection:
    """Something slow in the user's code, see inside/users_code.py."""

    def inject(run: Run) -> Iterator[None]:
        run.environment["PYTHONPATH"] = str(_HERE / "inside")
        run.environment["SLOW_INSIDE"] = json.dumps({what: arguments})
        yield

    return _injection(inject)


@contextlib.contextmanager
def _beside(run: Run, do: Callable[[threading.Event], object]) -> Iterator[None]:
    """Does something in a thread once the run trains, until it is over."""
    over = threading.Event()

    def wait() -> None:
        while run.process is None and not over.wait(0.02):
            pass
        if not over.is_set() and run.wait_for_rows():
            do(over)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def pulses(rank: int, stopped: float, running: float) -> Injection:
    """A rank that is stopped for so many seconds and then runs for so many, again and again."""

    def inject(run: Run) -> Iterator[None]:
        def pulse(over: threading.Event) -> None:
            pids = run.processes(rank)[:1]
            with contextlib.suppress(ProcessLookupError):
                while pids and not run.over() and not over.is_set():
                    os.kill(pids[0], signal.SIGSTOP)
                    time.sleep(stopped)
                    os.kill(pids[0], signal.SIGCONT)
                    time.sleep(running)

        with _beside(run, pulse):
            yield

    return _injection(inject)


def burners(count: int) -> Injection:
    """Other processes that compute all the time."""

    def inject(run: Run) -> Iterator[None]:
        started: list[subprocess.Popen[bytes]] = []

        def burn(over: threading.Event) -> None:
            command = [sys.executable, "-c", "while True: pass"]
            started.extend(subprocess.Popen(command) for _ in range(count))
            while not run.over() and not over.wait(0.1):
                pass
            for process in started:
                process.kill()
                process.wait()

        with _beside(run, burn):
            yield

    return _injection(inject)


@contextlib.contextmanager
def _group(controller: str, name: str, files: dict[str, str]) -> Iterator[Path]:
    group = _CGROUPS / controller / f"{_AFTER_MARK}-{name}"
    group.mkdir(exist_ok=True)
    try:
        for file, value in files.items():
            (group / file).write_text(value)
        yield group
    finally:
        for _ in range(100):  # processes may be about to end
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


def _enter(run: Run, group: Path) -> None:
    run.prefix += ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]


def quota(cpus: float, rank: int | None = None) -> Injection:
    """A limit on CPU time of the whole run, or of one rank once it trains."""

    def inject(run: Run) -> Iterator[None]:
        limit = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": str(round(cpus * 100_000))}
        with _group("cpu", run.folder.name, limit) as group:

            def enter(_: threading.Event) -> None:
                for pid in run.processes(rank):
                    with contextlib.suppress(OSError):
                        (group / "cgroup.procs").write_text(str(pid))

            if rank is None:
                _enter(run, group)
            with _beside(run, enter) if rank is not None else contextlib.nullcontext():
                yield

    return _injection(inject)


def slow_device(read: int = 0, write: int = 0, forget: str = "") -> Injection:
    """A limit on what the disk gives and takes, in bytes per second; what is below `forget` isn't cached."""

    def inject(run: Run) -> Iterator[None]:
        number = run.work.stat().st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        limits = {"read_bps_device": read, "write_bps_device": write}
        files = {f"blkio.throttle.{name}": f"{device} {value}" for name, value in limits.items() if value}
        for path in (run.work / forget).rglob("*") if forget else ():
            if path.is_file():
                _forget(path)
        with _group("blkio", run.folder.name, files) as group:
            _enter(run, group)
            yield

    return _injection(inject)


def _forget(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def _in_namespace(name: str, commands: Sequence[str]) -> None:
    for command in ("ip link set lo up", *commands):
        subprocess.run(["ip", "netns", "exec", name, *command.split()], check=True)


def slow_network(megabits: int) -> Injection:
    """A network of its own, whose loopback carries so many Mbit/s: between ranks on one machine."""

    def inject(run: Run) -> Iterator[None]:
        name = f"slow-{os.getpid()}"
        subprocess.run(["ip", "netns", "add", name], check=True)
        try:
            rate = f"tc qdisc add dev lo root tbf rate {megabits}mbit burst 128kb latency 1s"
            _in_namespace(name, ["ip link set lo mtu 9000", rate])
            # Not `ip netns exec`, which would mount another /sys.
            run.prefix += ["nsenter", f"--net=/run/netns/{name}"]
            yield
        finally:
            subprocess.run(["ip", "netns", "delete", name], check=True)

    return _injection(inject)


def served(folder: str, seconds: float, mb_seconds: float = 0.0, s3: bool = False) -> Injection:
    """The data behind HTTP or S3, each answer so late: data.path becomes a URL, with a cache of its own."""

    def inject(run: Run) -> Iterator[None]:
        server = (S3 if s3 else Web)(files_below(run.work / folder))
        answer = server.app._app

        def late(environ: dict[str, object], start: Callable[..., object]) -> list[bytes]:
            body = b"".join(answer(environ, start))
            time.sleep(seconds + mb_seconds * len(body) / 1e6)
            return [body]

        server.app._app = late
        try:
            with tempfile.TemporaryDirectory(prefix="cache-", dir=run.work) as cache:
                run.settings += [f"data.path={server.url}", f"data.cache={cache}"]
                yield
        finally:
            server.close()

    return _injection(inject)
