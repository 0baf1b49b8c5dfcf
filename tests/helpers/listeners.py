"""Sockets on which a process and its children listen, from /proc."""

import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_LISTENS = "0A"


class Listener(NamedTuple):
    """A socket that takes connections, and the process whose it is."""

    pid: int
    address: str
    port: int


def listeners(pids: Iterable[int]) -> list[Listener]:
    """The TCP sockets of processes that take connections, of IPv4 and IPv6."""
    found = list[Listener]()
    for pid in pids:
        inodes = set[str]()
        for entry in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                inodes.add(str(entry.readlink()))
        for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                local, state, inode = (line.split()[place] for place in (1, 3, 9))
                if state == _LISTENS and f"socket:[{inode}]" in inodes:
                    address, _, port = local.partition(":")
                    found.append(Listener(pid, _text(address, family), int(port, 16)))
    return found


def _text(address: str, family: socket.AddressFamily) -> str:
    """An address as people write it; the kernel writes words of four bytes, each the wrong way round."""
    words = bytes.fromhex(address)
    turned = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    return socket.inet_ntop(family, turned)
