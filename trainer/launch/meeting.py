"""Nodes of a job meet over torch's store on node 0, before torchrun numbers their ranks.

Who is missing is named, and who can't be part of the job.

torchrun's static rendezvous can't say who hasn't come. Messages are JSON; each node's agent calls `meet`.
"""

import json
import platform
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.errors import BadInputError
from trainer.host.interfaces import gloo_interface, own_address
from trainer.launch.folder import read_content, write_content
from trainer.launch.nodes import Nodes

_FILE = "meeting.json"
MEETING_NOTICE_SECONDS, _NOTICE_SECONDS = 10.0, 30.0
MEETING_POLL_SECONDS, _CONNECT_SECONDS = 0.2, 5.0
_VERDICT_SECONDS = 60.0  # that the others wait longer than node 0, which counts the time
_HEARD_SECONDS = 3.0  # that node 0 stays for the others to hear why there is no job
_REMEDY = "give every node the same image, files and command"


class AbsentNodeError(Exception):
    """A node that others waited for in vain: one line."""


@dataclass(frozen=True)
class Meeting:
    """What a node needs to meet the others.

    Attributes:
        nodes: Nodes of the job, and this node's number.
        ranks: Number of ranks of each node.
        same: Values that must be the same on every node, by name.
        seconds: Time to wait for the others.
    """

    nodes: Nodes
    ranks: int
    same: Mapping[str, str]
    seconds: float


def write_meeting(folder: Path, meeting: Meeting) -> None:
    """Writes it into the folder of a launch."""
    content = asdict(meeting) | {"nodes": list(meeting.nodes)}
    write_content(folder / _FILE, content)


def read_meeting(folder: Path) -> Meeting | None:
    """Reads what `write_meeting` wrote; None for a job of one node."""
    if not (folder / _FILE).exists():
        return None
    content = read_content(folder / _FILE)
    nodes = Nodes(*content.pop("nodes"))
    nodes = nodes._replace(names=tuple(nodes.names))
    return Meeting(**{**content, "nodes": nodes})


def listen(address: str, port: int = 0) -> socket.socket:
    """Opens a socket at the first address of the name that is one of this host's; port 0: a free one.

    Where a name leads to a loopback address here, as in /etc/hosts of Debian, others see another one: then on
    all interfaces.

    Raises:
        BadInputError: If the port is taken, or the name is another host's.
    """
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        family, *_, at = found[0]
        if port and str(at[0]).startswith(("127.", "::1")) and address not in (at[0], "localhost"):
            if socket.has_dualstack_ipv6():
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
            at = ("", port)
        return socket.create_server(at[:2], family=family, backlog=1024)
    except OSError as error:
        raise BadInputError(
            f"node 0 can't listen at {address}:{port} ({error.strerror}); give its address "
            "by --master-addr (or MASTER_ADDR) and a free port by --master-port (or MASTER_PORT), "
            "the same on every node"
        ) from error


def wait_for_node_0(meeting: Meeting, say: Callable[[str], None]) -> None:
    """Waits until node 0's port can be reached; says what is in the way.

    Raises:
        AbsentNodeError: If it can't be in time.
    """
    nodes = meeting.nodes
    for late in _waiting(meeting.seconds):
        if not (why := _in_the_way(nodes.host, nodes.port)):
            return
        line = f"{nodes.name(0)} can't be reached at {nodes.host}:{nodes.port}: {why}"
        if late is None:
            raise AbsentNodeError(line)
        if late:
            say(f"waits: {line}")


def meet(store: Any, meeting: Meeting, say: Callable[[str], None]) -> dict[str, str]:
    """Waits for all nodes; returns environment variables for the ranks of this one.

    Args:
        store: The store on node 0.
        meeting: What this node knows.
        say: Prints what it waits for.

    Raises:
        AbsentNodeError: If a node doesn't come in time.
        BadInputError: If a node can't be part of the job.
    """
    return _lead(store, meeting, say) if meeting.nodes.number == 0 else _follow(store, meeting, say)


def _lead(store: Any, meeting: Meeting, say: Callable[[str], None]) -> dict[str, str]:
    nodes = meeting.nodes
    for late in _waiting(meeting.seconds):
        missing = [n for n in range(1, nodes.total) if not store.check([f"node-{n}"])]
        if not missing:
            break
        names = ", ".join(map(nodes.name, missing))
        if late is None:
            line = (
                f"{names} didn't come within {meeting.seconds:g} s, of {nodes.total} nodes; is each "
                f"started, and does {nodes.host} lead to this node from there (DNS)?"
            )
            raise _told(store, AbsentNodeError(line), nodes.total - 1 - len(missing))
        if late:
            say(f"waits for {names}")
    others = [json.loads(store.get(f"node-{n}")) for n in range(1, nodes.total)]
    refused = next(filter(None, (_problem(meeting, other) for other in others)), "")
    if refused:
        raise _told(store, BadInputError(refused), len(others))
    store.set("verdict", json.dumps(["", True]))
    with suppress(OSError):
        return gloo_interface(own_address(others[0]["address"], numeric=True))
    return {}


def _told(store: Any, error: Exception, others: int) -> Exception:
    """Tells the nodes that are there why there is no job, and returns it."""
    store.set("verdict", json.dumps([str(error), isinstance(error, AbsentNodeError)]))
    until = time.monotonic() + _HEARD_SECONDS
    while store.add("heard", 0) < others and time.monotonic() < until:
        time.sleep(MEETING_POLL_SECONDS)
    return error


def _follow(store: Any, meeting: Meeting, say: Callable[[str], None]) -> dict[str, str]:
    nodes, address = meeting.nodes, own_address(meeting.nodes.host)
    key = f"node-{nodes.number}"
    told = {
        "id": secrets.token_hex(8),
        "number": nodes.number,
        "name": platform.node(),
        "address": address,
        "ranks": meeting.ranks,
        "same": dict(meeting.same),
    }
    store.set(key, json.dumps(told))
    for _ in _until(store, "verdict", meeting, say):
        if (other := json.loads(store.get(key)))["id"] != told["id"]:
            raise BadInputError(
                f"{other['name']} says that it is node {nodes.number}, too: give each its own number"
            )
    refused, missing = json.loads(store.get("verdict"))
    store.add("heard", 1)
    if refused:
        raise (AbsentNodeError if missing else BadInputError)(refused)
    return gloo_interface(address)


def _until(store: Any, key: str, meeting: Meeting, say: Callable[[str], None]) -> Iterator[None]:
    """Waits for what node 0 says; it counts the time, and says who is missing."""
    for late in _waiting(meeting.seconds + _VERDICT_SECONDS):
        if store.check([key]):
            return
        if late is None:
            raise AbsentNodeError(
                f"{meeting.nodes.name(0)} said nothing for {meeting.seconds + _VERDICT_SECONDS:g} s"
            )
        if late:
            say(f"waits: {meeting.nodes.name(0)} waits for other nodes")
        yield


def _problem(meeting: Meeting, other: Mapping[str, Any]) -> str:
    """Returns why a node can't be part of the job, or ""."""
    who = f"node {other['number']} ({other['name']})"
    if other["ranks"] != meeting.ranks:
        return f"{who} has {other['ranks']} ranks, and node 0 has {meeting.ranks}: give every node as many"
    for what, here in meeting.same.items():
        if (value := other["same"].get(what)) != here:
            return f"{who} has another {what} than node 0: {value}, not {here}; {_REMEDY}"
    return ""


def _waiting(seconds: float) -> Iterator[bool | None]:
    """Passes of a wait: True where it is time to say what is waited for; None, the last, when time is up."""
    began = time.monotonic()
    notice = began + MEETING_NOTICE_SECONDS
    while (now := time.monotonic()) - began < seconds:
        yield now > notice
        notice = now + _NOTICE_SECONDS if now > notice else notice
        time.sleep(MEETING_POLL_SECONDS)
    yield None


def _in_the_way(host: str, port: int) -> str:
    """Returns why this host can't reach another's port, or ""."""
    try:
        socket.create_connection((host, port), _CONNECT_SECONDS).close()
    except socket.gaierror as error:
        return f"the name isn't known here ({error.strerror}): check DNS, the headless Service, /etc/hosts"
    except ConnectionRefusedError:
        return "nothing listens there: is it the address of node 0, and does it have the same port?"
    except TimeoutError:
        return "no answer: does a firewall, a NetworkPolicy or the wrong interface stand between?"
    except OSError as error:
        return f"{error.strerror}: is there a route from here (ip route get {host})?"
    return ""


def options_of_torchrun(meeting: Meeting) -> list[str]:
    """Returns torchrun's options for several nodes."""
    nodes = meeting.nodes
    return [
        *(f"--nnodes={nodes.total}", f"--node-rank={nodes.number}"),
        *(f"--master-addr={nodes.host}", f"--master-port={nodes.port}"),
        f"--rdzv-conf=timeout={int(meeting.seconds) + 60}",
    ]
