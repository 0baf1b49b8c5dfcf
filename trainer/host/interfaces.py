"""The network interfaces of this host and their addresses (Linux)."""

import fcntl
import socket
import struct

from trainer.host.reading import text_of

_SIOCGIFADDR = 0x8915


def addresses() -> dict[str, list[str]]:
    """The addresses of each interface of this host (Linux)."""
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                told = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has none of IPv4
                continue
            found[name] = [socket.inet_ntoa(told[20:24])]
    for words in map(str.split, text_of("/proc/net/if_inet6").splitlines()):
        found.setdefault(words[5], []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0])))
    return found


def interface_of(address: str) -> str:
    """The interface that has an address, or nothing."""
    return next((name for name, own in addresses().items() if address in own), "")
