"""A real Slurm of two nodes on this one host, for tests/launch/test_slurm.py; without systemd.

Each slurmd calls itself a node by -N. It needs root, and Debian's packages slurm-wlm and munge.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.helpers import waiting
from tests.helpers.ports import free_port

# Names and ports of its own: two test processes may each have a cluster, whose jobs have the same numbers.
PREFIX = f"trainer{os.getpid()}-n"
NODES = (f"{PREFIX}1", f"{PREFIX}2")
PORT = free_port()
_CONF = """
ClusterName=trainer
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
PropagateResourceLimits=NONE
ReturnToService=2
JobRequeue=1
KillWait=5
MpiDefault=none
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be none here, or nothing."""
    programs = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if not shutil.which(name)]
    if programs:
        return f"no {', '.join(programs)} here: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "a Slurm of one's own needs root"


class Slurm:
    """The running cluster.

    Attributes:
        environment: For programs that talk to it.
    """

    def __init__(self, folder: Path) -> None:
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def tell(self, *words: str) -> str:
        """Runs one of Slurm's programs and returns what it prints."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Of a job: PENDING, RUNNING, COMPLETED…; a job that is forgotten is COMPLETED."""
        shown = self.tell("scontrol", "show", "job", "--oneliner", job)
        return shown.partition(" JobState=")[2].partition(" ")[0]

    def release(self, job: str) -> None:
        """Lets a requeued job start soon; Slurm would wait for two minutes."""

        def started() -> bool:
            if self.state(job) == "PENDING":
                # Not within the second of its end: slurmd would take its new credential for the revoked one.
                time.sleep(3.0)
                # (It may have started by itself meanwhile, and then refuses.)
                words = ["scontrol", "update", f"jobid={job}", "StartTime=now"]
                subprocess.run(words, env=self.environment, capture_output=True, check=False)
            return self.state(job) == "RUNNING"

        until(lambda: self.state(job) == "PENDING")
        until(started)


def until(condition: Callable[[], object], told: Callable[[], object] = lambda: "") -> None:
    """As `tests.helpers.waiting`; Slurm takes its time."""
    waiting.until(condition, told, seconds=400.0)


@contextmanager
def running(folder: Path) -> Iterator[Slurm]:
    """Starts a cluster and ends it, with all that ran on it."""
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    for name in ("state", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir()
    host = socket.gethostname().partition(".")[0]
    first = free_port()
    ports = range(first, first + 3)
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=8000"
        for node, port in zip(NODES, ports[1:], strict=True)
    )
    (folder / "slurm.conf").write_text(_CONF.format(host=host, folder=folder, ports=ports, nodes=nodes))
    slurm = Slurm(folder)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    munge = ["munged", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munge += [
        f"--pid-file={folder}/munge.pid",
        f"--log-file={folder}/munge.log",
        f"--seed-file={folder}/seed",
    ]
    try:
        for command in (munge, ["slurmctld", "-c", "-i"], *(["slurmd", "-N", node] for node in NODES)):
            subprocess.run(command, env=slurm.environment, check=True, timeout=60)
        until(lambda: slurm.tell("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").count("\n") == len(NODES) - 1)
        yield slurm
    finally:
        subprocess.run(
            ["scancel", "--user=root", "--signal=KILL", "--full"], env=slurm.environment, check=False
        )
        for pid in [*folder.glob("slurmd.*.pid"), folder / "slurmctld.pid", folder / "munge.pid"]:
            with suppress(OSError, ValueError):
                os.kill(int(pid.read_text()), signal.SIGTERM)
