"""A real Slurm of two nodes on this one host, for tests/launch/test_slurm.py; without systemd.

Each slurmd calls itself a node by -N. It needs root, and Debian's packages slurm-wlm and munge. A node that a
test sets down stays down until it is resumed (ReturnToService=1).
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
from tests.helpers.programs import ran

# Names and ports of its own: two test processes may each have a cluster, whose jobs have the same numbers.
PREFIX = f"trainer{os.getpid()}-n"
NODES = (f"{PREFIX}1", f"{PREFIX}2")
# A job's script adds its number to the port: this is enough for 31 jobs.
PORT = free_port(32)
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
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
PropagateResourceLimits=NONE
ReturnToService=1
JobRequeue=1
KillWait=5
MpiDefault=none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PreemptMode=OFF
PartitionName=spare Nodes=ALL MaxTime=INFINITE State=UP GraceTime=120
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""


def missing() -> str:
    """Returns why no Slurm can be started here, or ""."""
    programs = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if not shutil.which(name)]
    if programs:
        return f"no {', '.join(programs)} here: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "a Slurm of one's own needs root"


class Slurm:
    """The running cluster, and the `environment` of programs that talk to it."""

    def __init__(self, folder: Path) -> None:
        # Jobs run the trainer of this checkout, wherever the environment has its own.
        own = {"SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": str(Path(__file__).parents[2])}
        self.environment = {**os.environ, **own}

    def tell(self, *words: str, cwd: Path | None = None, **environment: str) -> str:
        """Runs one of Slurm's programs and returns what it prints."""
        own = {**self.environment, **environment}
        return ran(*words, code=0, env=own, cwd=cwd, timeout=300).stdout.strip()

    def tidy(self) -> None:
        """Cancels all jobs and takes all nodes back, as far as there are such."""
        resume = [("scontrol", "update", f"nodename={node}", "state=resume") for node in NODES]
        for words in (("scancel", "--user=root"), *resume):
            ran(*words, env=self.environment, timeout=300)

    def state(self, job: str) -> str:
        """The state of a job: PENDING, RUNNING, COMPLETED…; Slurm forgets it five minutes after its end."""
        shown = self.tell("scontrol", "show", "job", "--oneliner", job)
        return shown.partition(" JobState=")[2].partition(" ")[0]

    def completes(self, job: str, log: Path) -> None:
        """Waits for the end of a job, which is to be a good one."""
        unended = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "STOPPED", "SUSPENDED")
        until(lambda: self.state(job) not in unended, lambda: _text(log))
        assert (state := self.state(job)) == "COMPLETED", f"{state}\n{_text(log)}"

    def release(self, job: str) -> None:
        """Lets a requeued job start soon; Slurm would wait for two minutes."""

        def started() -> bool:
            if self.state(job) == "PENDING":
                # Not within the second of its end: slurmd would take its new credential for the revoked one.
                time.sleep(3.0)
                # (It may have started by itself meanwhile, and then refuses.)
                words = ["scontrol", "update", f"jobid={job}", "StartTime=now"]
                ran(*words, env=self.environment)
            return self.state(job) == "RUNNING"

        until(lambda: self.state(job) == "PENDING")
        until(started)


def _text(log: Path) -> str:
    return log.read_text() if log.exists() else f"there is no {log}"


def until(condition: Callable[[], object], told: Callable[[], object] = lambda: "") -> None:
    """Waits like `tests.helpers.waiting.until`, with Slurm's patience."""
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
    ports = range(first, first + 1 + len(NODES))
    about = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=8000 CpuBind=cores"
    nodes = "\n".join(f"NodeName={n} Port={port} {about}" for n, port in zip(NODES, ports[1:], strict=True))
    (folder / "slurm.conf").write_text(_CONF.format(host=host, folder=folder, ports=ports, nodes=nodes))
    slurm = Slurm(folder)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    munge = ["munged", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    files = {"pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "seed"}
    munge += [f"--{option}={folder / name}" for option, name in files.items()]
    try:
        for command in (munge, ["slurmctld", "-c", "-i"], *(["slurmd", "-N", node] for node in NODES)):
            subprocess.run(command, env=slurm.environment, check=True, timeout=300)
        idle = ("sinfo", "-h", "-p", "main", "-N", "-t", "idle", "-o", "%N")
        until(lambda: slurm.tell(*idle).count("\n") == len(NODES) - 1)
        yield slurm
    finally:
        words = ["scancel", "--user=root", "--signal=KILL", "--full"]
        subprocess.run(words, env=slurm.environment, check=False)
        for pid in [*folder.glob("slurmd.*.pid"), folder / "slurmctld.pid", folder / "munge.pid"]:
            with suppress(OSError, ValueError):
                os.kill(int(pid.read_text()), signal.SIGTERM)
