"""Names of hosts: none of an address of this host is asked of a name server."""

import ctypes
import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.host.reading import text_of

_SERVICES = "/etc/nsswitch.conf"


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
    configure(b"hosts", b"files")
    try:
        yield
    finally:
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
