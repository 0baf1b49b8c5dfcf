"""The ranks of one launch on this host: started together, sent signals, and their ends read."""

import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE
from trainer.host.limits import Limits, out_of_memory_kills, read_limits
from trainer.host.processes import children
from trainer.launch import as_launcher
from trainer.launch.exit_record import TORCHRUN, Outcome, by_memory, crashed, read_outcome, read_torchrun
from trainer.launch.nodes.discover import LAUNCHED
from trainer.launch.nodes.meeting import Table
from trainer.launch.rank import FOLDER_VARIABLE, PARENT_VARIABLE
from trainer.launch.signals import Inbox, blocked

_POLL_SECONDS = 0.05
_AFTER_FAILURE_SECONDS = 3.0  # the other ranks can't go on, but may be writing their last line
_AFTER_SECOND_INTERRUPT_SECONDS = 1.0
_TORCHRUN_SECONDS = 2.0  # what torchrun may take to notice that its ranks are gone


@dataclass
class LocalJob:
    """One start of this node's ranks, until they are gone.

    Attributes:
        folder: Where they leave word.
        inbox: The signals that this launcher is sent.
        ranks: Their global numbers.
        world: Ranks on all nodes.
        grace: Seconds to end in, after a signal.
        table: The other nodes' launchers, if there are any.
    """

    folder: Path
    inbox: Inbox
    ranks: range
    world: int
    grace: float
    table: Table | None = None
    signals: list[signal.Signals] = field(default_factory=list)
    pids: dict[int, int] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    delivered: dict[int, int] = field(default_factory=dict)
    overdue: set[int] = field(default_factory=set)
    deadline: float = math.inf
    _taken: int = 0
    _stopped: bool = False

    def run(
        self, command: Sequence[str], variables: Mapping[str, str], output: int | None = None
    ) -> list[Outcome]:
        """Runs the command to its end; one outcome for each rank."""
        kills = out_of_memory_kills()
        # torchrun takes defaults from PET_ variables, which are for those who start it without us.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
        environment |= {**variables, FOLDER_VARIABLE: str(self.folder), PARENT_VARIABLE: str(os.getpid())}
        environment |= {as_launcher.PATH_VARIABLE: as_launcher.search_path(), LAUNCHED: "1"}
        # Slurm signals every process of a step. A blocked signal waits: in a rank until it can be taken.
        with blocked():  # and a session of its own: a terminal's Ctrl-C reaches the launcher alone
            process = subprocess.Popen(command, env=environment, stdout=output, start_new_session=True)
        try:
            while process.poll() is None:
                time.sleep(_POLL_SECONDS)
                self._look()
                self._hear()
                self._forward()
                if time.monotonic() > self.deadline:
                    self._kill(process)
        finally:
            process.kill()
            process.wait()
            self._look()
            self._kill_groups()  # what a rank started and left behind
        outcomes = self._all_outcomes(process.returncode)
        if count := max(0, out_of_memory_kills() - kills):
            return [by_memory(outcome, _out_of_memory(count, read_limits())) for outcome in outcomes]
        return outcomes

    def _look(self) -> None:
        """Reads what the ranks wrote, and sets how long those that are left may take."""
        gone = {rank for rank, pid in self.pids.items() if not _exists(pid)}
        for rank in self.ranks:
            with suppress(FileNotFoundError):
                if rank not in self.pids:
                    self.pids[rank] = int((self.folder / f"rank-{rank}.pid").read_text())
                if rank not in self.outcomes:
                    self.outcomes[rank] = read_outcome(self.folder, rank)
        codes = {outcome.code for outcome in self.outcomes.values()}
        if codes - {EXIT_DONE, EXIT_REQUEUE} or gone - self.outcomes.keys():
            self._end_within(_AFTER_FAILURE_SECONDS)
        # With every outcome known, a process that is still there hangs in its exit.
        if EXIT_REQUEUE in codes or len(self.outcomes) == len(self.ranks):
            self._end_within(self.grace)

    def _hear(self) -> None:
        """Takes what this launcher was sent, and what the other nodes say."""
        self.signals += self.inbox.received[self._taken :]  # a handler may add to it at any moment
        self._taken = len(self.signals) - self._stopped
        if self.table is None:
            return
        self.table.turn()
        if self.table.stop and not self._stopped:
            self._stopped = True
            self.signals.append(signal.SIGTERM)
        if self.table.over:
            self._end_within(_AFTER_FAILURE_SECONDS)

    def _forward(self) -> None:
        """Sends each rank the signals that it has not had; a rank that registers late gets them then."""
        for rank, pid in self.pids.items():
            for number in self.signals[self.delivered.get(rank, 0) :]:
                with suppress(OSError):
                    os.kill(pid, number)
            self.delivered[rank] = len(self.signals)
        if self.signals:
            self._end_within(self.grace)
        if self.inbox.interrupted_twice:
            self._end_within(_AFTER_SECOND_INTERRUPT_SECONDS)

    def _end_within(self, seconds: float) -> None:
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    def _kill(self, process: "subprocess.Popen[bytes]") -> None:
        """Ends what did not end in time: the ranks, registered or not, then torchrun."""
        self.overdue |= {rank for rank in self.ranks if rank not in self.pids or _exists(self.pids[rank])}
        self._kill_groups(*children(process.pid))
        if time.monotonic() > self.deadline + _TORCHRUN_SECONDS:
            process.kill()

    def _kill_groups(self, *unregistered: int) -> None:
        for pid in (*self.pids.values(), *unregistered):  # each rank leads a session
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)

    def _all_outcomes(self, exit_code: int) -> list[Outcome]:
        """Adds what the ranks did not say themselves."""
        exits, outcomes = {0: exit_code}, dict(self.outcomes)
        if self.world > 1 and len(outcomes) < len(self.ranks):
            exits, error = read_torchrun(self.folder, exit_code)
            if error and not self.overdue:
                outcomes[TORCHRUN] = Outcome(TORCHRUN, EXIT_FAILED, traceback=error)
        for rank in self.ranks:
            outcomes.setdefault(rank, self._without_word(rank, exits.get(rank)))
        return list(outcomes.values())

    def _without_word(self, rank: int, exit_code: int | None) -> Outcome:
        """The outcome of a rank that left none."""
        if self.inbox.interrupted_twice:
            return Outcome(rank, EXIT_FAILED, "stopped by a second SIGINT", for_all=True)
        if rank in self.overdue and self._stopped and not self.inbox.received:
            # A node came while this rank was still starting, too early to hear of it: nothing is lost.
            return Outcome(rank, EXIT_REQUEUE)
        if rank in self.overdue:
            since = self.signals[0].name if self.signals else "the others' end"
            line = f"did not end within {self.grace:g} s of {since} and was killed"
            return Outcome(rank, EXIT_FAILED, line, consequence=True)
        if exit_code is None:
            return Outcome(rank, EXIT_FAILED, "was stopped, or ended without a word", consequence=True)
        return crashed(self.folder, rank, exit_code)


def _out_of_memory(kills: int, limits: Limits) -> str:
    return (
        f": out of memory (the {limits.memory_bytes / 1e9:,.1f} GB of {limits.sources['memory_bytes']} were "
        f"full, and the kernel counts {kills} such kill{'s' * (kills > 1)}); lower data.micro_batch_size, "
        "data.workers or data.prefetch, start fewer ranks, or give the container more memory"
    )


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
