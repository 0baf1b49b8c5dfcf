"""How launchers of several nodes come together, and what a round's end means.

torchrun's own rendezvous (c10d) numbers nodes as well, but it can't say who is missing, lets every node end
with a code of its own, and counts a node that leaves as a failure. So the launchers meet first, by files in
the run folder that all have (`presence`), and torchrun then joins exactly the nodes that are there, by its
static rendezvous. Node 0 decides; the others do what its file says.
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_HANG,
    EXIT_REQUEUE,
    BadInputError,
)
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
    """A world of ranks over the nodes that are there, until one of them leaves or comes, or all end.

    Attributes:
        number: From 1.
        place: Which of the nodes in it this is, from 0: torchrun's --node-rank.
        sizes: Ranks of each.
        address: Of this node, as the others see it.
    """

    number: int
    place: int
    sizes: tuple[int, ...]
    address: str = ""

    @property
    def ranks(self) -> range:
        """The global numbers of this node's ranks."""
        first = sum(self.sizes[: self.place])
        return range(first, first + self.sizes[self.place])

    @property
    def world(self) -> int:
        """All ranks."""
        return sum(self.sizes)


class Outcome(NamedTuple):
    """What a round's end means.

    Attributes:
        again: Whether another round follows; then the rest says why.
        code: The exit code of every launcher.
        text: For people: the cause, with a traceback where there is one.
    """

    again: bool
    code: int
    text: str


@dataclass
class Rendezvous:
    """One launcher's side of the rendezvous: `leader.Leader` on node 0, `follower.Follower` on the others.

    Attributes:
        nodes: Of the job, and which of them this is.
        ranks: That this node starts.
        same: What must be the same on every node, by name.
        folder: The run folder.
        seconds: How long the nodes may take to come together.
        asked: Whether this launcher was asked to stop.
        say: Tells people what it waits for.
        stop: Whether the ranks are to stop with a checkpoint: a node has come.
        over: Whether the round is lost, and its ranks need no longer wait: a node is gone, or a rank failed.
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
        """Begins to look."""
        self.presence = Presence(self.folder / FOLDER, self.nodes.number)
        self._said = Said(platform.node(), self.ranks, dict(self.same))

    def gather(self) -> Round | Outcome:
        """Waits for the nodes of the next round; an outcome if there will be none.

        Raises:
            BadInputError: If this node can't be part of it.
        """
        raise NotImplementedError

    def turn(self) -> None:
        """Hears what the others say; called some times a second while ranks are running."""
        raise NotImplementedError

    def conclude(self, records: Sequence[ExitRecord], leaving: bool) -> Outcome:
        """Tells how this node's ranks ended, and whether it was asked to leave; waits for what that means."""
        raise NotImplementedError

    def close(self) -> None:
        """Leaves."""
        self.presence.close(keep=self.nodes.number == 0)

    def _tell(self, **said: Any) -> None:
        """Changes what this launcher says."""
        self._said = replace(self._said, **said)
        self.presence.say(self._said)

    def _check_written(self) -> None:
        """Refuses a folder in which this launcher's file can't be made."""
        if self.presence.unwritten and not self.presence.stands:
            raise BadInputError(f"--out {self.folder}: {self.presence.unwritten}")


def counted(records: Sequence[ExitRecord], began: float) -> tuple[ExitRecord, ...]:
    """Exit records for another node: its clock is another one, so times count from the round's begin."""
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
    """What a round's end means; a pure function of what is known of all nodes.

    Args:
        records: Of the ranks of the nodes that answered.
        world: Ranks in the round.
        lost: A line for each node that is gone without a word.
        left: The nodes that were asked to stop, or that came and made the others stop.
        elastic: Whether the job goes on with other nodes.
        host: Whether node 0, where they meet, is among those that leave.
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
