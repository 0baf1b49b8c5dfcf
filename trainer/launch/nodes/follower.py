"""The rendezvous on every node but node 0: finds node 0's file and follows it."""

import platform
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_REQUEUE, BadInputError
from trainer.host.interfaces import own_address
from trainer.launch.exit_record import ExitRecord, job_code
from trainer.launch.nodes import presence
from trainer.launch.nodes.presence import Said
from trainer.launch.nodes.rendezvous import (
    FIRST_NOTICE_SECONDS,
    NOTICE_SECONDS,
    POLL_SECONDS,
    STOPPED,
    Outcome,
    Rendezvous,
    Round,
    timed_from_start,
)


@dataclass
class Follower(Rendezvous):
    """The rendezvous on every node but node 0."""

    _leader: str = ""
    _number: int = 0  # of the round
    _began: float = 0.0

    def gather(self) -> Round | Outcome:
        """See `Rendezvous`."""
        self.stop = self.over = False
        began = time.monotonic()
        notice = began + FIRST_NOTICE_SECONDS
        while True:
            if self.asked():
                return Outcome(False, EXIT_REQUEUE, STOPPED)
            problem = self._follow()
            if (said := self._heard()) is not None:
                if problem := said.refused.get(self.presence.id, ""):
                    raise BadInputError(f"{self.nodes.name(0)} refused this one: {problem}")
                if said.end is not None:
                    return Outcome(False, said.end, said.text)
                if joined := self._joined(said):
                    return joined
            now = time.monotonic()
            # Once node 0 is there, it counts the time, and says who is missing.
            if problem and now - began > self.seconds:
                return Outcome(False, EXIT_FAILED, f"trainer: {problem} (tried for {self.seconds:g} s)\n")
            if now > notice:
                notice = now + NOTICE_SECONDS
                self.say(f"waits: {problem or f'{self.nodes.name(0)} waits for other nodes'}")
            time.sleep(POLL_SECONDS)

    def turn(self) -> None:
        """See `Rendezvous`."""
        said = self._heard()
        self.stop = self.stop or (said is not None and said.stop == self._number)
        self.over = (
            self.over or said is None or said.end is not None or self._number in (said.over, said.verdict)
        )

    def conclude(self, records: Sequence[ExitRecord], leaving: bool) -> Outcome:
        """See `Rendezvous`."""
        self._tell(ended=self._number, records=timed_from_start(records, self._began), leaving=leaving)
        while (said := self._heard()) is not None and not self.presence.blind:
            if said.end is not None:
                return Outcome(False, said.end, said.text)
            if said.verdict >= self._number:
                return Outcome(not leaving, EXIT_REQUEUE, said.text)
            time.sleep(POLL_SECONDS)
        code = job_code(records)
        why = self.presence.blind or (
            f"nothing was heard of it for {presence.SILENT_SECONDS:g} s, or it was restarted"
        )
        line = f"trainer: {self.nodes.name(0)} is gone: {why}\n"
        again = self.nodes.elastic and not leaving
        if again:  # as if started anew: a node 0 that was only paused must not wait for what this one said
            self.close()
            self.__post_init__()
            self._leader = ""
        return Outcome(again, code if code == EXIT_BAD_INPUT else EXIT_REQUEUE, line)

    def _heard(self) -> Said | None:
        """Returns node 0's message, unless it is gone."""
        file = self.presence.seen.get(f"0-{self._leader}")
        return file.said if file and file.beats else None

    def _follow(self) -> str:
        """Joins a live node 0, if there is one; returns the obstacle, or ""."""
        if self._heard() is not None:
            self._check_written()
            return ""
        living = [one for one in self.presence.seen.values() if one.beats and one.said.end is None]
        if not living:
            return self.presence.blind or (
                f"{self.nodes.name(0)} hasn't begun in {self.folder}, as {platform.node()} sees it: is it "
                f"started, and is that folder the same there (a file system that all nodes have)?"
            )
        try:
            address = own_address(self.nodes.host)
        except socket.gaierror as error:
            return (
                f"{self.nodes.name(0)} can't be reached at {self.nodes.host}: the name isn't known here "
                f"({error.strerror}): check DNS, the headless Service, /etc/hosts"
            )
        self._leader, self._number = min(living).id, 0
        self._tell(leader=self._leader, address=address, ended=0, records=())
        return ""

    def _joined(self, said: Said) -> Round | None:
        """Returns the round that node 0 has begun, if it is new and this node is in it."""
        place = next((at for at, (id_, _) in enumerate(said.members) if id_ == self.presence.id), None)
        if place is None or said.round <= max(self._number, said.verdict):
            return None
        self._number, self._began = said.round, time.monotonic()
        return Round(said.round, place, tuple(ranks for _, ranks in said.members), self._said.address)
