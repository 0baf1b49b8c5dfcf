"""Nodes of a job meet over the store on node 0; who is missing, or can't be part of the job, is named."""

import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.helpers.ports import free_port
from tests.helpers.refusals import named, refused
from tests.helpers.waiting import SECONDS, until
from trainer.launch import meeting as module
from trainer.launch.meeting import AbsentNodeError, Meeting, listen, meet, wait_for_node_0
from trainer.launch.nodes import Nodes

SAME = {"trainer": "1", "configuration": "abc"}


class Cluster:
    """Nodes that meet, each in a thread."""

    def __init__(self, total: int = 2, seconds: float = SECONDS) -> None:
        self.store, self.said = HashStore(), list[str]()
        self.usual = Meeting(Nodes(total, 0, "127.0.0.1", 29500, ("a", "b", "c")[:total]), 2, SAME, seconds)
        self.pool = ThreadPoolExecutor(8)

    def start(self, number: int, **other: Any) -> "Future[dict[str, str]]":
        here = replace(self.usual, nodes=self.usual.nodes._replace(number=number), **other)
        return self.pool.submit(meet, self.store, here, self.said.append)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEETING_POLL_SECONDS", 0.005)
    monkeypatch.setattr(module, "MEETING_NOTICE_SECONDS", 0.0)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


def test_nodes_meet_whoever_comes_first() -> None:
    cluster = Cluster(3)
    met = [cluster.start(number) for number in (2, 1, 0)]
    assert [one.result(SECONDS) for one in met] == [{"GLOO_SOCKET_IFNAME": "lo"}] * 3


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ({"same": {**SAME, "trainer": "2"}}, "node 1 trainer 2 1"),
        ({"same": {"trainer": "1"}}, "node 1 configuration None abc"),
        ({"ranks": 3}, "node 1 3 ranks 2"),
    ],
)
def test_a_node_that_is_unlike_is_named_on_all(other: dict[str, Any], names: str) -> None:
    cluster = Cluster()
    for one in [cluster.start(0), cluster.start(1, **other)]:
        with refused(names):
            one.result(SECONDS)


def test_who_does_not_come_is_named_on_all() -> None:
    cluster = Cluster(3, seconds=0.3)
    for one in [cluster.start(0), cluster.start(2)]:
        with refused("node 1 (b) 3", by=AbsentNodeError):
            one.result(SECONDS)
    assert any(named(line, "node 1 (b)") for line in cluster.said)


def test_two_nodes_with_one_number() -> None:
    cluster = Cluster(3)
    waiting = [cluster.start(0), cluster.start(1)]
    until(lambda: cluster.store.check(["node-1"]))
    again = cluster.start(1)
    with refused("node 1"):
        waiting[1].result(SECONDS)  # the later one counts: it may have been started again
    last = cluster.start(2)
    assert all(one.result(SECONDS) for one in (waiting[0], again, last))


def test_what_is_in_the_way_to_node_0_is_said() -> None:
    here = Meeting(Nodes(2, 1, "127.0.0.1", free_port(), ("a", "b")), 2, SAME, 0.1)
    for host, names in (("127.0.0.1", here.nodes.port), ("no-such-node.invalid", "no-such-node.invalid")):
        said = list[str]()
        there = replace(here, nodes=here.nodes._replace(host=host))
        with refused("node 0 (a)", names, by=AbsentNodeError):
            wait_for_node_0(there, said.append)
        assert said
    with listen("127.0.0.1", here.nodes.port):
        wait_for_node_0(here, said.append)


def test_the_store_listens_at_the_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1", free_port()) as one:
        assert one.getsockname()[0] == "127.0.0.1"
        with refused(one.getsockname()[1]):
            listen("127.0.0.1", one.getsockname()[1])
    with refused("192.0.2.1"):  # another host's
        listen("192.0.2.1", free_port())
    # Debian's name of a host leads to a loopback address there, and nowhere else.
    found: Callable[..., Any] = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *more, **named: found("127.0.1.1", *more, **named))
    with listen("a-host", free_port()) as one:
        assert one.getsockname()[0] in ("::", "0.0.0.0")
