"""Node 0's side of the rendezvous: it hears all, and decides."""

import errno
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, BadInputError
from trainer.launch.exit_record import ExitRecord
from trainer.launch.nodes.discover import Nodes
from trainer.launch.nodes.rendezvous import VERSION, Outcome, Round, outcome_of
from trainer.launch.nodes.wire import ENDED, LONGEST, NOISE, Message, Wire
from trainer.observe.text import plain

# With enough nodes for an elastic job, how long the others may still take: at first, and between rounds.
_FIRST_SETTLE_SECONDS, _SETTLE_SECONDS = 30.0, 5.0
_NOTICE_SECONDS = 15.0
# Who was heard so lately is there; a host that went down needs longer to come back.
_ALIVE_SECONDS = 5.0
_POLL_SECONDS = 0.05
_RECORDS = TypeAdapter(list[ExitRecord])
# Whoever reaches the port may connect: so many at once, who say who they are so soon, in so many bytes.
_MOST_STRANGERS, _HELLO_SECONDS, _LONGEST_HELLO = 256, 10.0, 1 << 16


@dataclass
class _Client:
    """Another node.

    Attributes:
        wire: To its launcher.
        name: Its host name.
        ranks: It starts so many.
        records: Of its ranks in this round; None until they ended.
        leaving: Whether it was asked to stop.
    """

    wire: Wire
    name: str
    ranks: int
    records: list[ExitRecord] | None = None
    leaving: bool = False


@dataclass
class RendezvousServer:
    """Implements `Rendezvous` for node 0.

    Attributes:
        nodes: Of the job.
        ranks: That this node starts.
        same: What must be the same on every node, by name.
        folder: The run folder.
        seconds: How long the nodes may take to come together.
        asked: Whether this launcher was asked to stop.
        say: Tells people what it waits for.
        suits: Whether the batch can be shared out to so many ranks.
    """

    nodes: Nodes
    ranks: int
    same: Mapping[str, str]
    folder: str
    seconds: float
    asked: Callable[[], bool]
    say: Callable[[str], None]
    suits: Callable[[int], bool] = lambda _: True
    stop: bool = False
    over: bool = False
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    _round: Round | None = None
    _began: float = 0.0
    _clients: dict[int, _Client] = field(default_factory=dict)
    _playing: dict[int, _Client] = field(default_factory=dict)
    _strangers: list[Wire] = field(default_factory=list)
    _lost: dict[int, str] = field(default_factory=dict)
    _refused: str = ""
    _came: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Listens.

        Raises:
            BadInputError: If the port can't be had.
        """
        _listen(self.nodes.port + 1).close()  # where torchrun's store will be
        self._server = _listen(self.nodes.port)

    def gather(self) -> Round | Outcome:
        """As `Rendezvous`."""
        self.stop = self.over = False
        began = changed = noticed = time.monotonic()
        there, settle = set(self._clients), _SETTLE_SECONDS if self._round else _FIRST_SETTLE_SECONDS
        while True:
            self._hear()
            now = time.monotonic()
            if there != set(self._clients):
                there, changed = set(self._clients), now
            if self.asked():
                return self._end(Outcome(False, EXIT_REQUEUE, "trainer: stopped while nodes were awaited\n"))
            if self._refused:
                return self._end(Outcome(False, EXIT_BAD_INPUT, f"trainer: {self._refused}\n"))
            count = 1 + len(there)
            if count == self.nodes.most or now - max(changed, began) >= settle:
                playing = self._players()
                if 1 + len(playing) >= self.nodes.least:
                    return self._begin(playing)
            if now - began > self.seconds:
                return self._end(Outcome(False, EXIT_FAILED, self._missing()))
            if now - noticed > _NOTICE_SECONDS:
                noticed = now
                self.say(f"waits for {self._absent()}: {count} of {self.nodes.most} nodes are here")
            time.sleep(_POLL_SECONDS)

    def turn(self) -> None:
        """As `Rendezvous`."""
        self._hear()
        codes = {record.code for client in self._playing.values() for record in client.records or ()}
        if not self.over and (self._lost or codes - {EXIT_DONE, EXIT_REQUEUE}):
            self.over = True
            self._tell(over=True)
        if self._came and not self.stop:
            self.stop = True
            self._tell(stop=True)

    def conclude(self, records: Sequence[ExitRecord], leaving: bool) -> Outcome:
        """As `Rendezvous`."""
        if {record.code for record in records} - {EXIT_DONE, EXIT_REQUEUE}:
            self.over = True
            self._tell(over=True)
        while any(client.records is None and n not in self._lost for n, client in self._playing.items()):
            self.turn()
            time.sleep(_POLL_SECONDS)
        assert self._round is not None
        # Clocks differ: times count from the round's begin.
        mine = [replace(record, time=record.time - self._began) for record in records]
        known = [record for client in self._playing.values() for record in client.records or ()]
        gone = {n for n, client in self._playing.items() if client.leaving} | ({0} if leaving else set())
        left = [f"{self.nodes.name(number)} leaves" for number in sorted(gone)]
        left += [f"{self.nodes.name(number)} has come" for number in sorted(self._came)]
        outcome = outcome_of(
            [*mine, *known],
            self._round.world,
            list(self._lost.values()),
            left,
            elastic=self.nodes.elastic,
            host=leaving,
        )
        for number in gone - {0}:
            self._clients.pop(number, None)
        return self._again(outcome) if outcome.again else self._end(outcome)

    def close(self) -> None:
        """As `Rendezvous`."""
        for client in self._everybody():
            client.wire.close()
        self._server.close()

    def _players(self) -> dict[int, _Client]:
        """The nodes for the next round: as many as can share out the batch; the others stay and wait."""
        playing = dict(sorted(self._clients.items()))
        while playing and not self.suits(self.ranks + sum(client.ranks for client in playing.values())):
            playing.popitem()
        return playing

    def _begin(self, playing: dict[int, _Client]) -> Round:
        """Starts a round."""
        self._playing = playing
        self._lost, self._came = {}, []
        sizes = (self.ranks, *(client.ranks for client in self._playing.values()))
        number = self._round.number + 1 if self._round else 1
        for place, client in enumerate(self._playing.values(), start=1):
            client.records, client.leaving = None, False
            client.wire.say(round=[number, place, sizes, self.folder, self.token])
        address = next((client.wire.here for client in self._playing.values()), "")
        self._began = time.monotonic()
        self._round = Round(number, 0, sizes, self.folder, self.token, address)
        return self._round

    def _hear(self) -> None:
        """Lets in who comes, and takes down what is said."""
        with suppress(OSError):  # nobody waits, or no descriptor is left
            while True:
                self._strangers.append(Wire(self._server.accept()[0], _LONGEST_HELLO))
        hellos = {wire: messages for wire in self._strangers if (messages := wire.turn())}
        waiting = [wire for wire in self._strangers if not wire.gone and wire not in hellos]
        self._strangers = [wire for wire in waiting[-_MOST_STRANGERS:] if wire.silent < _HELLO_SECONDS]
        for wire in {*waiting} - {*self._strangers}:
            wire.close(0.0)
        # After the hellos are read: who comes back ended before, and is no longer taken to be there.
        for client in self._everybody():
            for message in client.wire.turn():
                if "ended" in message:
                    try:
                        client.records = _RECORDS.validate_python(message["ended"])
                    except ValidationError:
                        client.wire.gone = NOISE
                    client.leaving = bool(message.get("leaving"))
        for number, client in list(self._clients.items()):
            if client.wire.gone:
                self._part_with(number)
        for wire, messages in hellos.items():
            self._let_in(wire, messages[0])

    def _part_with(self, number: int) -> None:
        """Takes leave of a node that is gone; people are told once, whenever that is."""
        client = self._clients.pop(number)
        line = f"node {number} ({client.name}) is gone: {client.wire.gone}"
        if self._playing.get(number) is client and client.records is None:
            self._lost[number] = line  # the round's outcome says it
        else:
            self.say(f"noticed that {line}")

    def _let_in(self, wire: Wire, hello: Message) -> None:
        """Takes a node, or says why not."""
        wire.most = LONGEST
        try:
            number, name, ranks, same = (hello[key] for key in ("node", "name", "ranks", "same"))
            problem = self._problem(
                number, _word(name), int(ranks), {"launcher": str(VERSION), **self.same}, same
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            problem = NOISE
        if problem:
            wire.say(refused=problem)
            wire.close()
            self.say(f"a node was refused: {problem}")
            return
        before = self._clients.get(number)
        if before is not None:  # its host went down without a word, and it was started again
            before.wire.gone = ENDED
            before.wire.close(0.0)
            self._part_with(number)
        self._clients[number] = _Client(wire, _word(name), int(ranks))
        if self._round is not None and not self.over and self.nodes.elastic:
            self._came.append(number)

    def _problem(
        self, number: Any, name: str, ranks: int, here: Mapping[str, str], there: Mapping[str, str]
    ) -> str:
        if type(number) is not int or not 0 < number < self.nodes.most or ranks < 1:
            return f"{name} calls itself node {number}, and the job has nodes 0 to {self.nodes.most - 1}"
        before = self._clients.get(number)
        if before is not None and not before.wire.gone and before.wire.silent < _ALIVE_SECONDS:
            return f"{before.name} is node {number} already, and {name} says it is: give each its own number"
        for what in here:
            if here[what] != there.get(what):
                line = (
                    f"node {number} ({name}) has another {what} than node 0: {_word(there.get(what))}, not "
                    f"{here[what]}; give every node the same image, files and command"
                )
                if self._round is None and not self.nodes.elastic:
                    self._refused = line
                return line
        return ""

    def _everybody(self) -> list[_Client]:
        return list({id(one): one for one in (*self._playing.values(), *self._clients.values())}.values())

    def _tell(self, **message: object) -> None:
        for client in self._playing.values():
            client.wire.say(**message)

    def _again(self, outcome: Outcome) -> Outcome:
        for number, client in self._playing.items():
            if number in self._clients:
                client.wire.say(outcome=list(outcome))
            elif not client.wire.gone:  # it was asked to leave
                client.wire.say(outcome=[False, EXIT_REQUEUE, outcome.text])
                client.wire.close()
        return outcome

    def _end(self, outcome: Outcome) -> Outcome:
        for client in self._everybody():
            client.wire.say(outcome=list(outcome))
        return outcome

    def _absent(self) -> str:
        numbers = [number for number in range(1, self.nodes.most) if number not in self._clients]
        return ", ".join(self.nodes.name(number) for number in numbers)

    def _missing(self) -> str:
        return (
            f"trainer: {self._absent()} didn't come within {self.seconds:g} s, of {self.nodes.most} nodes "
            f"({self.nodes.least} are needed); look at their logs: is each started, with this node as "
            f"{self.nodes.host}:{self.nodes.port}? Does the name lead here (DNS), and do firewalls let ports "
            f"{self.nodes.port} and {self.nodes.port + 1} through (NetworkPolicy, security group)?\n"
        )


def _word(said: object) -> str:
    """What a stranger said of itself, for a terminal."""
    return " ".join(plain(str(said), 100).split())


def _listen(port: int) -> socket.socket:
    """A socket that takes connections from everywhere."""
    try:
        try:
            server = socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096
            )
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                raise
            server = socket.create_server(("", port), backlog=4096)  # a container without IPv6
    except OSError as error:
        raise BadInputError(
            f"node 0 can't listen at port {port} ({error.strerror}); choose another on every node: "
            "--master-port, or MASTER_PORT"
        ) from error
    server.setblocking(False)
    return server
