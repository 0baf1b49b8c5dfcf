"""Starts ranks with torchrun and restores what it hides: the exit code, the cause, and the signals.

This module imports no torch: it starts a process that runs torchrun's own code (or, for a single rank, the
rank), finds the ranks through files that they write, sends them the signals directly, and reads how each
ended. torchrun sees no signal, so that none kills it; what it logs is not shown.
"""

import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from trainer import as_launcher, rank as ranks
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, BadInputError
from trainer.preempt import Inbox, blocked
from trainer.rank import FOLDER_VARIABLE, PARENT_VARIABLE, TORCHRUN, Outcome
from trainer.redact import redact_text

_POLL_SECONDS = 0.05
_AFTER_FAILURE_SECONDS = 3.0  # the other ranks can't go on, but may be writing their last line
_AFTER_SECOND_INTERRUPT_SECONDS = 1.0
_TORCHRUN_SECONDS = 2.0  # what torchrun may take to notice that its ranks are gone


def launch(
    arguments: Sequence[str],
    *,
    processes: int,
    threads: int,
    environment: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    nodes: int = 1,
    node_rank: int = 0,
    master: str = "",
    grace_seconds: float = 25.0,
    module: str = "trainer",
    output: int | None = None,
    inbox: Inbox | None = None,
) -> int:
    """Runs `python -m module arguments` as ranks and returns the job's exit code; call it in the main thread.

    The ranks find modules where this process does, not in the working folder.

    Args:
        arguments: What each rank gets as its command line.
        processes: Ranks on this node.
        threads: Intra-op threads of each rank (OMP_NUM_THREADS, MKL_NUM_THREADS).
        environment: Further variables for the ranks.
        max_restarts: How often all ranks start again after a failure (code 1); for a single node.
        nodes: Nodes of the job, with as many ranks each; every node runs its own launcher.
        node_rank: The number of this node.
        master: `host:port` on node 0, for several nodes.
        grace_seconds: How long ranks have to end after a signal, or after one of them asked to be requeued.
        module: What each rank runs; it must call `trainer.rank.run_rank`.
        output: A file descriptor that takes the standard output of the ranks; by default this process's own.
        inbox: Where the caller takes the signals, if it does; by default they are taken here.

    Returns:
        0 done, 2 bad input, 75 requeue, 76 hang, 1 anything else; on failure the cause is on stderr.
    """
    if nodes > 1 and (max_restarts or not master.rpartition(":")[0]):
        raise BadInputError("several nodes need the master as host:port, and no restarts (requeue instead)")
    world = processes * nodes
    local = range(node_rank * processes, (node_rank + 1) * processes)
    variables = {**(environment or {}), "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with nullcontext(inbox) if inbox else Inbox() as signals:
        for attempt in range(1, max_restarts + 2):
            with tempfile.TemporaryDirectory(prefix="trainer-launch-", ignore_cleanup_errors=True) as folder:
                command = [sys.executable, "-u", as_launcher.__file__, module, *arguments]
                if world == 1:  # torchrun would only add the seconds in which it imports torch
                    variables |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
                else:
                    options = _torchrun_options(processes, nodes, node_rank, master, folder)
                    command[3:4] = ["trainer.launch", *options, "--", module]
                outcomes = _Job(Path(folder), signals, local, world, grace_seconds).run(
                    command, variables, output
                )
            _say(ranks.explain(outcomes, world))
            code = ranks.job_code(outcomes)
            if code != EXIT_FAILED or signals.received or attempt > max_restarts:
                break
            _say(f"trainer: starting again ({attempt} of {max_restarts})\n")
    return code


def _torchrun_options(processes: int, nodes: int, node_rank: int, master: str, folder: str) -> list[str]:
    base = [f"--nproc-per-node={processes}", f"--nnodes={nodes}", "--max-restarts=0", f"--log-dir={folder}"]
    if nodes > 1:
        host, _, port = master.rpartition(":")
        return [*base, f"--node-rank={node_rank}", f"--master-addr={host}", f"--master-port={port}"]
    # Port 0: the system chooses, so that launches don't clash. An address: no name service is needed.
    base += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-conf=is_host=1"]
    return [*base, f"--rdzv-id={Path(folder).name}", "--local-addr=127.0.0.1"]


@dataclass
class _Job:
    """One start of this node's ranks, until they are gone."""

    folder: Path
    inbox: Inbox
    ranks: range
    world: int
    grace: float
    pids: dict[int, int] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    delivered: dict[int, int] = field(default_factory=dict)
    overdue: set[int] = field(default_factory=set)
    deadline: float = math.inf

    def run(
        self, command: Sequence[str], variables: Mapping[str, str], output: int | None = None
    ) -> list[Outcome]:
        """Runs the command to its end; one outcome for each rank."""
        # torchrun takes defaults from PET_ variables, which are for those who start it without us.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
        environment |= {**variables, FOLDER_VARIABLE: str(self.folder), PARENT_VARIABLE: str(os.getpid())}
        environment[as_launcher.PATH_VARIABLE] = as_launcher.search_path()
        # Slurm signals every process of a step. A blocked signal waits: in a rank until it can be taken.
        with blocked():  # and a session of its own: a terminal's Ctrl-C reaches the launcher alone
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
        return self._all_outcomes(process.returncode)

    def _look(self) -> None:
        """Reads what the ranks wrote, and sets how long those that are left may take."""
        gone = {rank for rank, pid in self.pids.items() if not _exists(pid)}
        for rank in self.ranks:
            with suppress(FileNotFoundError):
                if rank not in self.pids:
                    self.pids[rank] = int((self.folder / f"rank-{rank}.pid").read_text())
                if rank not in self.outcomes:
                    self.outcomes[rank] = ranks.read_outcome(self.folder, rank)
        codes = {outcome.code for outcome in self.outcomes.values()}
        if codes - {EXIT_DONE, EXIT_REQUEUE} or gone - self.outcomes.keys():
            self._end_within(_AFTER_FAILURE_SECONDS)
        # With every outcome known, a process that is still there hangs in its exit.
        if EXIT_REQUEUE in codes or len(self.outcomes) == self.world:
            self._end_within(self.grace)

    def _forward(self) -> None:
        """Sends each rank the signals that it has not had; a rank that registers late gets them then."""
        received = tuple(self.inbox.received)  # a handler may add to it at any moment
        for rank, pid in self.pids.items():
            for number in received[self.delivered.get(rank, 0) :]:
                with suppress(OSError):
                    os.kill(pid, number)
            self.delivered[rank] = len(received)
        if received:
            self._end_within(self.grace)
        if self.inbox.interrupted_twice:
            self._end_within(_AFTER_SECOND_INTERRUPT_SECONDS)

    def _end_within(self, seconds: float) -> None:
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    def _kill(self, process: "subprocess.Popen[bytes]") -> None:
        """Ends what did not end in time: the ranks, registered or not, then torchrun."""
        self.overdue |= {rank for rank in self.ranks if rank not in self.pids or _exists(self.pids[rank])}
        self._kill_groups(*ranks.children(process.pid))
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
            exits, error = ranks.read_torchrun(self.folder, exit_code)
            if error and not self.overdue:
                outcomes[TORCHRUN] = Outcome(TORCHRUN, EXIT_FAILED, traceback=error)
        for rank in self.ranks:
            outcomes.setdefault(rank, self._without_word(rank, exits.get(rank)))
        return list(outcomes.values())

    def _without_word(self, rank: int, exit_code: int | None) -> Outcome:
        """The outcome of a rank that left none."""
        if self.inbox.interrupted_twice:
            return Outcome(rank, EXIT_FAILED, "stopped by a second SIGINT", for_all=True)
        if rank in self.overdue:
            since = self.inbox.received[0].name if self.inbox.received else "the others' end"
            line = f"did not end within {self.grace:g} s of {since} and was killed"
            return Outcome(rank, EXIT_FAILED, line, consequence=True)
        if exit_code is None:
            return Outcome(rank, EXIT_FAILED, "was stopped, or ended without a word", consequence=True)
        return ranks.crashed(self.folder, rank, exit_code)


def _say(text: str) -> None:
    with suppress(OSError):  # nobody reads stderr any more: the exit code still counts
        print(redact_text(text), end="", file=sys.stderr, flush=True)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _torchrun(argv: Sequence[str]) -> None:
    """Runs torchrun's own code on `options -- module arguments`; leaves word of which ranks failed."""
    ranks.die_with_parent()
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    # Its log lines, its warnings and its traceback tell users nothing that the ranks don't tell better.
    logging.disable()
    warnings.simplefilter("ignore")
    given = os.environ.copy()
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # read at the import; not for the ranks
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    del os.environ["TORCH_CPP_LOG_LEVEL"]
    os.environ.update(given)
    cut = argv.index("--")
    request = run.parse_args([*argv[:cut], as_launcher.__file__.replace("$", "$$")])
    # Not through its parser, which takes a rank's `--signal` for an abbreviation. It expands `$` later.
    request.training_script_args = [argument.replace("$", "$$") for argument in argv[cut + 1 :]]
    if request.nnodes == "1":  # it looks its own name up again and again, for logs that nobody reads
        socket.getfqdn = lambda name="": name or "localhost"
    exits, error = {}, ""
    try:
        run.run(request)
    except ChildFailedError as failed:
        exits = {rank: failure.exitcode for rank, failure in failed.failures.items()}
    except BaseException:
        error = traceback.format_exc()
    told = Path(os.environ[FOLDER_VARIABLE]) / "torchrun.json"
    ranks.write_whole(told, json.dumps({"exits": exits, "error": error}))


if __name__ == "__main__":
    _torchrun(sys.argv[1:])
