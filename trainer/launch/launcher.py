"""Starts ranks with torchrun and restores what it hides: the exit code, the cause, and the signals.

This module imports no torch: it starts a process that runs torchrun's own code (or, for a single rank, the
rank), finds the ranks through files that they write, sends them the signals directly, and reads how each
ended. torchrun sees no signal, so that none kills it; what it logs is not shown.
"""

import json
import logging
import os
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from trainer.config.redact import redact_text
from trainer.errors import EXIT_FAILED
from trainer.host.files import write_whole
from trainer.launch import as_launcher
from trainer.launch.exit_record import Outcome, explain, job_code
from trainer.launch.local_job import LocalJob
from trainer.launch.nodes.interface import gloo_interface
from trainer.launch.nodes.meeting import Table
from trainer.launch.rank import FOLDER_VARIABLE, PARENT_VARIABLE, die_with_parent
from trainer.launch.signals import Inbox


def launch(
    arguments: Sequence[str],
    *,
    processes: int,
    threads: int,
    environment: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    grace_seconds: float = 25.0,
    module: str = "trainer",
    output: int | None = None,
    inbox: Inbox | None = None,
) -> int:
    """Runs `python -m module arguments` as ranks of this host and returns the job's exit code.

    Call it in the main thread. The ranks find modules where this process does, not in the working folder.

    Args:
        arguments: What each rank gets as its command line.
        processes: Ranks on this node.
        threads: Intra-op threads of each rank (OMP_NUM_THREADS, MKL_NUM_THREADS).
        environment: Further variables for the ranks.
        max_restarts: How often all ranks start again after a failure (code 1).
        grace_seconds: How long ranks have to end after a signal, or after one of them asked to be requeued.
        module: What each rank runs; it must call `trainer.launch.rank.run_rank`.
        output: A file descriptor that takes the standard output of the ranks; by default this process's own.
        inbox: Where the caller takes the signals, if it does; by default they are taken here.

    Returns:
        0 done, 2 bad input, 75 requeue, 76 hang, 1 anything else; on failure the cause is on stderr.
    """
    variables = {**(environment or {}), **thread_variables(threads)}
    if processes > 1:
        variables = {**gloo_interface("127.0.0.1"), **variables}
    with nullcontext(inbox) if inbox else Inbox() as signals:
        for attempt in range(1, max_restarts + 2):
            outcomes = run_ranks(
                [module, *arguments],
                range(processes),
                processes,
                _alone(),
                variables,
                signals,
                grace_seconds,
                output,
            )
            say(explain(outcomes, processes))
            code = job_code(outcomes)
            if code != EXIT_FAILED or signals.received or attempt > max_restarts:
                break
            say(f"trainer: starting again ({attempt} of {max_restarts})\n")
    return code


def thread_variables(threads: int) -> dict[str, str]:
    """What sets the intra-op threads of a rank before it imports torch."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def run_ranks(
    command: Sequence[str],
    local: range,
    world: int,
    rendezvous: Sequence[str],
    variables: Mapping[str, str],
    inbox: Inbox,
    grace_seconds: float,
    output: int | None = None,
    table: Table | None = None,
) -> list[Outcome]:
    """Runs this node's ranks once, and returns how each ended.

    Args:
        command: A module and its arguments.
        local: Their global numbers.
        world: Ranks on all nodes.
        rendezvous: torchrun's options for that.
        variables: Further ones for the ranks.
        inbox: Takes the signals.
        grace_seconds: As of `launch`.
        output: As of `launch`.
        table: The other nodes' launchers.
    """
    with tempfile.TemporaryDirectory(prefix="trainer-launch-", ignore_cleanup_errors=True) as folder:
        start = [sys.executable, "-u", as_launcher.__file__]
        if world == 1:  # torchrun would only add the seconds in which it imports torch
            alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
            return LocalJob(Path(folder), inbox, local, world, grace_seconds, table).run(
                [*start, *command], {**variables, **alone}, output
            )
        base = [f"--nproc-per-node={len(local)}", "--max-restarts=0", f"--log-dir={folder}", *rendezvous]
        return LocalJob(Path(folder), inbox, local, world, grace_seconds, table).run(
            [*start, "trainer.launch.launcher", *base, "--", *command], variables, output
        )


def _alone() -> list[str]:
    # Port 0: the system chooses, so that launches don't clash.
    options = ["--nnodes=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={_here()}:0", "--rdzv-conf=is_host=1"]
    return [*options, f"--rdzv-id=trainer-{os.getpid()}", f"--local-addr={_here()}"]


def _here() -> str:
    """What this host calls itself without asking a name service.

    torch asks one for the name of 127.0.0.1, which it writes as an IPv6 address that no hosts file has; where
    none answers that takes ten seconds at each connection. `localhost` is ::1 first, which has a name; where
    there is no IPv6 it is 127.0.0.1 again, if the hosts file says so.
    """
    try:
        lines = [line.partition("#")[0].split() for line in Path("/etc/hosts").read_text().splitlines()]
    except (OSError, UnicodeDecodeError):
        lines = []
    known = any(line[:1] == ["127.0.0.1"] and "localhost" in line for line in lines)
    return "localhost" if known else "127.0.0.1"


def say(text: str) -> None:
    """Prints for people, on stderr, without secrets."""
    with suppress(OSError):  # nobody reads stderr any more: the exit code still counts
        print(redact_text(text), end="", file=sys.stderr, flush=True)


def _torchrun(argv: Sequence[str]) -> None:
    """Runs torchrun's own code on `options -- module arguments`; leaves word of which ranks failed."""
    die_with_parent()
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
    write_whole(told, json.dumps({"exits": exits, "error": error}))


if __name__ == "__main__":
    _torchrun(sys.argv[1:])
