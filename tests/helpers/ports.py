"""Ports that programs under test are told by number: no other test and no connection takes them meanwhile."""

import socket
from contextlib import ExitStack
from itertools import count
from pathlib import Path

_WIDTH = 4  # a launcher of several nodes needs two
_COUNT = 2000
_held: list[ExitStack] = []
_next = count()


def free_port(width: int = _WIDTH) -> int:
    """The first of `width` ports in a row, at least four, that are this process's until it ends.

    They lie outside of the range from which the system takes ports for connections and for port 0.
    """
    slots = -(-width // _WIDTH)
    for place in _next:
        if place == 2 * _COUNT:
            break
        port = _first() + place % _COUNT * _WIDTH
        with ExitStack() as locks, ExitStack() as probes:
            try:
                for slot in range(port, port + slots * _WIDTH, _WIDTH):
                    # A name that only one process can have, in the same network namespace as the port.
                    lock = locks.enter_context(socket.socket(socket.AF_UNIX))
                    lock.bind(f"\0trainer-test-port-{slot}")
                for number in range(port, port + slots * _WIDTH):
                    probes.enter_context(socket.create_server(("", number)))
            except OSError:
                continue
            _held.append(locks.pop_all())
            return port
    raise AssertionError(f"no {width} ports in a row are free from {_first()} on")


def _first() -> int:
    """The lowest: below the range for connections where there is room, else above."""
    words = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    low, high = (int(word) for word in words)
    size = _COUNT * _WIDTH
    if low - size > 10_000:
        return low - size
    # Where the range takes all, at least the tests don't disturb each other.
    return high + 1 if high + size < 1 << 16 else (1 << 16) - size
