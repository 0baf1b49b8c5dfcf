"""All ways into a run: the launcher, a plain torchrun, one Slurm task for each rank, and `fit`.

Each starts the same job in a folder, as forks of a process that has imported torch (`preloaded`).
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers import preloaded
from tests.helpers.ports import free_port
from tests.helpers.waiting import SECONDS, until

ROOT = Path(__file__).parents[2]
RANKS = {"launcher 1": 1, "launcher 2": 2, "torchrun 1": 1, "torchrun 2": 2, "slurm 2": 2, "fit": 1}
RAISED = 99  # an exit code, of `fit` with bad input
_TRAINER = (sys.executable, "-m", "trainer")
# Each rank's streams go to files of its own: what torchrun itself says, which is its affair, stays apart.
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--redirects=3", "--log-dir=ranks")
_FIT = f"""
import json, sys
from trainer import BadInputError, fit
task, options = json.loads(sys.argv[1])
try:
    fit(task, **options)
except BadInputError as error:
    print(error, file=sys.stderr)
    sys.exit({RAISED})
"""

# A custom task, whose bits are the same on any number of ranks.
OWN = """
import numpy as np
from torch import nn
from torch.nn import functional as F

RECIPE = {
    "max_steps": 6,
    "data": {"global_batch_size": 8, "micro_batch_size": 4, "workers": 0},
    "evaluation": {"every": "end"},
    "parallel": {"threads": 1, "reduction": "tree"},
    "log": {"every": 2, "to": ["jsonl"]},
    "checkpoint": {"every": 0, "minutes": 0, "best": False},
}

class Own:
    def data(self):
        x = np.arange(200, dtype=np.float32).reshape(100, 2) / 100
        return {"x": x, "y": x[:, :1]}, {"x": x[:30], "y": x[:30, :1]}
    def model(self):
        return nn.Linear(2, 1)
    def loss(self, model, batch):
        return F.mse_loss(model(batch.fields["x"]), batch.fields["y"], reduction="none")
    def measure(self, model, batch):
        return {"loss": self.loss(model, batch)}
"""


class Job(NamedTuple):
    """What is asked for: a task, settings, and options of the command."""

    task: str = "digits"
    settings: Mapping[str, Any] = {}
    options: Mapping[str, str] = {}

    @property
    def words(self) -> list[str]:
        """The command of the job, in the run folder `run`."""
        flags = [word for name, value in self.options.items() for word in (f"--{name}", value)]
        settings = [f"{key}={json.dumps(value)}" for key, value in self.settings.items()]
        return ["train", self.task, *settings, "--out", "run", *flags]


class Ended(NamedTuple):
    """How a job ended: its exit code, as a shell or srun gives it, or RAISED; its ranks' lines on stderr."""

    code: int
    lines: list[str]


class Started:
    """A job that runs in a folder, by one of the ways."""

    def __init__(self, way: str, folder: Path, job: Job) -> None:
        self._folder, self._stderr = folder, (folder / "stderr").open("w")
        kind, ranks = way.split(maxsplit=1)[0], RANKS[way]
        self._logs = "ranks/**/stderr.log" if kind == "torchrun" else "stderr"
        self.processes: list[subprocess.Popen[Any]] = []
        if kind == "launcher":
            self._start(*_TRAINER, *job.words, "--nproc-per-node", str(ranks))
        elif kind == "torchrun":
            options = dict(job.options)
            own = [f"--master-port={free_port()}", f"--max-restarts={options.pop('max-restarts', 0)}"]
            words = job._replace(options=options).words
            self._start(*_TORCHRUN, *own, f"--nproc-per-node={ranks}", "-m", "trainer", *words)
        elif kind == "slurm":
            for environment in slurm_tasks(ranks, free_port()):
                self._start(*_TRAINER, *job.words, **environment)
        else:
            names = {"init-from": "from_run"}
            options = {names.get(name, name): value for name, value in job.options.items()}
            asked = [job.task, {"settings": dict(job.settings), "out": "run", **options}]
            self._start(sys.executable, "-c", _FIT, json.dumps(asked))

    def _start(self, *words: str, **environment: str) -> None:
        silent: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": self._stderr}
        own = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        process = preloaded.Popen(words, cwd=self._folder, env=own, **silent)
        self.processes.append(process)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal as who stops the job does: to what was started, and not to what that has started."""
        for process in self.processes:
            if self._logs != "stderr":  # a torchrun that starts its ranks would leave them
                until(lambda: "nanosleep" in Path(f"/proc/{process.pid}/wchan").read_text())  # noqa: B023
            process.send_signal(number)

    def end(self) -> Ended:
        """Waits for the end."""
        try:
            codes = [process.wait(SECONDS) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        self._stderr.close()
        said = [path.read_text() for path in sorted(self._folder.glob(self._logs))]
        # Where the tests' folder lies in a container's own layer, a line says how a run is kept.
        lines = [line for text in said for line in text.splitlines() if "docker run" not in line]
        return Ended(max(128 - code if code < 0 else code for code in codes), lines)


def slurm_tasks(ranks: int, port: int) -> list[dict[str, str]]:
    """Variables of the tasks of a step on one node, a task for each rank, as `env` prints them there."""
    printed = "SLURM_JOB_ID=1234 SLURM_JOB_NUM_NODES=1 SLURM_JOB_NODELIST=localhost SLURM_STEP_ID=0"
    printed += f" SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS={ranks} SLURM_STEP_NODELIST=localhost"
    printed += f" SLURM_NODEID=0 SLURM_NTASKS={ranks} MASTER_PORT={port}"
    step = dict(word.split("=") for word in printed.split())
    return [{**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(ranks)]
