"""What launchers of several nodes say to each other, and what comes of it.

torchrun's own rendezvous (c10d) numbers nodes as well, but it can't say who is missing, lets every node end
with a code of its own, and counts a node that leaves as a failure. So the launchers meet first, at node 0 and
over one connection each, and torchrun then joins exactly the nodes that are there, by its static rendezvous.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple, Protocol

from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_HANG, EXIT_REQUEUE
from trainer.launch.exit_record import ExitRecord, exit_message, job_code

VERSION = 2


class Round(NamedTuple):
    """A world of ranks over the nodes that are there, until one of them leaves or comes, or all end.

    Attributes:
        number: From 1.
        place: Which of the nodes in it this is, from 0: torchrun's --node-rank.
        sizes: Ranks of each.
        folder: The run folder, as node 0 names it.
        token: What lies in it, if it is the same folder here.
        address: Of this node, as the others see it.
    """

    number: int
    place: int
    sizes: tuple[int, ...]
    folder: str
    token: str
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


class Rendezvous(Protocol):
    """One launcher's side of the rendezvous.

    Attributes:
        stop: Whether the ranks are to stop with a checkpoint: a node has come.
        over: Whether the round is lost, and its ranks need no longer wait: a node is gone, or a rank failed.
    """

    stop: bool
    over: bool

    def gather(self) -> Round | Outcome:
        """Waits for the nodes of the next round; an outcome if there will be none."""

    def turn(self) -> None:
        """Hears what the others say; called some times a second while ranks are running."""

    def conclude(self, records: Sequence[ExitRecord], leaving: bool) -> Outcome:
        """Tells how this node's ranks ended, and whether it was asked to leave; waits for what that means."""

    def close(self) -> None:
        """Leaves."""


def packed(records: Sequence[ExitRecord], began: float) -> list[dict[str, object]]:
    """Exit records for another node: its clock is another one, so times count from the round's begin."""
    return [asdict(record) | {"time": record.time - began} for record in records]


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
