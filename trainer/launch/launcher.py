"""Starts ranks with torchrun and restores what it hides: the exit code, the cause, and the signals.

This module imports no torch: it starts a process that runs torchrun's code (or, for a single rank, the
rank), finds the ranks through files that they write, sends signals to them directly, and reads their exit
records. torchrun receives no signal, so that none kills it; its log is not shown.
"""

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, BadInputError
from trainer.host.affinity import CpuShares
from trainer.host.interfaces import gloo_interface
from trainer.host.limits import Limits, out_of_memory_kills, read_limits
from trainer.host.processes import children
from trainer.launch import as_launcher
from trainer.launch.exit_record import (
    TORCHRUN,
    ExitRecord,
    by_memory,
    crashed,
    exit_message,
    hung,
    job_code,
    leave_message,
    read_exit_record,
    read_torchrun,
)
from trainer.launch.folder import LEFT, Launch, read_content, write_launch, write_request
from trainer.launch.meeting import Meeting, options_of_torchrun, write_meeting
from trainer.launch.signals import SignalReceiver, blocked
from trainer.observe.console import Level, tell, told_here

HERE = "127.0.0.1"  # where the ranks of one host meet
# torchrun's dynamic rendezvous (c10d) unpickles what anybody wrote to a store that listens on all interfaces;
# the agents of a static one exchange JSON.
STATIC = "--rdzv-backend=static"
_POLL_SECONDS = 0.05
_AFTER_FAILURE_SECONDS = 3.0  # the other ranks can't go on, but may be writing their last line
_AFTER_REFUSAL_SECONDS = 0.5  # the others have heard of it, or compute in vain
_AFTER_SECOND_INTERRUPT_SECONDS = 1.0
_TORCHRUN_SECONDS = 10.0  # what torchrun may take, on a busy machine, to say how its ranks ended


class LocalRanks(NamedTuple):
    """Ranks to start on this host.

    Attributes:
        ranks: Number of ranks.
        threads: Intra-op threads of each (OMP_NUM_THREADS, MKL_NUM_THREADS).
        environment: Further environment variables; those set by the user stay.
        cpus: Their CPUs.
        gpus: Number of their GPUs; 0: they compute on CPUs.
    """

    ranks: int
    threads: int
    environment: Mapping[str, str] = {}
    cpus: CpuShares = CpuShares()
    gpus: int = 0

    def variables(self) -> dict[str, str]:
        """Returns all variables that a rank's environment has in addition to this process's."""
        threads = str(self.threads)
        return {**self.environment, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


class Launched(NamedTuple):
    """End of a job.

    Attributes:
        code: Its exit code.
        request: Its request, with what rank 0 left for a restart.
    """

    code: int
    request: Mapping[str, Any]


def launch(
    module: str,
    request: Mapping[str, Any],
    local: LocalRanks,
    *,
    max_restarts: int = 0,
    grace_seconds: float = 25.0,
    output: int | None = None,
    receiver: SignalReceiver | None = None,
    meeting: Meeting | None = None,
) -> Launched:
    """Runs a module as ranks of this host, and returns how the job ended.

    With several nodes each runs this, and ends with the code that its own ranks know of, see `job_code`.

    Call it in the main thread. The ranks find modules where this process does, not in the working folder.

    Args:
        module: What each rank runs, with the launch's folder as its only argument; it must open a
            `trainer.launch.worker.Worker` on it.
        request: What the module finds as `Worker.request`.
        local: The ranks.
        max_restarts: How often all ranks start again after a failure (code 1).
        grace_seconds: How long ranks have to end after a signal, or after one of them asked to be requeued.
        output: Standard output of the ranks, as `subprocess` takes it; by default this process's own.
        receiver: The caller's receiver of signals; by default a new one.
        meeting: What this node needs to meet the others of the job; None for a single node.

    Returns:
        The exit code: 0 done, 2 bad input, 75 requeue, 76 hang, 1 anything else; the cause of a failure is
        on stderr. And the request, with what rank 0 left.
    """
    if local.ranks > 1 and meeting is None:
        local = local._replace(environment={**gloo_interface(HERE), **local.environment})
    with nullcontext(receiver) if receiver else SignalReceiver() as signals:
        for attempt in range(1, max_restarts + 2):
            group = WorkerGroup(signals, local.ranks, grace_seconds, meeting)
            records, left = group.run(module, request, local, output)
            request = {**request, **left}
            code = job_code(records)
            text = exit_message(records, group.world)
            say_on_stderr(text, "warning" if code == EXIT_REQUEUE else "error")
            if code != EXIT_FAILED or signals.received or attempt > max_restarts:
                break
            say_on_stderr(f"trainer: starting again ({attempt} of {max_restarts})\n", "warning")
    leave_message(code, text)
    return Launched(code, request)


def _alone() -> list[str]:
    # Port 0: the agent takes a free one of this host's own address.
    options = ["--nnodes=1", "--node-rank=0", f"--master-addr={HERE}", "--master-port=0"]
    return [*options, f"--rdzv-id=trainer-{os.getpid()}", f"--local-addr={HERE}"]


def say_on_stderr(text: str, level: Level = "info") -> None:
    """Prints text for the user on stderr, without secrets; ignores errors of the stream."""
    if text:
        tell(text, level)


@dataclass
class WorkerGroup:
    """The ranks of this node, from start to end.

    Attributes:
        receiver: Signals that this launcher received.
        count: Number of ranks here.
        grace: Seconds from a signal until remaining ranks are killed.
        meeting: What this node needs to meet the others, if there are any.
        signals: Signals for the ranks.
        pids: Process ids of the ranks, by global number, as each becomes known.
        records: Exit records of the ranks that have ended.
        delivered: Number of signals that each rank was sent.
        overdue: Ranks that had to be killed.
        deadline: Time at which what is left is killed.
    """

    receiver: SignalReceiver
    count: int
    grace: float
    meeting: Meeting | None = None
    signals: list[signal.Signals] = field(default_factory=list)
    pids: dict[int, int] = field(default_factory=dict)
    records: dict[int, ExitRecord] = field(default_factory=dict)
    delivered: dict[int, int] = field(default_factory=dict)
    overdue: set[int] = field(default_factory=set)
    deadline: float = math.inf
    _folder: Path = Path()  # of the launch, while it runs

    @property
    def ranks(self) -> range:
        """Global numbers of the ranks here."""
        first = 0 if self.meeting is None else self.meeting.nodes.number * self.count
        return range(first, first + self.count)

    @property
    def world(self) -> int:
        """Number of ranks on all nodes."""
        return self.count * (1 if self.meeting is None else self.meeting.nodes.total)

    def run(
        self,
        module: str,
        request: Mapping[str, Any],
        local: LocalRanks,
        output: int | None = None,
    ) -> tuple[list[ExitRecord], dict[str, Any]]:
        """Runs the ranks to their end; returns their exit records, and what rank 0 left.

        Args:
            module: As in `launch`.
            request: As in `launch`.
            local: As in `launch`.
            output: As in `launch`.
        """
        with tempfile.TemporaryDirectory(prefix="trainer-launch-", ignore_cleanup_errors=True) as folder:
            self._folder = Path(folder)
            several = self.meeting is not None
            try:
                told = Launch(sys.path, os.getpid(), local.cpus, several, told_here())
                write_launch(self._folder, told)
                write_request(self._folder, request, self.ranks)
                if self.meeting is not None:
                    write_meeting(self._folder, self.meeting)
            except OSError as error:
                raise BadInputError(
                    f"{folder}: the launch can't be written there ({error.strerror}); make room, or give "
                    "another folder by TMPDIR"
                ) from error
            variables = local.variables()
            if self.world == 1:  # torchrun would only add the seconds in which it imports torch
                variables |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
                words = [module, folder]
            else:
                base = [f"--nproc-per-node={self.count}", "--max-restarts=0", f"--log-dir={folder}", STATIC]
                nodes = _alone() if self.meeting is None else options_of_torchrun(self.meeting)
                words = ["trainer.launch.agent", folder, module, *base, *nodes]
            # torchrun takes defaults from PET_ variables, which are for those who start it without us.
            environment = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
            command = [sys.executable, "-u", as_launcher.__file__, *words]
            records = self._run(command, {**environment, **variables}, output)
            left = read_content(self._folder / LEFT) if (self._folder / LEFT).exists() else {}
            return records, left

    def _run(
        self, command: list[str], environment: Mapping[str, str], output: int | None
    ) -> list[ExitRecord]:
        kills = out_of_memory_kills()
        # Slurm signals every process of a step. A blocked signal waits: in a rank until it can be taken.
        # A session of its own: a terminal's Ctrl-C reaches the launcher alone.
        with blocked():
            process = subprocess.Popen(command, env=environment, stdout=output, start_new_session=True)
        try:
            while process.poll() is None:
                time.sleep(_POLL_SECONDS)
                self._look()
                self._forward()
                if time.monotonic() > self.deadline:
                    self._kill(process)
        finally:
            process.kill()
            process.wait()
            self._look()
            self._kill_groups()  # what a rank started and left behind
        assert process.returncode is not None
        records = self._all_records(process.returncode)
        if count := max(0, out_of_memory_kills() - kills):
            return [by_memory(record, _out_of_memory(count, read_limits())) for record in records]
        return records

    def _look(self) -> None:
        """Reads the ranks' files, and sets the deadline of those that are left."""
        gone = {rank for rank, pid in self.pids.items() if not _exists(pid)}
        for rank in self.ranks:
            with suppress(FileNotFoundError):
                if rank not in self.pids:
                    self.pids[rank] = int((self._folder / f"rank-{rank}.pid").read_text())
                if rank not in self.records:
                    self.records[rank] = read_exit_record(self._folder, rank)
            if rank not in self.records and (record := hung(self._folder, rank)):
                self.records[rank] = record
        codes = {record.code for record in self.records.values()}
        lost = any(record.consequence for record in self.records.values())
        if EXIT_BAD_INPUT in codes:
            self._end_within(_AFTER_REFUSAL_SECONDS)
        if codes - {EXIT_DONE, EXIT_REQUEUE} or lost or gone - self.records.keys():
            self._end_within(_AFTER_FAILURE_SECONDS)
        # With every record known, a process that is still there hangs in its exit.
        if EXIT_REQUEUE in codes or len(self.records) == self.count:
            self._end_within(self.grace)

    def _forward(self) -> None:
        """Sends each rank the signals that it hasn't received; a rank that registers late gets them then."""
        self.signals = list(self.receiver.received)  # a handler may add to it at any moment
        for rank, pid in self.pids.items():
            for number in self.signals[self.delivered.get(rank, 0) :]:
                with suppress(OSError):
                    os.kill(pid, number)
            self.delivered[rank] = len(self.signals)
        if self.signals:
            self._end_within(self.grace if self._met else 0)
        if self.receiver.interrupted_twice:
            self._end_within(_AFTER_SECOND_INTERRUPT_SECONDS)

    @property
    def _met(self) -> bool:
        """Whether no other nodes are waited for."""
        return self.meeting is None or (self._folder / "met").exists()

    def _end_within(self, seconds: float) -> None:
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    def _kill(self, process: "subprocess.Popen[bytes]") -> None:
        """Kills what didn't end in time: the ranks, registered or not, then torchrun."""
        self.overdue |= {rank for rank in self.ranks if rank not in self.pids or _exists(self.pids[rank])}
        self._kill_groups(*children(process.pid))
        if time.monotonic() > self.deadline + _TORCHRUN_SECONDS or self._only_torchrun_is_left():
            process.kill()

    def _only_torchrun_is_left(self) -> bool:
        """Whether no rank is left that could write a record, and torchrun waits for nodes that won't come."""
        if self.meeting is None or any(map(_exists, self.pids.values())):
            return False
        codes = {EXIT_FAILED if record.consequence else record.code for record in self.records.values()}
        failed = len(self.records) == self.count and codes - {EXIT_DONE, EXIT_REQUEUE}
        return bool(failed) or not self._met

    def _kill_groups(self, *unregistered: int) -> None:
        for pid in (*self.pids.values(), *unregistered):  # each rank leads a session
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)

    def _all_records(self, exit_code: int) -> list[ExitRecord]:
        """Returns all exit records, with ones for ranks that wrote none."""
        exits, records = {0: exit_code}, dict(self.records)
        if not self.receiver.received:  # torchrun's signal, as another rank has failed
            ended = [rank for rank, record in records.items() if record.stopped]
            records |= {rank: replace(records[rank], consequence=True) for rank in ended}
        if self.world > 1 and len(records) < len(self.ranks):
            exits, record = read_torchrun(self._folder, exit_code)
            if record is not None and not self.overdue:
                records[TORCHRUN] = record
        for rank in self.ranks:
            records.setdefault(rank, self._without_record(rank, exits.get(rank)))
        return list(records.values())

    def _without_record(self, rank: int, exit_code: int | None) -> ExitRecord:
        """Makes the record of a rank that wrote none."""
        if self.receiver.interrupted_twice:
            return ExitRecord(rank, EXIT_FAILED, "stopped by a second SIGINT", for_all=True)
        if self.signals and not self._met:  # nothing is lost
            return ExitRecord(rank, EXIT_REQUEUE)
        if rank in self.overdue:
            since = self.signals[0].name if self.signals else "the others' end"
            line = f"did not end within {self.grace:g} s of {since} and was killed"
            return ExitRecord(rank, EXIT_FAILED, line, consequence=True)
        if exit_code is None:
            return ExitRecord(rank, EXIT_FAILED, "was stopped, or ended without a word", consequence=True)
        return crashed(self._folder, rank, exit_code)


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
