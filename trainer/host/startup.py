"""Settings that a process makes before anything else is imported. Imports no torch."""

import codecs
import io
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

from trainer.host.limits import allowed_cpus, read_limits
from trainer.host.reading import text_of


def print_anything() -> None:
    """Lets standard output take any character, as standard error does: LC_ALL=C may be set.

    A standard stream that is closed leads nowhere then: else the next file would be opened in its place, and
    what a library prints would be written into that.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    _take_anything(sys.stdout)


def _take_anything(stream: object) -> bool:
    """Lets a stream write any character; returns True if that changed it.

    Bytes of a path that are no text are written as they came, other characters that it lacks as \\xNN.
    """
    if not isinstance(stream, io.TextIOWrapper) or stream.errors not in _RAISING:
        return False
    stream.reconfigure(errors=_ANY)
    return True


# Those that raise; in a C locale Python sets surrogateescape, which can't write an ü in ASCII.
_RAISING = ("strict", "surrogateescape", "surrogatepass")
_ANY = "trainer.any-character"


def _escaped(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replaces what an encoding lacks, and never raises for that: an error handler for `codecs`."""
    wide = isinstance(error, UnicodeEncodeError) and re.search("16|32", error.encoding)
    try:
        return codecs.lookup_error("backslashreplace" if wide else "surrogateescape")(error)
    except UnicodeEncodeError:
        return codecs.lookup_error("backslashreplace")(error)


codecs.register_error(_ANY, _escaped)


@contextmanager
def any_character() -> Iterator[None]:
    """Makes both standard streams write any character within the block, also those put in their place."""
    streams: tuple[Any, ...] = (sys.stdout, sys.stderr)
    before = [getattr(stream, "errors", "") for stream in streams]
    changed = [(one, errors) for one, errors in zip(streams, before, strict=True) if _take_anything(one)]
    try:
        yield
    finally:
        for stream, errors in changed:
            if not stream.closed and stream.errors == _ANY:
                stream.reconfigure(errors=errors)


# Turns of libgomp's waiting loop, about 0.1 ms: docs/results/waits.json.
SPINS = 10_000
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_LEAST_TICKS = 20  # of each CPU, for a measurement of its idle time
_NOISE_CPUS = 0.3
_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def idle_ticks(stat: str) -> dict[int, tuple[int, int]]:
    """Returns the idle and all clock ticks of each CPU from the text of /proc/stat (proc(5))."""
    found = dict[int, tuple[int, int]]()
    for line in stat.splitlines():
        name, *rest = line.split() or [""]
        ticks = [int(word) for word in rest[:8] if word.isdecimal()]  # the guests' are part of them
        if re.fullmatch("cpu[0-9]{1,9}", name) and len(ticks) == len(rest[:8]) > 4:
            found[int(name[3:])] = ticks[3] + ticks[4], sum(ticks)
    return found


def _now() -> tuple[dict[int, tuple[int, int]], float]:
    return idle_ticks(text_of("/proc/stat")), time.process_time()


_AT_IMPORT = _now()


def free_cpus(
    before: Mapping[int, tuple[int, int]], after: Mapping[int, tuple[int, int]], own: float, cpus: Set[int]
) -> float:
    """Returns how many CPUs other processes leave idle; 0.0 if the time in between is too short to tell.

    Args:
        before: Idle and all ticks by CPU, see `idle_ticks`.
        after: The same, later.
        own: Ticks that this process used in between.
        cpus: CPUs on which this process may run.
    """
    free, window = own, math.inf
    for cpu in cpus & before.keys() & after.keys():
        free += after[cpu][0] - before[cpu][0]
        window = min(window, after[cpu][1] - before[cpu][1])
    return free / window if _LEAST_TICKS <= window < math.inf else 0.0


def choose_waiting(needed: float = math.inf) -> None:
    """Decides how OpenMP's threads wait for each other; before torch's import, at which libgomp reads it.

    A thread that spins before it sleeps is faster where it has a CPU of its own, and several times slower
    where another process wants it. What the user set stays. No result depends on it.

    Args:
        needed: CPUs that the threads and loader workers of this job want; they sleep at once if other
            processes, or a quota, leave fewer.
    """
    if "torch" in sys.modules or any(name in os.environ for name in _VARIABLES):
        return
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    if needed == math.inf:
        return
    cpus, (after, seconds) = allowed_cpus(), _now()
    free = free_cpus(_AT_IMPORT[0], after, (seconds - _AT_IMPORT[1]) * _TICKS, cpus)
    if needed <= free + _NOISE_CPUS and read_limits().cpus >= len(cpus):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


def waiting(environ: Mapping[str, str]) -> str:
    """Returns how OpenMP's threads wait, for people."""
    return ", ".join(f"{name}={environ[name]}" for name in _VARIABLES if name in environ)
