"""The network interface that ranks meet at."""

import fcntl
import os
import socket
import struct

_SIOCGIFADDR = 0x8915


def gloo_interface(address: str) -> dict[str, str]:
    """Names gloo the interface of an address; else it takes that of this host's own name, which it looks up.

    That is a loopback address on many hosts, none on others, and where no name service answers it takes ten
    seconds for each process group. NCCL chooses for itself.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    name = interface_of(address.removeprefix("::ffff:"))
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


def interface_of(address: str) -> str:
    """The network interface that has an IPv4 address (Linux), or nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""
