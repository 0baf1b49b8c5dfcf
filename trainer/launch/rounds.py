"""Ranks on several nodes: the launchers meet, start theirs, and hear how all of them ended.

One round is one world of ranks. A job of a fixed size plays a single one; an elastic job plays another when a
node leaves or comes, and each goes on from the checkpoint of the one before.
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, BadInputError
from trainer.launch.exit_record import Outcome
from trainer.launch.launcher import run_ranks, say, thread_variables
from trainer.launch.nodes import EXIT_CODE, LOGS, MEETING
from trainer.launch.nodes.discover import Nodes
from trainer.launch.nodes.guest import Guest, sees
from trainer.launch.nodes.host import Host
from trainer.launch.nodes.interface import gloo_interface
from trainer.launch.nodes.meeting import Round, Table, Verdict
from trainer.launch.rank import LOGS_VARIABLE
from trainer.launch.signals import Inbox


def launch_with_others(
    arguments: Sequence[str],
    *,
    nodes: Nodes,
    folder: Path | None,
    same: Mapping[str, str],
    processes: int,
    threads: int,
    environment: Mapping[str, str],
    grace_seconds: float,
    join_seconds: float,
    output: int | None = None,
    module: str = "trainer",
    suits: Callable[[int], bool] = lambda _: True,
) -> int:
    """Runs `python -m module arguments` as ranks of all nodes; every node's launcher calls it.

    Args:
        arguments: What each rank gets as its command line.
        nodes: Of the job, and which one this is.
        folder: The run folder, the same on every node, or None.
        same: What must be the same on every node, by name: versions, the configuration.
        processes: Ranks on this node.
        threads: Intra-op threads of each.
        environment: Further variables for the ranks.
        grace_seconds: How long ranks have to end after a signal.
        join_seconds: How long the nodes may take to come together.
        output: A file descriptor that takes the standard output of the ranks, or None.
        module: What each rank runs.
        suits: Whether the batch can be shared out to so many ranks.

    Returns:
        The job's exit code, as `launcher.launch`: the same on every node, but 75 on one that is
        asked to leave an elastic job.

    Raises:
        BadInputError: If this node can't be part of it.
    """
    variables = {**environment, **thread_variables(threads)}
    if folder is not None:
        variables[LOGS_VARIABLE] = str(folder / LOGS)
    with Inbox() as signals:
        table = _table(nodes, processes, same, folder, join_seconds, signals, suits)
        try:
            while True:
                meeting = table.gather()
                if isinstance(meeting, Verdict):
                    verdict = meeting
                else:
                    outcomes = _play(
                        meeting,
                        nodes,
                        [module, *arguments],
                        variables,
                        folder,
                        signals,
                        grace_seconds,
                        output,
                        table,
                    )
                    verdict = table.conclude(outcomes, leaving=bool(signals.received))
                if not verdict.again:
                    say(verdict.text if nodes.number == 0 else _brief(verdict, nodes))
                    if nodes.number == 0 and folder is not None:
                        with suppress(OSError):  # for a script that sees only the codes of all nodes together
                            (folder / EXIT_CODE).write_text(f"{verdict.code}\n")
                    return verdict.code
                say(verdict.text)
        finally:
            if nodes.number == 0 and folder is not None:
                with suppress(OSError):
                    (folder / MEETING).unlink()
            table.close()


def _table(
    nodes: Nodes,
    processes: int,
    same: Mapping[str, str],
    folder: Path | None,
    join_seconds: float,
    signals: Inbox,
    suits: Callable[[int], bool],
) -> Table:
    def asked() -> bool:
        return bool(signals.received)

    def tell(text: str) -> None:
        say(f"trainer: node {nodes.number} ({platform.node()}) {text}\n")

    if nodes.number:
        return Guest(nodes, processes, same, join_seconds, asked, tell)
    host = Host(nodes, processes, same, str(folder), join_seconds, asked, tell, suits)
    if folder is not None:
        try:
            (folder / MEETING).write_text(host.token)
        except OSError as error:
            host.close()
            raise BadInputError(f"--out {folder}: can't be written ({error.strerror})") from error
    return host


def _play(
    meeting: Round,
    nodes: Nodes,
    command: Sequence[str],
    variables: Mapping[str, str],
    folder: Path | None,
    signals: Inbox,
    grace_seconds: float,
    output: int | None,
    table: Table,
) -> list[Outcome]:
    """Runs this node's ranks of a round."""
    if nodes.number and folder is not None and not sees(folder, MEETING, meeting.token):
        line = (
            f"node {nodes.number} ({platform.node()}) doesn't see node 0's run folder, {meeting.folder}, as "
            f"{folder}: give --out on a file system that all nodes have"
        )
        return [Outcome(rank, EXIT_BAD_INPUT, line, for_all=True) for rank in meeting.ranks]
    first, last = meeting.ranks[0], meeting.ranks[-1]
    say(
        f"trainer: node {nodes.number} ({platform.node()}) starts ranks {first} to {last} of "
        f"{meeting.world}; {len(meeting.sizes)} of {nodes.most} nodes are here\n"
    )
    rendezvous = [
        *(f"--nnodes={len(meeting.sizes)}", f"--node-rank={meeting.place}"),
        *(f"--master-addr={nodes.host}", f"--master-port={nodes.port + 1}"),
    ]
    return run_ranks(
        command,
        meeting.ranks,
        meeting.world,
        rendezvous,
        {**variables, **gloo_interface(meeting.address)},
        signals,
        grace_seconds,
        output,
        table,
    )


def _brief(verdict: Verdict, nodes: Nodes) -> str:
    """What the other nodes print: node 0 shows the whole of it."""
    first = verdict.text.partition("\n")[0].removeprefix("trainer: ")
    if verdict.code == EXIT_DONE or not first:
        return ""
    return f"trainer: node {nodes.number} ({platform.node()}) ends with code {verdict.code}: {first}\n"
