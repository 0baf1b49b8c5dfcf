"""The rendezvous on node 0, which reads all files and decides."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, BadInputError
from trainer.host.interfaces import own_address
from trainer.launch.exit_record import ExitRecord
from trainer.launch.nodes import presence
from trainer.launch.nodes.presence import Seen
from trainer.launch.nodes.rendezvous import (
    FIRST_NOTICE_SECONDS,
    NOTICE_SECONDS,
    POLL_SECONDS,
    STOPPED,
    Outcome,
    Rendezvous,
    Round,
    outcome_of,
    timed_from_start,
)

# With enough nodes for an elastic job, how long the others may still take: at first, and between rounds.
_FIRST_SETTLE_SECONDS, _SETTLE_SECONDS = 30.0, 5.0


@dataclass
class Leader(Rendezvous):
    """The rendezvous on node 0.

    Attributes:
        suits: Whether the batch can be divided among that many ranks.
    """

    suits: Callable[[int], bool] = lambda _: True
    _round: Round | None = None
    _began: float = 0.0
    _there: dict[int, Seen] = field(default_factory=dict)  # as each was first seen
    _playing: dict[int, Seen] = field(default_factory=dict)
    _lost: dict[int, str] = field(default_factory=dict)
    _came: list[int] = field(default_factory=list)
    _unlike: str = ""

    def gather(self) -> Round | Outcome:
        """See `Rendezvous`."""
        self.stop = self.over = False
        began = changed = time.monotonic()
        notice = began + FIRST_NOTICE_SECONDS
        there, settle = set(self._there), _SETTLE_SECONDS if self._round else _FIRST_SETTLE_SECONDS
        while True:
            if self._round is None:
                self._check_alone()
            self._hear()
            now = time.monotonic()
            if there != set(self._there):
                there, changed = set(self._there), now
            if self.asked():
                return self._end(Outcome(False, EXIT_REQUEUE, STOPPED))
            if self._unlike:
                return self._end(Outcome(False, EXIT_BAD_INPUT, f"trainer: {self._unlike}\n"))
            count = 1 + len(there)
            ready = count == self.nodes.most or now - max(changed, began) >= settle
            playing = self._players()
            if ready and self.presence.stands and 1 + len(playing) >= self.nodes.least:
                return self._begin(playing)
            if now - began > self.seconds:
                return self._end(Outcome(False, EXIT_FAILED, self._missing()))
            if now > notice:
                notice = now + NOTICE_SECONDS
                self.say(f"waits for {self._absent()}: {count} of {self.nodes.most} nodes are here")
            time.sleep(POLL_SECONDS)

    def turn(self) -> None:
        """See `Rendezvous`."""
        self._hear()
        if not self.over and (self._lost or _failed(self._known())):
            self._call_over()
        if self._came and not self.stop:
            self.stop = True
            self._tell(stop=self._said.round)

    def conclude(self, records: Sequence[ExitRecord], leaving: bool) -> Outcome:
        """See `Rendezvous`."""
        if _failed(records):
            self._call_over()
        while missing := [n for n in self._playing if n not in self._lost and not self._ended(n)]:
            self.turn()
            if self.presence.blind:  # while ranks train, a file server that hangs for a while does no harm
                self._lost |= {n: f"{self.nodes.name(n)}: {self.presence.blind}" for n in missing}
            time.sleep(POLL_SECONDS)
        assert self._round is not None
        gone = {number for number in self._playing if (seen := self._ended(number)) and seen.said.leaving}
        left = [f"{self.nodes.name(number)} leaves" for number in sorted(gone | ({0} if leaving else set()))]
        left += [f"{self.nodes.name(number)} has come" for number in sorted(self._came)]
        outcome = outcome_of(
            [*timed_from_start(records, self._began), *self._known()],
            self._round.world,
            list(self._lost.values()),
            left,
            elastic=self.nodes.elastic,
            host=leaving,
        )
        for number in gone:
            self._there.pop(number, None)
        if outcome.again:
            self._tell(verdict=self._said.round, text=outcome.text)
            return outcome
        return self._end(outcome)

    def _check_alone(self) -> None:
        """Checks that no other launcher is node 0 of this run folder, before this one declares itself node 0.

        Raises:
            BadInputError: If there is another, or the folder can't be written.
        """
        while not (self.presence.looks or self.asked()):
            time.sleep(POLL_SECONDS)
        others = [one for one in self.presence.seen.values() if one.node == 0 and one.said.end is None]
        for one in others:
            if one.beats and (not self.presence.stands or one.id < self.presence.id):
                line = (
                    f"{one.said.name} is node 0 of {self.folder} already, and this launcher says it is: "
                    "give each its own number, or wait for its end"
                )
                if self.presence.stands:  # else not a word: with its first, node 0 clears the folder
                    self._end(Outcome(False, EXIT_BAD_INPUT, f"trainer: {line}\n"))
                raise BadInputError(line)
        self._check_written()
        # What a killed one left falls silent for good.
        if not self._said.leader and all(one.silent >= presence.ALIVE_SECONDS for one in others):
            self._tell(leader=self.presence.id)

    def _players(self) -> dict[int, Seen]:
        """Returns the nodes of the next round: as many as the batch can be divided among; the others wait."""
        playing = dict(sorted(self._there.items()))
        while playing and not self.suits(self.ranks + sum(node.said.ranks for node in playing.values())):
            playing.popitem()
        return playing

    def _begin(self, playing: dict[int, Seen]) -> Round:
        """Starts a round."""
        self._playing, self._lost, self._came = playing, {}, []
        members = ((self.presence.id, self.ranks), *((node.id, node.said.ranks) for node in playing.values()))
        address = ""
        with suppress(OSError):
            address = next((own_address(node.said.address, numeric=True) for node in playing.values()), "")
        self._began = time.monotonic()
        self._round = Round(self._said.round + 1, 0, tuple(ranks for _, ranks in members), address)
        self._tell(round=self._round.number, members=members)
        return self._round

    def _hear(self) -> None:
        """Removes nodes that are gone, and admits new ones."""
        files = {
            one.id: one
            for one in self.presence.seen.values()
            if 0 < one.node < self.nodes.most and one.said.leader == self.presence.id
        }
        for number, node in list(self._there.items()):
            anew = any(one.node == number and one.id != node.id and one.beats for one in files.values())
            if why := _gone(files.get(node.id), anew):
                self._part_with(number, why)
        for one in files.values():
            known = self._there.get(one.node)
            waits = one.silent >= presence.ALIVE_SECONDS or (one.said.ended and one.said.leaving)
            if waits or one.id in self._said.refused or (known and known.id == one.id):
                continue
            if problem := self._problem(one, files.get(known.id) if known else None):
                self._tell(refused={**self._said.refused, one.id: problem})
                self.say(f"a node was refused: {problem}")
            elif not known:
                self._there[one.node] = one
                if self._round is not None and not self.over and self.nodes.elastic:
                    self._came.append(one.node)

    def _part_with(self, number: int, why: str) -> None:
        """Removes a node; logged once: now, or with the round's outcome."""
        node = self._there.pop(number)
        line = f"node {number} ({node.said.name}) is gone: {why}"
        if self._playing.get(number) is node and not self._ended(number):
            self._lost[number] = line  # the round's outcome says it
        else:
            self.say(f"noticed that {line}")

    def _problem(self, one: Seen, before: Seen | None) -> str:
        """Returns why a launcher can't be part of the job, or ""."""
        name = one.said.name
        # A beat that came after the other's first is none that was still on its way.
        if before and one.age - before.silent > 3 * presence.BEAT_SECONDS:
            return (
                f"{before.said.name} is node {one.node} already, and {name} says it is: "
                "give each its own number"
            )
        for what, here in self._said.same.items():
            if (value := one.said.same.get(what)) != here:
                line = (
                    f"node {one.node} ({name}) has another {what} than node 0: {value}, not {here}; "
                    "give every node the same image, files and command"
                )
                if self._round is None and not self.nodes.elastic:
                    self._unlike = line
                return line
        return ""

    def _ended(self, number: int) -> Seen | None:
        """Returns a node's file, once its ranks have ended."""
        file = self.presence.seen.get(f"{number}-{self._playing[number].id}")
        return file if file and file.said.ended == self._said.round else None

    def _known(self) -> list[ExitRecord]:
        return [record for n in self._playing if (file := self._ended(n)) for record in file.said.records]

    def _call_over(self) -> None:
        self.over = True
        self._tell(over=self._said.round)

    def _end(self, outcome: Outcome) -> Outcome:
        self._tell(end=outcome.code, text=outcome.text)
        return outcome

    def _absent(self) -> str:
        numbers = [number for number in range(1, self.nodes.most) if number not in self._there]
        return ", ".join(self.nodes.name(number) for number in numbers)

    def _missing(self) -> str:
        return (
            f"trainer: {self._absent()} didn't come within {self.seconds:g} s, of {self.nodes.most} nodes "
            f"({self.nodes.least} are needed); look at their logs: is each started, and does it see this "
            f"run folder, {self.folder}, as the same one (a file system that all nodes have)? Does the name "
            f"{self.nodes.host} lead to this node from there (DNS)?\n"
        )


def _failed(records: Sequence[ExitRecord]) -> bool:
    return bool({record.code for record in records} - {EXIT_DONE, EXIT_REQUEUE})


def _gone(file: Seen | None, anew: bool) -> str:
    """Returns why a node is gone, or ""; one that was restarted is declared gone sooner."""
    if file is None:
        return "its launcher ended"
    if anew and file.silent >= presence.ALIVE_SECONDS:
        return "its launcher was restarted"
    if file.silent >= presence.SILENT_SECONDS:
        return f"nothing was heard of it for {presence.SILENT_SECONDS:g} s: was its launcher or host killed?"
    return ""
