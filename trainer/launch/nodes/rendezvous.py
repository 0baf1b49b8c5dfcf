"""Rendezvous of the launchers of several nodes, and the outcome of a round.

torchrun's own rendezvous (c10d) numbers nodes as well, but it doesn't report which one is missing, lets every
node exit with another code, and counts a node that leaves as a failure. So the launchers meet first, by files
in the shared run folder (`presence`), and torchrun's static rendezvous then joins exactly those nodes. Node 0
decides; the others follow its file.
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_HANG, EXIT_REQUEUE, BadInputError
from trainer.launch.exit_record import ExitRecord, exit_message, job_code
from trainer.launch.nodes import FOLDER
from trainer.launch.nodes.discover import Nodes
from trainer.launch.nodes.presence import Presence, Said

POLL_SECONDS = 0.05
# When people are told first who is waited for, and how often from then on.
FIRST_NOTICE_SECONDS, NOTICE_SECONDS = 10.0, 30.0
STOPPED = "trainer: stopped while nodes were awaited\n"
# JSON has no infinity; and a file of records must not become too large to be read.
_NEVER, _TRACEBACK = 1e9, 1 << 16


class Round(NamedTuple):
    """A round: one process group over the nodes that are there, until a node leaves or joins, or all end.

    Attributes:
        number: Number of the round, from 1.
        place: Index of this node in the round, from 0: torchrun's --node-rank.
        sizes: Number of ranks of each node.
        address: Address of this node, as the others see it.
    """

    number: int
    place: int
    sizes: tuple[int, ...]
    address: str = ""

    @property
    def ranks(self) -> range:
        """Global ranks of this node."""
        first = sum(self.sizes[: self.place])
        return range(first, first + self.sizes[self.place])

    @property
    def world(self) -> int:
        """World size."""
        return sum(self.sizes)


class Outcome(NamedTuple):
    """Outcome of a round.

    Attributes:
        again: Whether another round follows; `text` then says why.
        code: The exit code of every launcher.
        text: The cause for the user, with a traceback where there is one.
    """

    again: bool
    code: int
    text: str


@dataclass
class Rendezvous:
    """One launcher's side of the rendezvous: `leader.Leader` on node 0, `follower.Follower` on the others.

    Attributes:
        nodes: Nodes of the job, and this node's number.
        ranks: Number of ranks that this node starts.
        same: Values that must be the same on every node, by name.
        folder: The run folder.
        seconds: Timeout of the rendezvous.
        asked: Returns whether this launcher was asked to stop.
        say: Prints what it waits for.
        stop: Whether the ranks must stop with a checkpoint, because a node has joined.
        over: Whether the round is lost, because a node is gone or a rank failed: its ranks need not wait.
    """

    nodes: Nodes
    ranks: int
    same: Mapping[str, str]
    folder: Path
    seconds: float
    asked: Callable[[], bool]
    say: Callable[[str], None]
    stop: bool = False
    over: bool = False

    def __post_init__(self) -> None:
        """Starts to write and read files."""
        self.presence = Presence(self.folder / FOLDER, self.nodes.number)
        self._said = Said(platform.node(), self.ranks, dict(self.same))

    def gather(self) -> Round | Outcome:
        """Waits for the nodes of the next round; an outcome if there will be none.

        Raises:
            BadInputError: If this node can't be part of the job.
        """
        raise NotImplementedError

    def turn(self) -> None:
        """Reads the other nodes' messages; called a few times per second while ranks are running."""
        raise NotImplementedError

    def conclude(self, records: Sequence[ExitRecord], leaving: bool) -> Outcome:
        """Publishes this node's exit records and whether it was asked to stop; waits for the outcome."""
        raise NotImplementedError

    def close(self) -> None:
        """Leaves."""
        self.presence.close(keep=self.nodes.number == 0)

    def _tell(self, **said: Any) -> None:
        """Changes fields of this launcher's message."""
        self._said = replace(self._said, **said)
        self.presence.say(self._said)

    def _check_written(self) -> None:
        """Refuses a folder in which this launcher's file can't be created."""
        if self.presence.unwritten and not self.presence.stands:
            raise BadInputError(f"--out {self.folder}: {self.presence.unwritten}")


def timed_from_start(records: Sequence[ExitRecord], began: float) -> tuple[ExitRecord, ...]:
    """Converts exit records for other nodes: hosts' clocks differ, so times count from the round's start."""
    return tuple(
        replace(record, time=min(record.time - began, _NEVER), traceback=record.traceback[-_TRACEBACK:])
        for record in records
    )


def outcome_of(
    records: Sequence[ExitRecord],
    world: int,
    lost: Sequence[str],
    left: Sequence[str],
    *,
    elastic: bool,
    host: bool,
) -> Outcome:
    """Decides the outcome of a round; a pure function of all nodes' records.

    Args:
        records: Exit records of the nodes that answered.
        world: World size of the round.
        lost: A line for each node that vanished.
        left: Nodes that were asked to stop, or that joined and made the others stop.
        elastic: Whether the job continues with other nodes.
        host: Whether node 0 is among those that leave.
    """
    code = job_code(records) if records else EXIT_REQUEUE
    text = exit_message(records, world)
    if code == EXIT_BAD_INPUT:
        return Outcome(False, code, text)
    if lost:
        # Whatever the others' ranks say, they say it because of that.
        lines = "".join(f"trainer: {line}\n" for line in lost)
        tail = "" if elastic else "trainer: the same command resumes from the newest checkpoint\n"
        return Outcome(elastic, EXIT_REQUEUE, lines + tail)
    if code in (EXIT_FAILED, EXIT_HANG, EXIT_DONE):
        return Outcome(False, code, text)
    names = ", ".join(left)
    again = elastic and bool(left) and not host
    return Outcome(
        again, EXIT_REQUEUE, f"trainer: {names}: the ranks stopped with a checkpoint\n" if again else ""
    )
