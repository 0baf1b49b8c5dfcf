"""The store by which the ranks of one host find each other: torch's, where no other host reaches it.

By itself torch's TCPStore listens on all interfaces, whatever address it is given.
"""

import socket
from typing import Any

from trainer.host.names import from_files_alone


def listen(address: str) -> socket.socket:
    """A socket at a free port of what the address stands for first, as who connects to it tries it first."""
    family, *_, at = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(at[:2], family=family, backlog=1024)


def store_on(listening: socket.socket, address: str) -> Any:
    """The store at a socket, until it is let go of; it has threads, which a fork doesn't keep.

    torchrun, run in this process, takes it for the one that it wants at that port (multi_tenant).
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    port, file = listening.getsockname()[1], listening.detach()
    how: dict[str, Any] = {
        "is_master": True,
        "wait_for_workers": False,
        "multi_tenant": True,
        "master_listen_fd": file,
    }
    with from_files_alone(address):
        try:
            return TCPStore(address, port, **how)
        except NotImplementedError:  # by libuv torch 2.5 opens its port itself
            return TCPStore(address, port, use_libuv=False, **how)
