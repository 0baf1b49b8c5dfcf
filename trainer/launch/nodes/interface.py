"""The network interface that ranks meet at."""

import os

from trainer.host.interfaces import interface_of


def gloo_interface(address: str) -> dict[str, str]:
    """Names gloo the interface of an address; else it takes that of this host's own name, which it looks up.

    That is a loopback address on many hosts, none on others, and where no name service answers it takes ten
    seconds for each process group. NCCL chooses for itself.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    name = interface_of(address.removeprefix("::ffff:"))
    return {"GLOO_SOCKET_IFNAME": name} if name else {}
