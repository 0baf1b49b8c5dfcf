"""Ports that programs under test are told by number: no other test and no connection takes them meanwhile."""

import socket
from contextlib import ExitStack
from itertools import count
from pathlib import Path

_WIDTH = 4  # a launcher of several nodes needs two, a Slurm three
_COUNT = 2000
_held: list[socket.socket] = []
_next = count()


def free_port() -> int:
    """The first of four ports in a row that are this process's until it ends.

    They lie outside of the range from which the system takes ports for connections and for port 0.
    """
    for place in _next:
        if place == 2 * _COUNT:
            break
        port = _first() + place % _COUNT * _WIDTH
        # A name that only one process can have, in the same network namespace as the port.
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0trainer-test-port-{port}")
            with ExitStack() as probes:
                for number in range(port, port + _WIDTH):
                    probes.enter_context(socket.create_server(("", number)))
        except OSError:
            lock.close()
            continue
        _held.append(lock)
        return port
    raise AssertionError(f"no {_WIDTH} ports in a row are free from {_first()} on")


def _first() -> int:
    """The lowest: below the range for connections where there is room, else above."""
    words = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    low, high = (int(word) for word in words)
    size = _COUNT * _WIDTH
    if low - size > 10_000:
        return low - size
    # Where the range takes all, at least the tests don't disturb each other.
    return high + 1 if high + size < 1 << 16 else (1 << 16) - size
