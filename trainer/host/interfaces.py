"""Network interfaces of this host and their addresses (Linux), and how names of hosts are looked up."""

import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from trainer.errors import BadInputError
from trainer.host.reading import text_of

_SIOCGIFADDR = 0x8915


def addresses() -> dict[str, list[str]]:
    """The addresses of each interface of this host (Linux)."""
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has none of IPv4
                continue
            found[name] = [socket.inet_ntoa(answer[20:24])]
    for words in map(str.split, text_of("/proc/net/if_inet6").splitlines()):
        found.setdefault(words[5], []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0])))
    return found


def own_address(toward: str, numeric: bool = False) -> str:
    """Returns this host's address on the route to another, or "" without one. Nothing is sent.

    Args:
        toward: The other's name or address.
        numeric: Whether no name is looked up.

    Raises:
        OSError: socket.gaierror, if the name isn't known.
    """
    flags = socket.AI_NUMERICHOST if numeric else 0
    for family, kind, *_, at in socket.getaddrinfo(toward, 9, type=socket.SOCK_DGRAM, flags=flags):
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(at)
            return str(probe.getsockname()[0])
    return ""


def interface_of(address: str) -> str:
    """The interface that has an address, or nothing."""
    return next((name for name, own in addresses().items() if address in own), "")


def gloo_interface(address: str) -> dict[str, str]:
    """Names gloo the interface of an address; else it takes that of this host's own name, which it looks up.

    That is a loopback address on many hosts, none on others, and where no name service answers it takes ten
    seconds for each process group. NCCL chooses for itself.

    Raises:
        BadInputError: If the user named one that this host hasn't.
    """
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        here = [name for _, name in socket.if_nameindex()]
        if odd := [name for name in chosen.split(",") if name not in here]:
            raise BadInputError(
                f"GLOO_SOCKET_IFNAME={chosen}: {odd[0]} is no interface of this host ({', '.join(here)}); "
                "gloo takes whole names, without NCCL's ^ and =; give one, or unset it"
            )
        return {}
    name = interface_of(address.removeprefix("::ffff:"))
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


_SERVICES = "/etc/nsswitch.conf"


_entered = list[str]()


@contextmanager
def from_files_alone(address: str) -> Iterator[None]:
    """Context manager in which this process resolves names by /etc/hosts alone, if the address is a loopback
    one.

    torch's TCPStore looks up the name of whom it connects to, for its log: a name server would hear of it,
    and one that doesn't answer would delay the start for seconds.
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)  # musl has none
    if configure is None or not _is_loopback(address):
        yield
        return
    _entered.append(address)
    configure(b"hosts", b"files")
    try:
        yield
    finally:
        _entered.pop()
        if not _entered:  # the outermost one
            configure(b"hosts", services(text_of(_SERVICES)).encode())


def services(text: str) -> str:
    """Returns the line `hosts` of nsswitch.conf; glibc's default if there is none."""
    for line in text.splitlines():
        name, colon, value = line.partition("#")[0].partition(":")
        if colon and name.strip() == "hosts":
            return value.strip()
    return "dns [!UNAVAIL=return] files"


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
