"""Ranks on several nodes: the launchers meet, start theirs, and hear how all of them ended.

One round is one world of ranks. A job of a fixed size plays a single one; an elastic job plays another when a
node leaves or comes, and each goes on from the checkpoint of the one before.
"""

import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_REQUEUE, BadInputError
from trainer.host.files import write_whole
from trainer.host.interfaces import gloo_interface
from trainer.launch.exit_record import ExitRecord
from trainer.launch.launcher import STATIC, LocalRanks, WorkerGroup, say
from trainer.launch.nodes import EXIT_CODE, LOGS, MEETING
from trainer.launch.nodes.client import RendezvousClient, sees
from trainer.launch.nodes.discover import Nodes
from trainer.launch.nodes.rendezvous import Outcome, Rendezvous, Round
from trainer.launch.nodes.server import RendezvousServer
from trainer.launch.signals import SignalReceiver
from trainer.launch.termination import leave_message


def launch_with_others(
    module: str,
    request: Mapping[str, Any],
    local: LocalRanks,
    *,
    nodes: Nodes,
    folder: Path | None,
    same: Mapping[str, str],
    grace_seconds: float,
    join_seconds: float,
    output: int | None = None,
    suits: Callable[[int], bool] = lambda _: True,
) -> int:
    """Runs a module as ranks of all nodes; every node's launcher calls it.

    Args:
        module: As of `launcher.launch`.
        request: As of `launcher.launch`, for the ranks of this node.
        local: Those.
        nodes: Of the job, and which one this is.
        folder: The run folder, the same on every node, or None.
        same: What must be the same on every node, by name: versions, the configuration.
        grace_seconds: How long ranks have to end after a signal.
        join_seconds: How long the nodes may take to come together.
        output: A file descriptor that takes the standard output of the ranks, or None.
        suits: Whether the batch can be shared out to so many ranks.

    Returns:
        The job's exit code, as `launcher.launch`: the same on every node, but 75 on one that is
        asked to leave an elastic job.

    Raises:
        BadInputError: If this node can't be part of it.
    """
    with SignalReceiver() as signals:
        rendezvous = _rendezvous(nodes, local.ranks, same, folder, join_seconds, signals, suits)
        try:
            while True:
                joined = rendezvous.gather()
                if isinstance(joined, Outcome):
                    outcome = joined
                else:
                    records = _elsewhere(joined, nodes, folder)
                    if not records:
                        _tell(joined, nodes)
                        logs = None if folder is None else folder / LOGS
                        group = WorkerGroup(
                            signals, joined.ranks, joined.world, grace_seconds, rendezvous, logs
                        )
                        there = {**local.environment, **gloo_interface(joined.address)}
                        records = group.run(
                            module,
                            request,
                            local._replace(environment=there),
                            _rendezvous_of_torchrun(joined, nodes),
                            output,
                        )
                    outcome = rendezvous.conclude(records, leaving=bool(signals.received))
                if not outcome.again:
                    text = outcome.text if nodes.number == 0 else _brief(outcome, nodes)
                    say(text, "warning" if outcome.code == EXIT_REQUEUE else "error")
                    leave_message(outcome.code, text)
                    if nodes.number == 0 and folder is not None:
                        with suppress(OSError):  # for a script that sees only the codes of all nodes together
                            write_whole(folder / EXIT_CODE, f"{outcome.code}\n")
                    return outcome.code
                say(outcome.text, "warning")
        finally:
            if nodes.number == 0 and folder is not None:
                with suppress(OSError):
                    (folder / MEETING).unlink()
            rendezvous.close()


def _rendezvous(
    nodes: Nodes,
    processes: int,
    same: Mapping[str, str],
    folder: Path | None,
    join_seconds: float,
    signals: SignalReceiver,
    suits: Callable[[int], bool],
) -> Rendezvous:
    def asked() -> bool:
        return bool(signals.received)

    def tell(text: str) -> None:
        say(f"trainer: node {nodes.number} ({platform.node()}) {text}\n")

    if nodes.number:
        return RendezvousClient(nodes, processes, same, join_seconds, asked, tell)
    server = RendezvousServer(nodes, processes, same, str(folder), join_seconds, asked, tell, suits)
    if folder is not None:
        try:
            write_whole(folder / MEETING, server.token)
        except OSError as error:
            server.close()
            raise BadInputError(f"--out {folder}: can't be written ({error.strerror})") from error
    return server


def _elsewhere(joined: Round, nodes: Nodes, folder: Path | None) -> list[ExitRecord]:
    """How the ranks of this node end where it has another run folder than node 0; else nothing."""
    if not nodes.number or folder is None or sees(folder, MEETING, joined.token):
        return []
    line = (
        f"node {nodes.number} ({platform.node()}) doesn't see node 0's run folder, {joined.folder}, as "
        f"{folder}: give --out on a file system that all nodes have"
    )
    return [ExitRecord(rank, EXIT_BAD_INPUT, line, for_all=True) for rank in joined.ranks]


def _tell(joined: Round, nodes: Nodes) -> None:
    say(
        f"trainer: node {nodes.number} ({platform.node()}) starts ranks {joined.ranks[0]} to "
        f"{joined.ranks[-1]} of {joined.world}; {len(joined.sizes)} of {nodes.most} nodes are here\n"
    )


def _rendezvous_of_torchrun(joined: Round, nodes: Nodes) -> list[str]:
    return [
        *(f"--nnodes={len(joined.sizes)}", f"--node-rank={joined.place}", STATIC),
        *(f"--master-addr={nodes.host}", f"--master-port={nodes.port + 1}"),
    ]


def _brief(outcome: Outcome, nodes: Nodes) -> str:
    """What the other nodes print: node 0 shows the whole of it."""
    first = outcome.text.partition("\n")[0].removeprefix("trainer: ")
    if outcome.code == EXIT_DONE or not first:
        return ""
    return f"trainer: node {nodes.number} ({platform.node()}) ends with code {outcome.code}: {first}\n"
