"""The other nodes' side of the rendezvous: they go to node 0, and do what it decides."""

import platform
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_REQUEUE, BadInputError
from trainer.launch.exit_record import ExitRecord, job_code
from trainer.launch.nodes.discover import Nodes
from trainer.launch.nodes.rendezvous import VERSION, Outcome, Round, packed
from trainer.launch.nodes.wire import NOISE, Message, Wire

_CONNECT_SECONDS = 5.0
_AGAIN_SECONDS = 1.0
_NOTICE_SECONDS = 15.0
_POLL_SECONDS = 0.05
# A network file system may show another host's new file only after a while.
_FOLDER_SECONDS = 20.0


@dataclass
class RendezvousClient:
    """Implements `Rendezvous` for every node but node 0.

    Attributes:
        nodes: Of the job, and which of them this is.
        ranks: That this node starts.
        same: What must be the same on every node, by name.
        seconds: How long node 0 may take to answer, and the others to come.
        asked: Whether this launcher was asked to stop.
        say: Tells people what it waits for.
    """

    nodes: Nodes
    ranks: int
    same: Mapping[str, str]
    seconds: float
    asked: Callable[[], bool]
    say: Callable[[str], None]
    stop: bool = False
    over: bool = False
    _wire: Wire | None = None
    _outcome: Outcome | None = None
    _round: Round | None = None
    _began: float = 0.0

    def gather(self) -> Round | Outcome:
        """As `Rendezvous`.

        Raises:
            BadInputError: If node 0 refuses this one.
        """
        self._outcome = None
        began = noticed = time.monotonic()
        problem = ""
        while self._round is None:
            if self.asked():
                return Outcome(False, EXIT_REQUEUE, "trainer: stopped while nodes were awaited\n")
            if self._wire is None or self._wire.gone:
                self.stop = self.over = False
                problem = self._knock()
            else:
                self._wire.wait(_POLL_SECONDS)
                self.turn()
            if self._outcome is not None:
                return self._outcome
            now = time.monotonic()
            # Once it has answered, node 0 counts the time, and says who is missing.
            if problem and now - began > self.seconds:
                return Outcome(False, EXIT_FAILED, f"trainer: {problem} (tried for {self.seconds:g} s)\n")
            if now - noticed > _NOTICE_SECONDS:
                noticed = now
                self.say(problem or f"waits with {self._host()} for the other nodes")
        self._began = time.monotonic()
        return self._round

    def turn(self) -> None:
        """As `Rendezvous`."""
        assert self._wire is not None
        for message in self._wire.turn():
            try:
                self._take_down(message)
            except (TypeError, ValueError):
                self._wire.gone = NOISE
        if self._wire.gone:
            self.over = True

    def conclude(self, records: Sequence[ExitRecord], leaving: bool) -> Outcome:
        """As `Rendezvous`."""
        assert self._wire is not None
        self._wire.say(ended=packed(records, self._began), leaving=leaving)
        self._round = None
        while self._outcome is None and not self._wire.gone:
            self._wire.wait(_POLL_SECONDS)
            self.turn()
        if self._outcome is not None:
            return self._outcome
        code = job_code(records)
        line = f"trainer: {self._host()} is gone: {self._wire.gone}\n"
        again = self.nodes.elastic and not leaving
        return Outcome(again, code if code == EXIT_BAD_INPUT else EXIT_REQUEUE, line)

    def close(self) -> None:
        """As `Rendezvous`."""
        if self._wire is not None:
            self._wire.close()

    def _take_down(self, message: Message) -> None:
        if "refused" in message:
            raise BadInputError(f"{self._host()} refused this one: {message['refused']}")
        if "round" in message:
            number, place, sizes, folder, token = message["round"]
            assert self._wire is not None
            self._round = Round(number, place, tuple(sizes), folder, token, self._wire.here)
        if "outcome" in message:
            again, code, text = message["outcome"]
            self._outcome = Outcome(bool(again), int(code), str(text))
            self.stop = self.over = False  # what follows in the same breath is of the next round
        self.stop = self.stop or "stop" in message
        self.over = self.over or "over" in message

    def _knock(self) -> str:
        """Tries to reach node 0; what is in the way, or nothing."""
        if self._wire is not None:  # it answered before: no storm of attempts
            time.sleep(_AGAIN_SECONDS)
        where = f"{self._host()} can't be reached at {self.nodes.host}:{self.nodes.port}"
        try:
            connection = socket.create_connection((self.nodes.host, self.nodes.port), _CONNECT_SECONDS)
        except socket.gaierror as error:
            why = f"the name isn't known here ({error.strerror}): check DNS, the headless Service, /etc/hosts"
        except ConnectionRefusedError:
            why = "nothing listens there: is node 0 started, and with the same port?"
        except TimeoutError:
            why = "no answer: does a firewall, a NetworkPolicy or the wrong interface stand between?"
        except OSError as error:
            why = f"{error.strerror}: is there a route from here (ip route get {self.nodes.host})?"
        else:
            self._wire = Wire(connection)
            hello = {"launcher": str(VERSION), **self.same}
            self._wire.say(node=self.nodes.number, name=platform.node(), ranks=self.ranks, same=hello)
            return ""
        time.sleep(_AGAIN_SECONDS)
        return f"{where}: {why}"

    def _host(self) -> str:
        return self.nodes.name(0)


def sees(folder: Path, file: str, token: str) -> bool:
    """Whether node 0's run folder is this node's as well, by a file that it wrote there."""
    end = time.monotonic() + _FOLDER_SECONDS
    while True:
        try:
            if (folder / file).read_text() == token:
                return True
            list(folder.iterdir())  # makes NFS look again
        except OSError:
            pass
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
