"""The TCP store of the ranks of one host: torch's, on an address that no other host reaches.

By itself torch's TCPStore listens on all interfaces, whatever address it is given.
"""

import socket
from typing import Any

from trainer.host.interfaces import from_files_alone


def listen(address: str) -> socket.socket:
    """Opens a socket on a free port of the first address of the name, which clients also try first."""
    family, *_, at = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(at[:2], family=family, backlog=1024)


def store_on(listening: socket.socket, address: str) -> Any:
    """Makes the store on a socket, until it is released; its threads don't survive a fork.

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
