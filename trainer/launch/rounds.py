"""Ranks on several nodes: the launchers meet, start their ranks, and agree on the outcome.

A round is the lifetime of one process group. A job of fixed size has exactly one; an elastic job has another
one each time a node leaves or joins, which resumes from the checkpoint of the one before.
"""

import math
import platform
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, BadInputError
from trainer.host.files import write_whole
from trainer.host.interfaces import gloo_interface
from trainer.launch.exit_record import ExitRecord, leave_message
from trainer.launch.launcher import STATIC, LocalRanks, WorkerGroup, say_on_stderr
from trainer.launch.nodes import EXIT_CODE, LOGS
from trainer.launch.nodes.discover import Nodes
from trainer.launch.nodes.follower import Follower
from trainer.launch.nodes.leader import Leader
from trainer.launch.nodes.rendezvous import NOTICE_SECONDS, Outcome, Rendezvous, Round
from trainer.launch.signals import SignalReceiver

_CONNECT_SECONDS, _AGAIN_SECONDS = 5.0, 0.5
_AFTER_THE_OTHERS_SECONDS = 60  # until torchrun gives up: a launcher says before what is in its way


def launch_with_others(
    module: str,
    request: Mapping[str, Any],
    local: LocalRanks,
    *,
    nodes: Nodes,
    folder: Path,
    same: Mapping[str, str],
    grace_seconds: float,
    join_seconds: float,
    output: int | None = None,
    suits: Callable[[int], bool] = lambda _: True,
) -> int:
    """Runs a module as ranks of all nodes; every node's launcher calls it.

    Args:
        module: As in `launcher.launch`.
        request: As in `launcher.launch`, for the ranks of this node.
        local: The ranks of this node.
        nodes: Nodes of the job, and this node's number.
        folder: The run folder, the same on every node.
        same: Values that must be the same on every node, by name: versions, the configuration.
        grace_seconds: Time for ranks to end after a signal.
        join_seconds: Timeout of the rendezvous.
        output: A file descriptor that takes the standard output of the ranks, or None.
        suits: Whether the batch can be divided among that many ranks.

    Returns:
        The job's exit code, as `launcher.launch`: the same on every node, except 75 on one that is
        asked to leave an elastic job.

    Raises:
        BadInputError: If this node can't be part of the job.
    """
    with SignalReceiver() as signals:
        rendezvous = _rendezvous(nodes, local.ranks, same, folder, join_seconds, signals, suits)
        try:
            while True:
                joined = rendezvous.gather()
                if isinstance(joined, Outcome):
                    outcome = joined
                else:
                    records = _unreached(joined, rendezvous)
                    if not records:
                        _tell(joined, nodes)
                        group = WorkerGroup(
                            signals, joined.ranks, joined.world, grace_seconds, rendezvous, folder / LOGS
                        )
                        environment = {**local.environment, **gloo_interface(joined.address)}
                        records = group.run(
                            module,
                            request,
                            local._replace(environment=environment),
                            _rendezvous_of_torchrun(joined, nodes, join_seconds),
                            output,
                        )
                    outcome = rendezvous.conclude(records, leaving=bool(signals.received))
                if not outcome.again:
                    text = outcome.text if nodes.number == 0 else _brief(outcome, nodes)
                    say_on_stderr(text, "warning" if outcome.code == EXIT_REQUEUE else "error")
                    leave_message(outcome.code, text)
                    if nodes.number == 0:
                        with suppress(OSError):  # for a script that sees only the codes of all nodes together
                            write_whole(folder / EXIT_CODE, f"{outcome.code}\n")
                    return outcome.code
                say_on_stderr(outcome.text, "warning")
        finally:
            rendezvous.close()


def _rendezvous(
    nodes: Nodes,
    ranks: int,
    same: Mapping[str, str],
    folder: Path,
    join_seconds: float,
    signals: SignalReceiver,
    suits: Callable[[int], bool],
) -> Rendezvous:
    def asked() -> bool:
        return bool(signals.received)

    def tell(text: str) -> None:
        say_on_stderr(f"trainer: node {nodes.number} ({platform.node()}) {text}\n")

    if nodes.number:
        return Follower(nodes, ranks, same, folder, join_seconds, asked, tell)
    _check_port(nodes.port)
    return Leader(nodes, ranks, same, folder, join_seconds, asked, tell, suits=suits)


def _check_port(port: int) -> None:
    """Refuses a port that another program listens on, before torch's store is made."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        raise BadInputError(
            f"node 0 can't listen at port {port} ({error.strerror}); choose another on every node: "
            "--master-port, or MASTER_PORT"
        ) from error


def _unreached(joined: Round, rendezvous: Rendezvous) -> list[ExitRecord]:
    """Makes exit records for this node's ranks if node 0's store can't be reached; returns [] once it can."""
    nodes, began = rendezvous.nodes, time.monotonic()
    noticed, end = began, began + rendezvous.seconds
    while nodes.number:
        if not (why := _in_the_way(nodes.host, nodes.port)):
            break
        rendezvous.turn()
        now, line = time.monotonic(), f"{nodes.name(0)} can't be reached at {nodes.host}:{nodes.port}: {why}"
        if rendezvous.asked() or rendezvous.stop:  # the ranks hear of it, and the others by them
            break
        if rendezvous.over or now > end:
            late = {"consequence": True} if rendezvous.over else {"for_all": True, "time": now}
            return [ExitRecord(rank, EXIT_FAILED, line, **late) for rank in joined.ranks]
        if now - noticed > NOTICE_SECONDS:
            noticed = now
            rendezvous.say(f"waits: {line}")
        time.sleep(_AGAIN_SECONDS)
    return []


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


def _tell(joined: Round, nodes: Nodes) -> None:
    say_on_stderr(
        f"trainer: node {nodes.number} ({platform.node()}) starts ranks {joined.ranks[0]} to "
        f"{joined.ranks[-1]} of {joined.world}; {len(joined.sizes)} of {nodes.most} nodes are here\n"
    )


def _rendezvous_of_torchrun(joined: Round, nodes: Nodes, seconds: float) -> list[str]:
    return [
        *(f"--nnodes={len(joined.sizes)}", f"--node-rank={joined.place}", STATIC),
        *(f"--master-addr={nodes.host}", f"--master-port={nodes.port}"),
        f"--rdzv-conf=timeout={math.ceil(seconds) + _AFTER_THE_OTHERS_SECONDS}",
    ]


def _brief(outcome: Outcome, nodes: Nodes) -> str:
    """Shortens an outcome for the other nodes: node 0 prints all of it."""
    first = outcome.text.partition("\n")[0].removeprefix("trainer: ")
    if outcome.code == EXIT_DONE or not first:
        return ""
    return f"trainer: node {nodes.number} ({platform.node()}) ends with code {outcome.code}: {first}\n"
